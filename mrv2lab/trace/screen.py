"""What ``mrv2lab trace`` shows on a screen of 80 columns: tables and sentences."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

SHOWN = 8
"""Rows of a table on the screen; --json has all."""
SITE = 25
"""Characters of a call site on 80 columns."""
NAME = 19
"""Characters of a step's name on 80 columns."""
_HEADINGS = {"gpu_events": "gpu work"}
_NUMBER = re.compile(r"#?\d+$")


def plain(text: str) -> Text:
    """``text`` from a file that may be hostile: neither markup nor anything that a terminal would obey."""
    return Text("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text))


def sentences(console: Console, label: str, said: Sequence[str]) -> None:
    """The first few of them, each on a line of its own."""
    for sentence in said[:SHOWN]:
        console.print(f"{label}: ", plain(sentence), sep="", soft_wrap=True)
    if len(said) > SHOWN:
        console.print(f"{label}: {len(said) - SHOWN:,} more, see --json", soft_wrap=True)


# -- report


def facts_table(facts: dict[str, Any]) -> Table:
    """The figures of :func:`mrv2lab.trace.report.report` that are single ones."""
    table = Table(title=plain(facts["title"]), show_header=False)
    table.add_row("verdict", plain(facts["verdict"]["sentence"]))
    table.add_row("events", f"{facts['events']:,}, {facts['gpu_events']:,} on a device")
    devices = facts["devices"] if len(facts["devices"]) > 2 else facts["devices"][:1]  # of one, the total says the same
    for device in devices:
        share = f"busy {_ms(device['busy_ns'])} of {_ms(device['span_ns'])} ({device['busy_share']:.2%})"
        modelled = ", modelled" if facts["modelled"] else ""
        table.add_row(plain(f"device {device['device']}"), f"{share}, {device['events']:,} events{modelled}")
    if outside := facts["outside"]:
        before, after = _ms(outside["before_ns"]), _ms(outside["after_ns"])
        table.add_row("outside of that", f"{before} before the first device work, {after} after the last")
        if outside["untold_ns"]:
            told = f"{_ms(outside['untold_ns'])} from its launch to the first device work: cannot be told"
            table.add_row("", told)
    labels = ", ".join(f"{count:,} {label}" for label, count in facts["same_stream_labels"].items() if count)
    table.add_row("overlaps in one stream", f"{facts['same_stream_overlaps']:,}{f' ({labels})' if labels else ''}")
    table.add_row("work without its launch", f"{facts['orphan_gpu_events']:,}")
    table.add_row("kernels of one launch", f"at most {facts['max_kernels_per_launch']:,}")
    table.add_row("launches queued", f"at most {facts['max_queue_depth']:,}")
    for cause, gap in facts["gaps"].items():
        table.add_row(plain(f"idle: {cause}"), f"{_ms(gap['ns'])} in {gap['count']:,} gap{'s' * (gap['count'] != 1)}")
    return table


def tables(facts: dict[str, Any], width: int = 80) -> Iterator[Table]:
    """Steps; waits by kind; single waits, the longest first. ``width``: columns of the screen."""
    beyond = max(width - 80, 0)
    if facts["steps"]:
        shown = ("step", "kind", "host_ns", "gpu_busy_ns", "gpu_events", "launches")
        rows = [row | {"step": shorter_step(row["step"], NAME + beyond)} for row in facts["steps"]]
        yield _table("steps", rows, shown)
    if facts["waits"]:
        rows = [row | {"host": "yes" if row["host_waits"] else "no"} for row in facts["waits"]]
        of_kind = ("kind", "host", "count", "api_ns", "caller_ns")
        yield _table("waits by kind, sums (host: it stood still)", rows, of_kind)
    if found := facts["syncs"]:
        columns = ["kind", "call", "api_ns", "caller_ns", "overhead_ns", "site"]
        if not any(row["overhead_ns"] > 0 for row in found):
            columns.remove("overhead_ns")
        rows = [row | {"site": shorter_site(row["site"], SITE + beyond // 2)} for row in found]
        yield _table("syncs, waits of the host first, the longest first", rows, columns, width)


def _table(title: str, found: list[dict[str, Any]], shown: Sequence[str], width: int = 80) -> Table:
    beyond = f" ({SHOWN} of {len(found):,})" if len(found) > SHOWN else ""
    table = Table(title=f"{title}{beyond}")
    # rich shrinks every column a little; here sites stay whole, and calls are folded.
    widths: dict[str, int] = {}
    if "site" in shown:
        widths["site"] = min(max(len(row["site"]) for row in found[:SHOWN]), SITE + 4 + max(width - 80, 0) // 2)
        widths["kind"] = len("device-side")
        heads = {one: len(one.removesuffix("_ns") + " us") for one in shown if one.endswith("_ns")}
        lengths = sum(max([head, *(len(_length(row[one])) for row in found[:SHOWN])]) for one, head in heads.items())
        rest = width - 3 * len(shown) - 1 - sum(widths.values()) - lengths
        widths["call"] = max(rest, 6)
    for column in shown:
        length = column.endswith("_ns")
        whole = length or column == "step" or (column == "kind" and "step" in shown)
        table.add_column(
            _HEADINGS.get(column, column.removesuffix("_ns") + " us" * length),
            justify="right" if length else "left",
            no_wrap=whole,
            overflow="fold",
            min_width=None if column == "call" else widths.get(column),
            max_width=widths.get(column),
        )
    for row in found[:SHOWN]:
        table.add_row(*(plain(_length(row[one]) if one.endswith("_ns") else _cell(row[one])) for one in shown))
    return table


def shorter_site(site: str, width: int = SITE) -> str:
    """A ``file:line`` cut on the left; the file's own name and the line are never cut."""
    kept = max(width - 1, len(site.rpartition("/")[2]))
    return site if len(site) <= kept + 1 else "\N{HORIZONTAL ELLIPSIS}" + site[-kept:]


def shorter_step(name: str, width: int = NAME) -> str:
    """A step's name cut in the middle, in front of the number that ends it."""
    if len(name) <= width:
        return name
    number = _NUMBER.search(name)
    tail = number.group() if number and len(number.group()) < width - 1 else ""
    return name[: width - 1 - len(tail)] + "\N{HORIZONTAL ELLIPSIS}" + tail


# -- compare


def comparison_table(rows: list[dict[str, Any]], title: str) -> Table:
    """The steps as a whole, and those phases of which something can be told."""
    table = Table(title=plain(title))
    shown = ("phase", "n_a", "n_b", "median_a_ns", "median_b_ns", "difference_ns", "verdict")
    for column in shown:
        length = column.endswith("_ns")
        heading = column.removesuffix("_ns") + " us" * length
        table.add_column(heading, justify="right" if length else "left", no_wrap=column == "verdict")
    told = [row for row in rows if row["group"] == "step" or row["verdict"] != "cannot tell"]
    for row in told[: 3 * SHOWN]:
        table.add_row(*(plain(_number(row[one]) if one.endswith("_ns") else _cell(row[one])) for one in shown))
    return table


def untold(rows: list[dict[str, Any]]) -> list[str]:
    """One line about the phases that :func:`comparison_table` leaves out; none if it does not."""
    left_out = [row for row in rows if row["group"] != "step" and row["verdict"] == "cannot tell"]
    if not left_out:
        return []
    reasons = Counter(row["reason"] for row in left_out)
    reason, count = reasons.most_common(1)[0]
    others = f"; {len(left_out) - count:,} for other reasons" if count < len(left_out) else ""
    names = ", ".join(row["phase"] for row in left_out[:3]) + ", ..." * (len(left_out) > 3)
    phases = f"{len(left_out):,} phase{'s' * (len(left_out) != 1)}"
    return [f"cannot tell: {phases} more ({names}): {reason}{others}; --json has the figures"]


def changes_table(rows: list[dict[str, Any]]) -> Table | None:
    """Kernels, operators and ranges that one trace has and the other has not, or as often; None without any."""
    changed = [row for row in rows if row["change"] in ("removed", "added", "count")]
    if not changed:
        return None
    where = {"removed": "only in a", "added": "only in b", "count": "in both"}
    beyond = f" (the first {2 * SHOWN} of {len(changed):,})" if len(changed) > 2 * SHOWN else ""
    table = Table(title=f"not as often in both{beyond}")
    for column in ("kind", "name", "where", "count_a", "count_b", "b - a us"):
        text = column in ("kind", "name", "where")
        table.add_column(column, justify="left" if text else "right", overflow="fold")
    for row in changed[: 2 * SHOWN]:
        name = row["name"] if len(row["name"]) <= 60 else row["name"][:57] + "..."
        cells = row["kind"], name, where[row["change"]], _cell(row["count_a"]), _cell(row["count_b"])
        table.add_row(*(plain(cell) for cell in (*cells, _number(row["difference_ns"]))))
    return table


# -- cells


def _ms(ns: int) -> str:
    return f"{ns / 1e6:,.3f} ms"


def _number(ns: float | None) -> str:
    """Nanoseconds as microseconds."""
    return "-" if ns is None else f"{ns / 1e3:,.1f}"


def _length(ns: int | None) -> str:
    """The same; -1 stands for one that was not recorded, too."""
    return _number(None if ns is None or ns < 0 else ns)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
