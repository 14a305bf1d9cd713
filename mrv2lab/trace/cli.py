"""``mrv2lab trace report``, ``compare`` and ``convert``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console

from mrv2lab.trace.screen import changes_table, comparison_table, facts_table, plain, sentences, tables, untold

trace_app = typer.Typer(no_args_is_help=True, help="Read, compare and convert profiler traces and recordings.")

File = Annotated[Path, typer.Argument(help="A torch profiler trace (.json, .json.gz), nsys .sqlite, or a recording.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object.")]


@trace_app.command()
def report(file: File, as_json: Json = False) -> None:
    """What happened in one trace: busy time, steps, waits, gaps and what the file cannot say."""
    with _errors():
        from mrv2lab.trace.read import load
        from mrv2lab.trace.report import report as report_of

        facts = report_of(load(file))
        if as_json:
            _print_json(facts)
            return
        console = Console()
        if facts["cut_off"]:
            console.print(plain(f"{facts['title']}: THE FILE WAS CUT OFF; what follows is of the part that is there."))
        sentences(console, "problem", facts["problems"])
        console.print(facts_table(facts))
        for table in tables(facts, console.width):
            console.print(table)
        sentences(console, "cannot say", facts["cannot_say"])


@trace_app.command()
def compare(
    a: File,
    b: File,
    align: Annotated[
        str, typer.Option(help="'auto', 'step', 'first kernel', 'start', 'clock' or 'collective'.")
    ] = "auto",
    as_json: Json = False,
) -> None:
    """Two traces phase by phase: which is faster in what, or why that cannot be told."""
    with _errors():
        from mrv2lab.trace.compare import compare as compare_traces
        from mrv2lab.trace.read import load

        comparison = compare_traces(load(a), load(b), align=align)  # type: ignore[arg-type]
        if as_json:
            _print_json(comparison.to_dict())
            return
        console, facts = Console(), comparison.to_dict()
        console.print(plain(comparison.verdict))
        console.print(plain(comparison.workload))
        sentences(console, "because", comparison.reasons)
        console.print(comparison_table(facts["frame"], f"a: {a.name}   b: {b.name}"))
        for line in untold(facts["frame"]):
            console.print(plain(line), soft_wrap=True)
        if changed := changes_table(facts["kernels"]):
            console.print(changed)


@trace_app.command()
def convert(
    file: File,
    out: Annotated[Path, typer.Argument(help="Chrome JSON for ui.perfetto.dev; .json or .json.gz.")],
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Write any trace or recording as JSON that Perfetto draws without dropping overlapping kernels."""
    with _errors():
        _check_target(file, out, force)
        from mrv2lab.trace.read import load
        from mrv2lab.trace.write import write_perfetto

        trace = load(file)
        write_perfetto(trace, out)
        typer.echo(f"{plain(str(out))}: {len(trace):,} events, {out.stat().st_size / 1e6:.2f} MB")


@contextmanager
def _errors() -> Iterator[None]:
    """One red sentence on stderr and exit code 1 instead of a traceback."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        sentence = plain(" ".join(str(error).split()) or type(error).__name__)
        typer.secho(f"mrv2lab: {sentence}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None


def _check_target(file: Path, out: Path, force: bool) -> None:
    """Raises ``ValueError`` where writing ``out`` would lose something, or make a file that nobody can open."""
    if not out.name.endswith((".json", ".json.gz")) or out.name in (".json", ".json.gz"):
        raise ValueError(f"{out}: the name of a Chrome trace ends in .json or .json.gz; give it one of these")
    if out.is_dir():
        raise ValueError(f"{out}: is a folder; give the name of a file")
    if out.exists() and file.exists() and out.samefile(file):
        raise ValueError(f"{out}: is the file to be converted; write to another name")
    if out.exists() and not force:
        raise ValueError(f"{out}: is there already; write to another name, or over it with --force")


def _print_json(facts: dict[str, Any]) -> None:
    typer.echo(orjson.dumps(facts, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY).decode())
