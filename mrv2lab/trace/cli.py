"""``mrv2lab trace report``, ``compare`` and ``convert``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

trace_app = typer.Typer(no_args_is_help=True, help="Read, compare and convert profiler traces and recordings.")

File = Annotated[Path, typer.Argument(help="A torch profiler trace (.json, .json.gz), nsys .sqlite, or a recording.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object.")]
SHOWN = 8
"""Rows of a table on the screen; --json has all."""


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
        console.print(_facts(facts))
        for table in _tables(facts):
            console.print(table)
        _sentences(console, "problem", facts["problems"])
        _sentences(console, "cannot say", facts["cannot_say"])


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
        console = Console()
        console.print(plain(comparison.verdict))
        console.print(_comparison(comparison.to_dict()["frame"], f"a: {a.name}   b: {b.name}"))
        _sentences(console, "because", comparison.reasons)


@trace_app.command()
def convert(
    file: File, out: Annotated[Path, typer.Argument(help="Chrome JSON for ui.perfetto.dev; .json or .json.gz.")]
) -> None:
    """Write any trace or recording as JSON that Perfetto draws without dropping overlapping kernels."""
    with _errors():
        from mrv2lab.trace.read import load
        from mrv2lab.trace.write import write_perfetto

        trace = load(file)
        write_perfetto(trace, out)
        typer.echo(f"{plain(str(out))}: {len(trace):,} events, {out.stat().st_size / 1e6:.2f} MB")


def plain(text: str) -> Text:
    """``text`` from a file that may be hostile: neither markup nor anything that a terminal would obey."""
    return Text("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text))


@contextmanager
def _errors() -> Iterator[None]:
    """One red sentence on stderr and exit code 1 instead of a traceback."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        sentence = plain(" ".join(str(error).split()) or type(error).__name__)
        typer.secho(f"mrv2lab: {sentence}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None


def _print_json(facts: dict[str, Any]) -> None:
    typer.echo(orjson.dumps(facts, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY).decode())


def _facts(facts: dict[str, Any]) -> Table:
    table = Table(title=plain(facts["title"]), show_header=False)
    table.add_row("verdict", plain(facts["verdict"]["sentence"]))
    table.add_row("events", f"{facts['events']:,}, {facts['gpu_events']:,} on a device")
    devices = facts["devices"] if len(facts["devices"]) > 2 else facts["devices"][:1]  # of one, the total says the same
    for device in devices:
        share = f"busy {_ms(device['busy_ns'])} of {_ms(device['span_ns'])} ({device['busy_share']:.2%})"
        modelled = ", modelled" if facts["modelled"] else ""
        table.add_row(plain(f"device {device['device']}"), f"{share}, {device['events']:,} events{modelled}")
    labels = ", ".join(f"{count:,} {label}" for label, count in facts["same_stream_labels"].items() if count)
    table.add_row("overlaps in one stream", f"{facts['same_stream_overlaps']:,}{f' ({labels})' if labels else ''}")
    table.add_row("work without its launch", f"{facts['orphan_gpu_events']:,}")
    table.add_row("kernels of one launch", f"at most {facts['max_kernels_per_launch']:,}")
    table.add_row("launches queued", f"at most {facts['max_queue_depth']:,}")
    for cause, gap in facts["gaps"].items():
        table.add_row(plain(f"idle: {cause}"), f"{_ms(gap['ns'])} in {gap['count']:,} gaps")
    return table


def _tables(facts: dict[str, Any]) -> Iterator[Table]:
    columns = {
        "steps": ("step", "kind", "host_ns", "gpu_busy_ns", "gpu_events", "launches"),
        "syncs": ("kind", "call", "api_ns", "caller_ns", "overhead_ns", "site"),
    }
    for name, shown in columns.items():
        found = facts[name]
        if not found:
            continue
        beyond = f" (the first {SHOWN} of {len(found):,})" if len(found) > SHOWN else ""
        table = Table(title=f"{name}{beyond}")
        for column in shown:
            table.add_column(column.removesuffix("_ns"), justify="right" if column.endswith("_ns") else "left")
        for row in found[:SHOWN]:
            table.add_row(
                *(plain(_unless_unknown(row[one]) if one.endswith("_ns") else _cell(row[one])) for one in shown)
            )
        yield table


def _comparison(rows: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=plain(title))
    shown = ("phase", "n_a", "n_b", "median_a_ns", "median_b_ns", "difference_ns", "verdict")
    for column in shown:
        table.add_column(column.removesuffix("_ns"), justify="right" if column.endswith("_ns") else "left")
    for row in rows[: 3 * SHOWN]:
        table.add_row(*(plain(_us(row[one]) if one.endswith("_ns") else _cell(row[one])) for one in shown))
    return table


def _sentences(console: Console, label: str, sentences: Sequence[str]) -> None:
    for sentence in sentences[:SHOWN]:
        console.print(f"{label}: ", plain(sentence), sep="", soft_wrap=True)
    if len(sentences) > SHOWN:
        console.print(f"{label}: {len(sentences) - SHOWN:,} more, see --json", soft_wrap=True)


def _ms(ns: int) -> str:
    return f"{ns / 1e6:,.3f} ms"


def _us(ns: float | None) -> str:
    return "-" if ns is None else f"{ns / 1e3:,.1f} us"


def _unless_unknown(ns: int) -> str:
    """A length: -1 stands for one that was not recorded."""
    return _us(None if ns < 0 else ns)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
