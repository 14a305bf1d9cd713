"""Comparing a replay with what the device held."""

from __future__ import annotations

import numpy as np

from mrv2lab.recording.replay import Replay
from tests.recording.runs import Run


def differences(replay: Replay, run: Run, index: int) -> list[str]:
    """Tables that are not what the device held after step ``index``."""
    replay.seek(index)
    assert replay.position == index
    wrong = [name for name, live in run.live[index].items() if not np.array_equal(replay.tables[name], live)]
    return wrong + (["owners"] if replay.owners != run.owners[index] else [])


def complete(run: Run) -> list[int]:
    """Steps whose tokens are known, as are those of the steps before them since the last keyframe."""
    found, known = [], True
    for index, record in enumerate(run.steps):
        known = known or record.keyframe is not None
        known = known and (record.sampled is not None or not record.req_ids)
        found += [index] if known else []
    return found


def way(indices: list[int], order: str) -> list[int]:
    if order == "random":
        return np.random.default_rng(5).permutation(indices).tolist()
    return indices if order == "forwards" else indices[::-1]
