"""The batch of our own steps: by a range within the step, by its arguments, or by what the capture says of itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mrv2lab.trace.annotations import Batch, StepName, parse_batch

if TYPE_CHECKING:
    from mrv2lab.trace.trace import Trace

Array = np.ndarray[Any, Any]

FACTS = "mrv2lab"
"""Key in ``info.extra`` under which a profile says what it knows of its steps: lists ``steps``, ``requests``,
``tokens`` and :data:`PARTS`, one entry a turn."""
PARTS: tuple[str, ...] = Batch._fields


def with_batches(trace: Trace, events: Array, names: list[StepName]) -> tuple[list[StepName], list[str]]:
    """``names`` of the ranges ``events`` [k], completed, and sentences about what that rests on.

    The best source first: a range named by :func:`~mrv2lab.trace.annotations.batch_range` that begins within the step;
    the arguments of the step's own range, in a recording; the capture's lists (:data:`FACTS`)."""
    ranges, facts = _ranges(trace), _Facts(trace.info.extra.get(FACTS))
    completed: list[StepName] = []
    by_facts = guessed = 0
    for name, event in zip(names, events.tolist(), strict=True):
        lane = trace.lane_of(event)
        start, end = int(trace.start[event]), int(trace.end[event])
        inside = ranges.get((lane.process, lane.rank, name.number), ())
        batch = next((batch for begin, batch in inside if start <= begin <= end), None)
        found = batch.step_name(name.source, name.number) if batch else _by_args(name, trace.args(event))
        if found is None:
            found, guess = facts.complete(name)
            by_facts += found is not name
            guessed += guess
        completed.append(found)
    notes = []
    if by_facts:
        notes.append(
            f"the ranges of {by_facts:,} step{'s' * (by_facts != 1)} do not say their batch; it is taken from the "
            "lists that the capture keeps of itself"
        )
    if guessed:
        notes.append(
            f"of {guessed:,} of them only all requests and tokens together are known: one token a request is taken for "
            "decode, and the last token of a prompt would look like that too"
        )
    return completed, notes


def _ranges(trace: Trace) -> dict[tuple[str, int, int | None], list[tuple[int, Batch]]]:
    """(process, rank, step) -> where such a range starts, ns, and its batch; more than one after a reset."""
    parsed = [parse_batch(name) for name in trace.names]
    if not any(parsed):
        return {}
    named = np.array([one is not None for one in parsed])
    found: dict[tuple[str, int, int | None], list[tuple[int, Batch]]] = {}
    for event in np.flatnonzero(trace.mask("annotation", "phase") & named[trace.name]).tolist():
        lane, one = trace.lane_of(event), parsed[int(trace.name[event])]
        assert one is not None
        found.setdefault((lane.process, lane.rank, one[0]), []).append((int(trace.start[event]), one[1]))
    return found


def _by_args(name: StepName, args: dict[str, Any]) -> StepName | None:
    """As far as the range's arguments tell: the batch; else the requests (a number, or their ids) and tokens, which are
    those of decode if nothing is in prefill, and those of prefill if the one request is."""
    parts = [_count(args.get(part)) for part in PARTS]
    if min(parts) >= 0:
        return Batch(*parts).step_name(name.source, name.number)
    requests, tokens, prefill = _count(args.get("requests")), _count(args.get("tokens")), args.get("has prefill")
    if requests < 0 or tokens < 0:
        return None
    if requests and prefill is False:
        return Batch(0, 0, requests, tokens).step_name(name.source, name.number)
    if requests == 1 and prefill is True:
        return Batch(1, tokens, 0, 0).step_name(name.source, name.number)
    return StepName(name.source, name.number, requests=requests, tokens=tokens)


def _count(value: Any) -> int:
    """A number that an integer column holds, or how many things are in a list; -1: neither."""
    if isinstance(value, (list, dict)):
        return len(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else -1


class _Facts:
    """What a capture says of its turns; nothing of it is believed to be well-formed."""

    def __init__(self, facts: Any) -> None:
        facts = facts if isinstance(facts, Mapping) else {}
        steps = facts.get("steps")
        self._steps = steps if isinstance(steps, list) else []
        # A number that comes twice (the engine was reset) says nothing about either.
        known = Counter(one for one in self._steps if isinstance(one, int))
        self._row = {one: row for row, one in enumerate(self._steps) if isinstance(one, int) and known[one] == 1}
        self._lists = {key: self._list(facts.get(key)) for key in ("requests", "tokens", *PARTS)}
        config = facts.get("config")
        spec = config.get("spec") if isinstance(config, Mapping) else None
        self._no_drafts = isinstance(spec, Mapping) and spec.get("num_speculative_tokens") == 0

    def _list(self, values: Any) -> list[Any]:
        return values if isinstance(values, list) and len(values) == len(self._steps) else [None] * len(self._steps)

    def complete(self, name: StepName) -> tuple[StepName, bool]:
        """``name`` with its batch, and whether its kind was guessed; ``name`` itself where nothing is known."""
        row = None if name.number is None else self._row.get(name.number)
        if row is None:
            return name, False
        counts = {key: _count(values[row]) for key, values in self._lists.items()}
        parts = [counts[part] for part in PARTS]
        requests, tokens = counts["requests"], counts["tokens"]
        if min(parts) >= 0:
            return Batch(*parts).step_name(name.source, name.number), False
        if requests < 0 or tokens < 0:
            return name, False
        if self._no_drafts and requests == tokens:
            return Batch(0, 0, requests, tokens).step_name(name.source, name.number), requests > 0
        if self._no_drafts and requests == 1:
            return Batch(1, tokens, 0, 0).step_name(name.source, name.number), False
        return StepName(name.source, name.number, requests=requests, tokens=tokens), False
