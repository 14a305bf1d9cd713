"""``mrv2lab bench engine``: our engine beside every peer that is here."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer


def engine(
    workload: Annotated[list[str] | None, typer.Option(help="A, B or C; may be given several times.")] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="'vllm' (both runners), 'vllm-mrv2', 'vllm-v1', 'transformers' or 'none'; several times."),
    ] = None,
    runner: Annotated[list[str] | None, typer.Option(help="Ours: 'mrv2' or 'v1'; several times.")] = None,
    device: Annotated[str, typer.Option(help="'auto', 'cpu' or 'cuda'.")] = "auto",
    repetitions: Annotated[int | None, typer.Option(help="Rounds; 9 on a GPU, 3 on a CPU.")] = None,
    over_v1: Annotated[bool, typer.Option(help="MRV2 over V1 by number of requests, too.")] = True,
    limit: Annotated[float | None, typer.Option(help="Seconds after which no further round begins.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="An option of our engine, NAME=VALUE: attention=triton, num_blocks=None, count_nans=true, "
            "cudagraph_capture_sizes=1,2,4. Several times; one that a runner does not have goes to the other."
        ),
    ] = None,
    vllm_site: Annotated[
        Path | None, typer.Option(help="A folder with vLLM's packages, for its process and transformers' alone.")
    ] = None,
    logs: Annotated[Path | None, typer.Option(help="A folder for what the engines' processes print.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the result here, with machine, versions and command.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, its measurements under 'rows'.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture of the result here, as a page.")] = None,
) -> None:
    """Race our engine against every peer that is installed, one repetition each in turn."""
    try:
        from mrv2lab.bench.engine_bench import bench
        from mrv2lab.bench.engine_options import parsed
        from mrv2lab.bench.engine_pictures import race_picture
        from mrv2lab.bench.machine import describe_machine
        from mrv2lab.bench.result import check_writable, write_result
    except ImportError as error:
        _fail(f"the benchmark needs {error.name or error}; in a checkout: pip install -e '.[engine]'")

    def save(made: dict[str, Any]) -> None:
        if out is not None:
            write_result(out, f"engine_{made['device']}", made)

    def save_so_far(made: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the race; the end says so
            save(made)

    runners = tuple(dict.fromkeys(runner or ("mrv2", "v1")))
    try:
        for path in filter(None, (out, plot)):
            check_writable(path)
        figures = bench(
            device, workloads=tuple(workload or ()), peers=tuple(peer or ()), runners=runners,
            repetitions=repetitions, compare_runners=over_v1, options=parsed(option or ()), vllm_site=vllm_site,
            logs=logs, limit_s=limit if limit is not None else float("inf"), save=save_so_far,
            progress=sys.stderr.isatty() or not as_json,
        )  # fmt: skip
    except (ValueError, RuntimeError, OSError, TypeError) as error:
        _fail(error)
    trouble = None
    try:  # before anything is printed, since a pipe may end there; what was measured is shown in any case
        save(figures)
        if plot is not None:
            plot.parent.mkdir(parents=True, exist_ok=True)
            race_picture(figures).write_html(plot, include_plotlyjs=True)
    except OSError as error:
        trouble = error
    if as_json:
        machine = describe_machine()
        machine.pop("missing")
        typer.echo(orjson.dumps({**figures, "machine": machine}, option=orjson.OPT_INDENT_2).decode())
    else:
        for line in table(figures):
            typer.echo(line)
    if trouble is not None:
        _fail(trouble)
    lost = [f"mrv2lab {one}" for one in runners if f"mrv2lab {one}" in {**figures["absent"], **figures["failed"]}]
    if lost:
        _fail(f"did not run to the end: {', '.join(lost)}", 1)


def table(figures: dict[str, Any]) -> list[str]:
    """The result as lines of text."""
    if figures["device"] == "cuda":
        lines = [f"{figures['model']}, random weights N(0, 0.02)"]
    else:
        lines = ["cpu, the shipped model, tiny workloads: no figure of an engine's speed"]
    head = f"{'load':5}{'sampling':9}{'engine':16}{'tokens/s':>10}{'ms/token':>10}"
    lines.append(f"{head}  {'median s [min..max]':24}{'spread':>7}")
    for row in figures["rows"]:
        name = row["impl"] if row["runner"] == "-" else f"{row['impl']} {row['runner']}"
        walls = f"{row['median_s']:.4f} [{row['min_s']:.4f}..{row['max_s']:.4f}]"
        numbers = f"{row['output_tokens_per_s']:10.1f}{row['ms_per_token']:10.3f}  {walls:24}{row['spread']:7.1%}"
        lines.append(f"{row['workload']:5}{row['sampling']:9}{name:16}{numbers}  x{row['repetitions']}")
    for one in figures["ratios"]:
        low, high = one["throughput_range"]
        what = f"{one['workload']} {one['sampling']}: {one['of']} / {one['over']}"
        ratio = f"tokens/s x {one['throughput']:.2f} [{low:.2f}..{high:.2f}]"
        lines.append(f"{what:48} {ratio}, ms/token x {one['ms_per_token']:.2f}")
    lines += _over_v1(figures.get("mrv2_over_v1", []))
    lines += [f"absent: {name} - {reason}" for name, reason in figures["absent"].items()]
    lines += [f"failed: {name} - {reason}" for name, reason in figures["failed"].items()]
    for name, reasons in figures.get("options_left_out", {}).items():
        lines += [f"left out: {option} of {name} - {reason}" for option, reason in reasons.items()]
    return lines


def _over_v1(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Ratios, and a step's host microseconds: the runner's own phases and the shared ones, waits apart."""
    if not rows:
        return []
    lines = [
        f"{'mrv2 / v1':9}{'sampling':>9}{'requests':>9}{'tokens/s':>10}{'rounds':>15}   host us a step, own phases"
    ]
    for row in rows:
        low, high = row["ratio_range"]
        own = {runner: us.get("runner's own phases", 0.0) for runner, us in row["host_us"].items()}
        note = "" if row["resolved"] else "  not resolved"
        numbers = f"{row['requests']:9}{row['ratio']:9.2f}x{f'[{low:.2f}..{high:.2f}]':>15}"
        lines.append(f"{row['kind']:9}{row['sampling']:>9}{numbers}   v1 {own['v1']:.0f}, mrv2 {own['mrv2']:.0f}{note}")
    return lines


def _fail(error: Exception | str, code: int = 2) -> Any:
    """One line on stderr and the exit code, which is that of wrong usage."""
    typer.echo(f"mrv2lab: {' '.join(str(error).split())}", err=True)
    sys.exit(code)
