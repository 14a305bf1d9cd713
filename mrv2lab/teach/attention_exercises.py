"""Exercises of the lesson on the worker and attention, checked against the builders and the KV manager's own rules.

check_pages(pages, steps)      # -> right. / not yet: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from mrv2lab.config import ModelConfig
from mrv2lab.engine.kv_groups import GroupReach
from mrv2lab.engine.kv_layout import kv_tensor_of_layer
from mrv2lab.teach.attention_lesson import StepMetadata
from mrv2lab.teach.sampling_exercises import Verdict

_OPEN = Verdict(False, "write your answer in place of None")

Pages = Callable[..., tuple[Any, Any]]


def check_pages(pages: Pages, steps: Iterable[StepMetadata]) -> Verdict:
    """``pages(seq_lens, query_lens, block_table, block_size, window)`` -> (starts int[r + 1], block ids int[N]): the
    blocks that each request's queries see, one request behind another, as flashinfer wants them. ``window`` None = all.
    """
    for step in steps:
        window = step.group.window
        what = "layers that see all" if window is None else f"layers with a window of {window}"
        table = step.block_table.copy()
        try:
            starts, found = pages(step.seq_lens.copy(), step.query_lens.copy(), table, step.block_size, window)
        except Exception as error:
            return Verdict(False, f"{what}: your function raised {type(error).__name__}: {error}")
        starts, found = np.asarray(starts), np.asarray(found)
        want = step.page_starts.tolist()
        if starts.tolist() != want:
            return Verdict(False, f"{what}: {_why_starts(step, starts.tolist(), want)}")
        if found.tolist() != step.page_indices.tolist():
            at = next(i for i, right in enumerate(step.page_indices) if i >= len(found) or found[i] != right)
            got = found[at] if at < len(found) else "nothing"
            return Verdict(False, f"{what}: page {at} is block {step.page_indices[at]}, you have {got}")
    return Verdict(
        True, "Lengths are the host's, ids the device's: the host never needs to know which blocks they are."
    )


def _why_starts(step: StepMetadata, got: list[Any], want: list[int]) -> str:
    if len(got) != len(want):
        return f"{len(want) - 1} requests have {len(want)} starts, the end included; you have {len(got)}"
    counts, right = np.diff(got), np.diff(want)
    j = int(np.flatnonzero(counts != right)[0]) if (counts != right).any() else 0
    length, queries = int(step.seq_lens[j]), int(step.query_lens[j])
    if counts[j] == length // step.block_size and length % step.block_size:
        return f"request {j} has {length} tokens: the last block need not be full"
    if step.group.window is not None and counts[j] == -(-length // step.block_size):
        return f"request {j} has {counts[j]} pages, but blocks behind the window are not read"
    if step.group.window is not None and counts[j] < right[j]:
        return f"request {j}: the first of its {queries} queries is at {length - queries}, and it sees itself too"
    return f"request {j} with {length} tokens has {right[j]} pages, you have {counts[j]}"


def check_let_go(first_needed: Callable[[int, int, int], Any]) -> Verdict:
    """``first_needed(position, window, block_size)`` -> the first entry of a block table that a query at ``position``,
    or any later one, can see; those in front of it may be let go."""
    cases = [(position, window, size) for size in (4, 16) for window in (1, 4, 6, 33) for position in range(0, 120, 5)]
    for position, window, size in [*cases, (47, 32, 16), (95, 33, 16)]:
        want = GroupReach(window, size).first_needed(position)
        got = first_needed(position, window, size)
        if got != want:
            what = f"position {position}, a window of {window}, blocks of {size}: {got!r}"
            if not _is_whole(got):
                return Verdict(False, f"{what} is no index of an entry")
            if got < 0:
                return Verdict(False, f"{what}; a table begins at entry 0")
            if got > want:
                seen = max(position - window + 1, 0)
                return Verdict(False, f"{what} lets go of entry {want}, which holds token {seen}, and that is seen")
            return Verdict(False, f"{what} keeps entry {got}, whose tokens nobody sees any more")
    return Verdict(True, "max(position - window + 1, 0) // block_size: the query's own token is one of the window.")


def check_frozen(step: StepMetadata, backend: str, names: Iterable[str] | None) -> Verdict:
    """The fields of a backend's metadata that a graph would freeze: values of the host, which a replay does not read
    anew. ``backend`` is a column of ``step.table``."""
    if names is None:
        return _OPEN
    column = step.table[backend]
    there = {str(name) for name, cell in column.items() if cell}
    right = {name for name in there if ", device: " not in column[name]}
    given = set(names)
    if strange := sorted(given - there):
        return Verdict(False, f"{backend} has no field {strange[0]!r}; it has {', '.join(sorted(there))}")
    if alive := sorted(given - right):
        return Verdict(False, f"{alive[0]} is on the device: a replay reads what is there then, at the same address")
    if left := len(right - given):
        return Verdict(False, f"{left} more of {backend}'s fields are the host's")
    if backend == "flashinfer":
        return Verdict(True, "It plans on the host, from lengths: so no graph may hold its attention.")
    return Verdict(True, "And for plain decodes max_query_len is always 1: so one graph serves any lengths.")


def check_tensors(model: ModelConfig, answer: Sequence[int] | None) -> Verdict:
    """Which KV tensor each layer uses, counted from 0, where groups of layers share a pool of blocks."""
    if answer is None:
        return _OPEN
    right, given = list(kv_tensor_of_layer(model)), list(answer)
    if given == right:
        most, layers = max(right) + 1, model.num_hidden_layers
        return Verdict(True, f"{most} tensors for {layers} layers: a block belongs to one group at a time.")
    if len(given) != len(right):
        return Verdict(False, f"{model.num_hidden_layers} layers have {len(right)} entries; you have {len(given)}")
    if given == list(range(len(right))):
        return Verdict(
            False, "that gives every layer a tensor of its own, and a block pays for layers that never use it"
        )
    for group in model.kv_groups:
        mine = [given[layer] for layer in group.layers]
        if len(set(mine)) < len(mine):
            what = "full" if group.window is None else "sliding"
            return Verdict(
                False, f"two {what} layers in one tensor write the same blocks: they would overwrite each other"
            )
    layer = next(i for i, (one, other) in enumerate(zip(given, right, strict=True)) if one != other)
    return Verdict(False, f"layer {layer}: the i-th layer of each group uses tensor i")


def _is_whole(answer: Any) -> bool:
    return isinstance(answer, Integral) and not isinstance(answer, bool)
