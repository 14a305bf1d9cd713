"""What two samplers made of one step: the logits they chose from, and what came back beside the tokens.

A processed row moves no more than its raw one does, but for what a stage multiplies by: a repetition penalty r, and
1 / temperature. Cuts are the exception: a token at the very edge of top-k, top-p or min-p may fall on either side.
V1 and MRV2 do the same arithmetic in other orders, so that between them values are near even where raw logits are equal
to the last bit; which tokens are the most likely, and the ranks, are then the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mrv2lab.protocol import Logprobs, SamplingParams

if TYPE_CHECKING:
    from mrv2lab.check.compare import Captured, Rules

Array = np.ndarray[Any, Any]

ROUNDING = 1e-5
"""What the two runners' own arithmetic may differ by, as a part of a row's largest value."""
MOST_AT_THE_EDGE = 2
"""Tokens that may fall on either side of top-p and min-p where the raw logits are the same: one each."""


class Held(NamedTuple):
    """One row's processed logits of a held against b's."""

    # [V] a's, divided by the temperature
    scores: Array
    off: float
    """max|d| over what both kept."""
    excuse: str
    """Why the choice may differ besides that: a cut kept other tokens. "" if none did."""
    wrong: tuple[int, float, float, str] | None
    """Token id, a's and b's value, and why they may not differ so."""


class Unlike(NamedTuple):
    """A difference in what came back beside the tokens."""

    tensor: str
    i: int
    """Whose, in a's batch."""
    where: str
    at: int
    a: Any
    b: Any
    note: str = ""


def scaled(row: Array, done: bool, params: SamplingParams) -> Array:
    """``row`` [V] divided by the temperature of a sampled request, which the sampler may have left to the draw; NaN is
    -inf, as for every choice."""
    row = np.where(np.isnan(row), -np.inf, row).astype(np.float32)
    return row if done or params.temperature == 0 else row / np.float32(params.temperature)


def hold(a: Array, b: Array, params: SamplingParams, raw_scale: float, rules: Rules) -> Held:
    """Hold a's scaled row [V] against b's. ``raw_scale`` is max|a| of the raw row."""
    exact = rules.equality == "exact"
    kept = ~np.isneginf(a) & ~np.isneginf(b)
    differ = np.isneginf(a) != np.isneginf(b)
    gap = np.zeros(len(a), np.float64)
    gap[kept] = np.abs(a[kept].astype(np.float64) - b[kept])
    gap[a == b] = 0.0  # infinities
    off = float(gap.max(initial=0.0))
    excuse, wrong = "", None
    if differ.any():
        token = int(differ.argmax())
        excuse = f"{int(differ.sum())} tokens are kept by one alone"
        if not _may_differ(int(differ.sum()), params, exact, rules.alike):
            wrong = token, float(a[token]), float(b[token]), excuse
    largest = float(np.abs(a[kept]).max(initial=0.0))
    allowed = 0.0
    if not exact:
        most = max(params.repetition_penalty, 1 / params.repetition_penalty)
        allowed = rules.bound * raw_scale * most / (params.temperature or 1.0)
    if not (exact and rules.alike):
        allowed += ROUNDING * max(largest, 1.0)
    if not off <= allowed:
        token = int(np.nan_to_num(gap, nan=np.inf).argmax())
        wrong = token, float(a[token]), float(b[token]), f"{off:.2g} off, {allowed:.2g} is allowed"
    return Held(a, off, excuse, wrong)


def _may_differ(count: int, params: SamplingParams, exact: bool, alike: bool) -> bool:
    by_mass = params.top_p < 1 or params.min_p > 0
    if not (by_mass or params.top_k):
        return False
    if not exact:
        return True
    # A greedy row's cuts move no argmax, so each runner leaves them out where it can.
    return not alike and (params.temperature == 0 or (by_mass and count <= MOST_AT_THE_EDGE))


# -- beside the tokens -------------------------------------------------------------------------------------------------


