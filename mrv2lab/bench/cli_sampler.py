"""``mrv2lab bench sampler``: the sampler's kernels beside every peer that is here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer


def sampler(
    device: Annotated[str, typer.Option(help="'auto', 'cpu' or 'cuda'.")] = "auto",
    rows: Annotated[int | None, typer.Option(help="Logits rows; 256 on a GPU, 4 on a CPU.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Tokens; 151,936 on a GPU, 4,096 on a CPU.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Timed runs of each entrant; 20 on a GPU, 5 on a CPU.")] = None,
    op: Annotated[list[str] | None, typer.Option(help="Only this one; may be given several times.")] = None,
    vllm_kernels: Annotated[
        Path | None, typer.Option(help="A folder with vLLM's kernel files: see mrv2lab/bench/vllm_kernels.py.")
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="Only this one: torch, flashinfer, vllm; may be given several times.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the result here after each op, with machine, versions and command.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, its measurements under 'rows'.")] = False,
) -> None:
    """Time the sampler's kernels and every peer that is installed, in one run."""
    try:
        from mrv2lab.bench.machine import describe_machine
        from mrv2lab.bench.result import check_writable, write_result
        from mrv2lab.bench.sampler_batch import OPS
        from mrv2lab.bench.sampler_bench import PEERS, bench
    except ImportError as error:
        _fail(f"the benchmark needs {error.name or error}; in a checkout: pip install -e '.[engine]'")

    def keep(figures: dict[str, Any]) -> None:
        if out is not None:
            write_result(out, f"sampler_{figures['device']}", figures)

    try:
        if out is not None:
            check_writable(out)
        figures = bench(
            device, rows=rows, vocab=vocab, repeats=repeats, ops=tuple(op or OPS), vllm_kernels=vllm_kernels,
            peers=tuple(peer or PEERS), keep=keep, progress=not as_json,
        )  # fmt: skip
        keep(figures)
    except KeyboardInterrupt:
        _fail("interrupted" if out is None else f"interrupted; the ops that were measured are in {out}", 130)
    except (ValueError, RuntimeError, OSError, TypeError) as error:
        _fail(error)
    if as_json:
        machine = describe_machine()
        machine.pop("missing")
        typer.echo(orjson.dumps({**figures, "machine": machine}, option=orjson.OPT_INDENT_2).decode())
        return
    where = "kernels" if figures["device"] == "cuda" else "NumPy and torch definitions: no figure of a kernel"
    typer.echo(f"{figures['device']}, {where}; a copy moves {figures['copy_GB_per_s']:.0f} GB/s")
    head = (
        f"{'op':10} {'rows x vocab':>14} {'dtype':8} {'median us':>10} {'IQR':>8} {'peak MiB':>9} {'of copy':>8}  impl"
    )
    typer.echo(head)
    for row in figures["rows"]:
        shape = f"{row['rows']} x {row['vocab']}"
        numbers = f"{row['median_us']:10.1f} {row['iqr_us']:8.1f} {row['peak_bytes'] / 2**20:9.2f}"
        share = f"{row['fraction_of_copy_bandwidth']:8.1%}"
        typer.echo(f"{row['op']:10} {shape:>14} {row['dtype']:8} {numbers} {share}  {row['impl']}")
    for row in figures.get("penalties_by_length", []):
        length, us = row["output_len"], row["median_us"]
        typer.echo(f"penalties of a step behind {length:5} tokens of output: {us:10.1f} us  {row['impl']}")
    for name, seconds in figures["slow_to_start"].items():
        typer.echo(f"first call: {name} - {seconds} s")
    for name, reason in {**figures["absent"], **figures["failed"]}.items():
        typer.echo(f"absent: {name} - {reason}")


def _fail(error: Exception | str, code: int = 2) -> Any:
    """One line on stderr and the exit code, which is that of wrong usage."""
    typer.echo(f"mrv2lab: {' '.join(str(error).split())}", err=True)
    sys.exit(code)
