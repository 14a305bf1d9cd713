"""Whether two traces did the same work, step by step: requests and tokens, in prefill and in decode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mrv2lab.trace.step_batches import PARTS

if TYPE_CHECKING:
    import pandas as pd

Array = np.ndarray[Any, Any]

TOTALS = ("requests", "tokens")
ANSWERS = ("same", "different", "not known")
_KINDS = ("prefill", "decode", "mixed")


class Workload(NamedTuple):
    """What :func:`workload` found; k common steps."""

    # [k]: one of ANSWERS
    by_step: list[str]
    # Whether it is the same work.
    sentence: str
    differs: bool
    known: bool


def workload(left: pd.DataFrame, right: pd.DataFrame) -> Workload:
    """Hold the batches of matched steps (rows of :func:`~mrv2lab.trace.steps.steps`) beside each other. A step is known
    where both sides say one and the same quantity of it, and different where one that both say differs."""
    count = len(left)
    if not count:
        return Workload([], "no step is in both, so whether the workloads are the same cannot be told", False, False)
    columns = (*PARTS, *TOTALS)
    sides = [{column: frame[column].fillna(-1).to_numpy(np.int64) for column in columns} for frame in (left, right)]
    known, differs = np.zeros(count, bool), np.zeros(count, bool)
    for column in columns:
        of_a, of_b = sides[0][column], sides[1][column]
        both = (of_a >= 0) & (of_b >= 0)
        known |= both
        differs |= both & (of_a != of_b)
    answers = np.where(differs, "different", np.where(known, "same", "not known")).tolist()
    if differs.any():
        row = int(np.flatnonzero(differs)[0])
        told = _told(sides, row)
        batches = [", ".join(f"{side[column][row]:,} {column.replace('_', ' ')}" for column in told) for side in sides]
        said = (
            f"the workloads differ in {int(differs.sum()):,} of {count:,} common steps, first in "
            f"{left['step'].iloc[row]!r}: {batches[0]} against {batches[1]}"
        )
    elif not known.all():
        said = (
            f"requests and tokens are not in both files for {int((~known).sum()):,} of {count:,} common steps, "
            "so whether the workloads are the same cannot be told"
        )
    else:
        kinds = [a if a == b else "unknown" for a, b in zip(left["kind"], right["kind"], strict=True)]
        counted = ", ".join(f"{kinds.count(kind):,} {kind}" for kind in _KINDS if kind in kinds)
        of_kinds = f" ({counted})" if counted else ""
        said = f"the workloads agree in requests and tokens of all {count:,} common steps{of_kinds}"
    return Workload(answers, said, bool(differs.any()), bool(known.all()))


def _told(sides: list[dict[str, Array]], row: int) -> list[str]:
    """What both say of the step: the halves, or where not even one is in both the sums."""
    for columns in PARTS, TOTALS:
        if found := [column for column in columns if min(side[column][row] for side in sides) >= 0]:
            return found
    return []