class OutputComparison:
    """Logprobs, prompt logprobs, NaN counts and errors of one step, where both sides give them."""

    def __init__(
        self,
        a: Captured,
        b: Captured,
        rules: Rules,
        params: dict[str, SamplingParams],
        off: Array,
        held: dict[int, Held],
    ) -> None:
        self.a, self.b, self.rules, self.params = a, b, rules, params
        # [r] max|d| of each raw row
        self.off = off
        self.held = held
        self.exact = rules.equality == "exact"
        self.place = {req_id: i for i, req_id in enumerate(a.req_ids)}

    def first(self) -> Unlike | None:
        """The first difference, or None."""
        one, other = self.a.output, self.b.output
        if one is None or other is None:
            return None
        pairs: list[tuple[str, dict[str, Any], dict[str, Any]]] = [("errors", one.errors, other.errors)]
        if self.rules.nans:
            pairs.append(("num_nans", one.num_nans, other.num_nans))
        for name, mine, theirs in pairs:
            for req_id in sorted(mine.keys() | theirs.keys()):
                left, right = mine.get(req_id), theirs.get(req_id)
                if left != right:
                    return Unlike(name, self.place.get(req_id, 0), "step", self.a.step, left, right)
        if self.rules.logprobs:
            return next(self._logprobs(one.logprobs, other.logprobs), None) or next(self._prompts(), None)
        return None

    def _logprobs(self, one: Logprobs | None, other: Logprobs | None) -> Iterator[Unlike]:
        at_a, at_b = _rows_of(self.a), _rows_of(self.b)
        for req_id, row in at_a.items():
            wanted = self.params[req_id].logprobs
            if wanted is None or req_id not in at_b:
                continue
            i = self.place[req_id]
            if one is None or other is None:
                yield Unlike("logprobs", i, "row", row, one is not None, other is not None, "has any")
                return
            mine, theirs = _cut(one, row, wanted), _cut(other, at_b[req_id], wanted)
            if self.rules.processed_logprobs and i in self.held:
                if self.held[i].excuse:
                    continue  # of other sets
                off = self.held[i].off
            else:
                off = float(self.off[i])
            base = self.a.processed if self.rules.processed_logprobs else self.a.logits
            yield from self._compare("logprobs", i, row, mine, theirs, off, None if base is None else base[i])

    def _prompts(self) -> Iterator[Unlike]:
        assert self.a.output is not None and self.b.output is not None
        one, other = self.a.output.prompt_logprobs, self.b.output.prompt_logprobs
        # Of rows that nobody captured: as far off as this step's worst may be.
        off = 0.0 if self.exact else self.rules.bound * float(np.abs(self.a.logits).max(initial=0.0))
        for req_id in sorted(one.keys() | other.keys()):
            i = self.place.get(req_id, 0)
            if req_id not in one or req_id not in other:
                yield Unlike("prompt_logprobs", i, "step", self.a.step, req_id in one, req_id in other, "are there")
                return
            mine, theirs = one[req_id], other[req_id]
            if mine.values.shape != theirs.values.shape:
                yield Unlike("prompt_logprobs", i, "shape", 0, mine.values.shape, theirs.values.shape)
                return
            for row in range(len(mine.ranks)):
                left, right = (_cut(part, row, -1) for part in (mine, theirs))
                yield from self._compare("prompt_logprobs", i, row, left, right, off, None)

    def _compare(
        self,
        name: str,
        i: int,
        row: int,
        mine: tuple[Array, Array, int],
        theirs: tuple[Array, Array, int],
        off: float,
        base: Array | None,
    ) -> Iterator[Unlike]:
        """One token's entry: ids [1 + k], values [1 + k] and rank. ``base`` [V] are the logits that a's are of."""
        ids, values, rank = mine
        other_ids, other_values, other_rank = theirs
        # Raw logits are the same bits; of processed ones of two runners, near ties may change places.
        same_order = self.exact and (self.rules.alike or not (self.rules.processed_logprobs and name == "logprobs"))
        said = np.isfinite(values) | np.isfinite(other_values)
        if not self.rules.alike:
            said &= ~_tied(values)
        said[1:] &= same_order
        said[0] = True
        if (ids != other_ids)[said].any():
            k = int(np.flatnonzero((ids != other_ids) & said)[0])
            yield Unlike(name, i, f"row {row}, column", k, int(ids[k]), int(other_ids[k]), "token ids")
        allowed = 0.0 if self.exact and self.rules.alike else ROUNDING * (1 + np.abs(values)) + 2 * off
        gap = np.zeros(len(values))
        both = np.isfinite(values) & np.isfinite(other_values)
        gap[both] = np.abs(values[both].astype(np.float64) - other_values[both])
        gap[~both & (values != other_values)] = np.inf
        if (gap > allowed).any():
            k = int((gap > allowed).argmax())
            yield Unlike(name, i, f"row {row}, column", k, float(values[k]), float(other_values[k]), "values")
        if same_order:
            if rank != other_rank:
                yield Unlike(name, i, "row", row, rank, other_rank, "ranks")
        elif base is not None and rank == int((base >= base[ids[0]]).sum()):  # else a grammar's mask lies between
            # ``off`` may be of the row divided by its temperature.
            reach = 2 * off * max(self.params[self.a.req_ids[i]].temperature, 1.0)
            least, most = int((base > base[ids[0]] + reach).sum()) + 1, int((base >= base[ids[0]] - reach).sum())
            if not least <= other_rank <= most:
                yield Unlike(name, i, "row", row, rank, other_rank, f"ranks; {least} to {most} are near")


def _tied(values: Array) -> Array:
    """bool[1 + k]: columns whose neighbour has the same value, but for rounding. MRV2 orders whole rows by logarithms,
    V1 by logits, and two logits may have one logarithm."""
    gaps = np.full(len(values), np.inf)
    finite = np.where(np.isfinite(values), values, 0.0).astype(np.float64)
    if len(values) > 2:
        gaps[2:] = np.abs(np.diff(finite[1:]))
    nearest = np.minimum(gaps, np.append(gaps[1:], np.inf))
    tied: Array = nearest <= 1e-6 * (1 + np.abs(finite))
    return tied


def _rows_of(side: Captured) -> dict[str, int]:
    """Where each request's first sampled token stands in the step's logprobs."""
    made, row = {}, 0
    for req_id, tokens in zip(side.req_ids, side.sampled, strict=True):
        if tokens:
            made[req_id] = row
        row += len(tokens)
    return made


def _cut(logprobs: Logprobs, row: int, wanted: int) -> tuple[Array, Array, int]:
    """What a request asked for, of rows as wide as the greediest one's: ids, values and rank."""
    width = logprobs.values.shape[1] if wanted == -1 else 1 + wanted
    return logprobs.token_ids[row, :width], logprobs.values[row, :width], int(logprobs.ranks[row])
