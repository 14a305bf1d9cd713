"""The memory ledger as lines of text: by place, the largest tables first, and what its sums leave out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pandas as pd

from mrv2lab.check.memory_formulas import MEANINGS
from mrv2lab.check.memory_ledger import PLACES, Ledger

SMALL = 0.01
"""Of its place's bytes; what takes less is counted in one line."""
_NUMBER = re.compile(r"(\.|\.uva)\d+(?=\.|$)")
"""A layer, a group, a step in flight or a pool's slot in a table's name."""


def report(ledger: Ledger, problems: list[str], measured: bool, each: bool = False) -> list[str]:
    """What ``ledger`` says. Tables that differ in a number of their name alone (layers, slots) share a line, and those
    under :data:`SMALL` of their place another one, unless ``each``. ``problems``: what the ledger as a whole found."""
    there = ledger.rows.drop(ledger.left_out.index)
    taken = there.assign(bytes=there.requested.fillna(there.expected))
    taken = taken.assign(tables=1) if each else folded(taken)
    width = max((len(name) for name in taken.table), default=0) + 4
    what = "requested" if measured else "by formula"
    lines = [f"{'':{width}}{'tables':>7}{what:>16}{'rounded':>16}  {'module':30}formula"]
    for place in PLACES:
        lines += _place(taken[taken.place == place], place, width, 0 if each else SMALL)
    lines += ["", "words of the formulas:", *_legend(ledger)]
    lines += ["", "not in the sums:", *_left_out(ledger)]
    return [*lines, "", *_verdict(taken, problems)] if measured else lines


def folded(rows: pd.DataFrame) -> pd.DataFrame:
    """Tables of one module, place and formula whose names differ in a number alone as one row, ``tables`` of them. A
    star stands for the number."""
    family = rows.table.str.replace(_NUMBER, r"\1*", regex=True)
    keys = ["family", "owner", "place", "formula"]
    groups = rows.assign(family=family).groupby(keys, sort=False, dropna=False)
    sums = {"bytes": ("bytes", "sum"), "rounded": ("rounded", "sum"), "expected": ("expected", "sum")}
    made = groups.agg(tables=("table", "size"), first=("table", "first"), **sums).reset_index()
    return made.assign(table=made.family.where(made.tables > 1, made["first"]))


def _place(rows: pd.DataFrame, place: str, width: int, small: float) -> Iterator[str]:
    total, rounded = int(rows.bytes.sum()), int(rows.rounded.sum())
    yield f"{place:{width}}{int(rows.tables.sum()):>7,}{total:>16,}{rounded:>16,}"
    large = rows[rows.bytes >= small * total].sort_values("bytes", ascending=False, kind="stable")
    for row in large.itertuples():
        formula = row.formula or "its op decides"
        name = f"  {row.table}"
        yield f"{name:{width}}{row.tables:>7,}{int(row.bytes):>16,}{int(row.rounded):>16,}  {row.owner:30}{formula}"
    rest = rows.drop(large.index)
    if len(rest):
        name, count = "  smaller ones", int(rest.tables.sum())
        yield f"{name:{width}}{count:>7,}{int(rest.bytes.sum()):>16,}{int(rest.rounded.sum()):>16,}  --each lists them"


def _legend(ledger: Ledger) -> Iterator[str]:
    used = set(re.findall(r"[A-Za-z]+", " ".join(ledger.rows.formula))) | {"K", "P", "S"}
    for name, value in ledger.words.items():
        if name in used:
            yield f"  {f'{name} = {value:,}':22}{MEANINGS[name]}"


def _left_out(ledger: Ledger) -> Iterator[str]:
    """A line for each thing that tables come with, the most bytes first."""
    rows = ledger.left_out
    rows = rows.assign(bytes=rows.expected.fillna(0), when=rows.when.where(rows.formula != "", ""))
    groups = dict(list(rows.groupby("when", sort=False)))
    sized = groups.pop("", rows.iloc[:0])
    for when, some in sorted(groups.items(), key=lambda pair: -int(pair[1].bytes.sum())):
        by_place = some.groupby("place").bytes.sum()
        parts = [f"{int(by_place[place]):,} {place}" for place in PLACES if by_place.get(place, 0)]
        if some.expected.isna().any():
            parts.append("what batches want" if not parts else "and what batches want")
        names = dict.fromkeys(folded(some).table)
        firsts = [name for name in names if name.removesuffix(".host") not in names or not name.endswith(".host")]
        yield f"  with {when}: {', '.join(parts)} ({', '.join(firsts)})"
    if len(sized):
        yield f"  as large as the op wants it that uses it, which --measure tells: {', '.join(sized.table)}"
    yield "  no tables: temporaries of a step, graphs' memory, compiled kernels, which num_blocks=None measures"


def _verdict(taken: Any, problems: list[str]) -> Iterator[str]:
    if problems:
        return
    free = taken[taken.formula == ""]
    text = "every table that has a formula has its bytes"
    if len(free):
        text += f"; without one, and in the sums: {', '.join(free.table)} ({int(free.bytes.sum()):,} bytes)"
    yield text
