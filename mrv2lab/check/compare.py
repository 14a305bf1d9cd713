"""The two classes of equality, applied to one step of two runners; the first difference is a value.

*Exact*: every bit. *Near*: integers exactly, each logits row within ``bound * max|a|``, tokens equal wherever a's
margin is clear by four times what the row is off. What is compared is what the model read and what came out, never how
a runner keeps its state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from mrv2lab.check.compare_sampling import Held, OutputComparison, hold, scaled
from mrv2lab.ops.noise import noise_spec
from mrv2lab.protocol import ModelRunnerOutput, SamplingParams

Array = np.ndarray[Any, Any]
Equality = Literal["exact", "near"]

FLOAT32_BOUND = 1e-3
BFLOAT16_BOUND = 2e-2
"""max|d| / max|ref| of a logits row."""
MOST_EXCUSED = 0.005
"""Of the tokens that were compared."""


@dataclass
class NearReport:
    """Rows compared, tokens compared, tokens excused, and the worst max|d| / max|ref|."""

    rows: int = 0
    tokens: int = 0
    """Fewer than rows: an unfinished prefill has none, and draws that agree in law only are not compared."""
    excused: int = 0
    worst: float = 0.0
    ratios: list[float] = field(default_factory=list)
    """Each row's max|d| / max|ref|."""
    excuses: list[str] = field(default_factory=list)

    def __iadd__(self, other: NearReport) -> NearReport:
        self.rows += other.rows
        self.tokens += other.tokens
        self.excused += other.excused
        self.worst = max(self.worst, other.worst)
        self.ratios += other.ratios
        self.excuses += other.excuses
        return self

    @property
    def too_many_excused(self) -> bool:
        """More than 0.5 % of the tokens: then chance does not explain them."""
        return self.excused > MOST_EXCUSED * self.tokens

    def check(self) -> None:
        """Raises ``AssertionError`` if nothing was compared, or if more than 0.5 % is excused."""
        if not self.rows:
            raise AssertionError("no row was compared")
        if self.too_many_excused:
            raise AssertionError(f"{self.excused} of {self.tokens} excused: {self.excuses[:5]}")


class Judgement(NamedTuple):
    """Whether a token is the reference's choice: yes, no, or too close to say."""

    kind: Literal["same", "wrong", "excused"]
    text: str


def judge(logits: Array, off: float, token: int, params: SamplingParams, seed: int, position: int) -> Judgement:
    """Hold ``token`` against the reference's ``logits`` [V] of the input token at ``position``.

    ``off`` is the row's max|d| between the two. The margin is best minus second of what the final argmax sees:
    logits / temperature + noise where the request is sampled.
    """
    unit = 1.0 / params.temperature if params.temperature else 1.0
    return judge_scores(scaled(logits, False, params), off * unit, token, params, seed, position)


def judge_scores(scores: Array, off: float, token: int, params: SamplingParams, seed: int, position: int) -> Judgement:
    """As :func:`judge`, from the processed logits [V], divided by the temperature, and how far these are off."""
    if params.temperature != 0:
        scores = scores + noise_spec(seed, position, len(scores))
    second, best = np.partition(scores, -2)[-2:]
    margin = float(best - second)
    if not margin > 4 * off:  # NaN where everything is masked
        return Judgement("excused", f"margin {margin:.3g} <= 4 x {off:.3g}")
    choice = int(scores.argmax())
    if token == choice:
        return Judgement("same", "")
    return Judgement(
        "wrong",
        f"token {token}, but the reference's is {choice} by {margin:.3g} (off by {off:.3g}) at {position}",
    )


@dataclass(frozen=True)
class Difference:
    """The first place where two runners disagree.

    ``tensor`` is input_ids, positions, seq_lens, query_start_loc (a request's token count), slot_mapping, block_table,
    logits, processed_logits, tokens, logprobs, prompt_logprobs, num_nans, errors or batch_order. ``at`` is what
    ``where`` says: the token's position in its request, the block table's column, or the token id of a logit.
    """

    step: int
    tensor: str
    request: str
    where: str
    at: int
    a: Any
    b: Any
    names: tuple[str, str] = ("a", "b")
    note: str = ""

    def __str__(self) -> str:
        note = f" ({self.note})" if self.note else ""
        left, right = self.names
        return (
            f"step {self.step}: {self.tensor} of request {self.request!r} at {self.where} {self.at}: "
            f"{self.a} in {left}, {self.b} in {right}{note}"
        )


@dataclass(frozen=True)
class Captured:
    """One step of one runner as the device had it, on the host. r requests in batch order, t tokens, G KV groups."""

    step: int
    req_ids: list[str]
    # what the runner put out for each request; [] for an unfinished prefill
    sampled: list[list[int]]
    # [r] what it chose before a twin overwrote it; equal to ``sampled`` where nobody did
    chosen: list[int]
    # [t] and [t]
    input_ids: Array
    positions: Array
    # [r + 1] and [r]
    query_start_loc: Array
    seq_lens: Array
    # G x [r, B] and G x [t]
    block_tables: tuple[Array, ...]
    slot_mappings: tuple[Array, ...]
    # [r, V] float32, and the token that each row belongs to, [r]
    logits: Array
    logits_indices: Array
    # [r, V] float32: what was chosen from, and whether it is divided by the temperatures; None: nobody looked
    processed: Array | None = None
    scaled: bool = False
    output: ModelRunnerOutput | None = None


@dataclass(frozen=True)
class Rules:
    """How two runners' steps are held against each other."""

    equality: Equality
    block_sizes: tuple[int, ...]
    bound: float = FLOAT32_BOUND
    """Near: max|d| / max|a| of a logits row."""
    tokens: bool = True
    """Whether chosen tokens are compared (not so between bfloat16 machines)."""
    draws: bool = True
    """Whether sampled requests' tokens are. V1 and MRV2 draw by the same law, not the same number; two V1s draw the
    same as long as their batches are the same."""
    names: tuple[str, str] = ("a", "b")
    alike: bool = True
    """Whether both sides are the same kind of runner, whose arithmetic behind equal logits is equal too."""
    logprobs: bool = True
    """Whether log-probabilities are compared: not between two modes of them."""
    processed_logprobs: bool = False
    """Whether they are of the processed logits."""
    nans: bool = True
    """Whether both sides count NaNs."""
    opaque: frozenset[str] = frozenset()
    """Requests with custom processors: what these do to a small difference is not known."""


def compare_step(
    a: Captured, b: Captured, rules: Rules, params: Mapping[str, tuple[SamplingParams, int]], report: NearReport
) -> Difference | None:
    """The first difference of two views of one step, or None. ``params``: id -> (sampling, seed); ``report`` counts."""
    return _Comparison(a, b, rules, params, report).run()


class _Comparison:
    def __init__(
        self,
        a: Captured,
        b: Captured,
        rules: Rules,
        params: Mapping[str, tuple[SamplingParams, int]],
        report: NearReport,
    ) -> None:
        self.a, self.b, self.rules, self.params, self.report = a, b, rules, params, report

    def run(self) -> Difference | None:
        return (
            self._order()
            or self._inputs()
            or self._block_tables()
            or self._logits()
            or self._processed()
            or self._tokens()
            or self._outputs()
        )

    def _differs(self, tensor: str, i: int, where: str, at: int, a: Any, b: Any, note: str = "") -> Difference:
        return Difference(self.a.step, tensor, self.a.req_ids[i], where, at, a, b, self.rules.names, note)

    def _order(self) -> Difference | None:
        a, b = self.a, self.b
        if self.rules.equality == "exact" or set(a.req_ids) != set(b.req_ids):
            for i in range(max(len(a.req_ids), len(b.req_ids))):
                left = a.req_ids[i] if i < len(a.req_ids) else None
                right = b.req_ids[i] if i < len(b.req_ids) else None
                if left != right:
                    return Difference(
                        a.step, "batch_order", str(left or right), "batch index", i, left, right, self.rules.names
                    )
        place = {req_id: j for j, req_id in enumerate(b.req_ids)}
        # [r] where b has a's i-th request
        self.order = np.array([place[req_id] for req_id in a.req_ids], np.int64)
        return None

    def _inputs(self) -> Difference | None:
        a, b, order = self.a, self.b, self.order
        lengths, theirs = np.diff(a.query_start_loc), np.diff(b.query_start_loc)[order]
        if (i := _first(lengths, theirs)) is not None:
            return self._differs("query_start_loc", i, "batch index", i, int(lengths[i]), int(theirs[i]))
        starts = b.query_start_loc[:-1][order].astype(np.int64)
        # [t] where b has a's tokens, and whose they are
        self.take = np.repeat(starts - a.query_start_loc[:-1], lengths) + np.arange(int(lengths.sum()))
        owner = np.repeat(np.arange(len(lengths)), lengths)
        if (i := _first(a.seq_lens, b.seq_lens[order])) is not None:
            return self._differs("seq_lens", i, "batch index", i, int(a.seq_lens[i]), int(b.seq_lens[order][i]))
        pairs = [("positions", a.positions, b.positions), ("input_ids", a.input_ids, b.input_ids)]
        pairs += [("slot_mapping", *both) for both in zip(a.slot_mappings, b.slot_mappings, strict=True)]
        for name, mine, other in pairs:
            other = other[self.take]
            if (t := _first(mine, other)) is not None:
                at = int(a.positions[t])
                return self._differs(name, int(owner[t]), "position", at, int(mine[t]), int(other[t]))
        return None

    def _block_tables(self) -> Difference | None:
        """The blocks that hold tokens; what follows in a row is nobody's."""
        for size, mine, other in zip(self.rules.block_sizes, self.a.block_tables, self.b.block_tables, strict=True):
            used = -(-self.a.seq_lens // size)
            width = int(used.max())
            mask = np.arange(width) < used[:, None]
            mine, other = np.where(mask, mine[:, :width], 0), np.where(mask, other[self.order, :width], 0)
            if (flat := _first(mine.reshape(-1), other.reshape(-1))) is not None:
                i, column = divmod(flat, width)
                return self._differs("block_table", i, "column", column, int(mine[i, column]), int(other[i, column]))
        return None

    def _logits(self) -> Difference | None:
        a, b = self.a.logits, self.b.logits[self.order]
        # [r] near: how far the worst logit of each row is off
        self.off = np.zeros(len(a), np.float32)
        if self.rules.equality == "exact":
            if (flat := _first(_bits(a).reshape(-1), _bits(b).reshape(-1))) is not None:
                i, token = divmod(flat, a.shape[1])
                return self._differs("logits", i, "token id", token, float(a[i, token]), float(b[i, token]))
            return None
        gap = np.abs(b - a)
        self.off, scale = gap.max(-1), np.abs(a).max(-1)
        right = self.off <= self.rules.bound * scale  # false for NaN
        if not right.all():
            i = int(np.flatnonzero(~right)[0])
            nan = np.isnan(gap[i])
            token = int(nan.argmax() if nan.any() else gap[i].argmax())
            note = f"{self.off[i] / scale[i]:.2g} max|a| off, {self.rules.bound:g} is allowed"
            return self._differs("logits", i, "token id", token, float(a[i, token]), float(b[i, token]), note)
        ratios = (self.off / np.maximum(scale, np.finfo(np.float32).tiny)).tolist()
        self.report.ratios += ratios
        self.report.worst = max(self.report.worst, *ratios)
        return None

    def _processed(self) -> Difference | None:
        """What was chosen from, of the requests that chose."""
        a, b = self.a, self.b
        self.held: dict[int, Held] = {}
        if a.processed is None or b.processed is None:
            return None
        for i, j in enumerate(self.order.tolist()):
            req_id = a.req_ids[i]
            if not a.sampled[i] or not b.sampled[j] or (req_id in self.rules.opaque and self.rules.equality == "near"):
                continue
            params = self.params[req_id][0]
            mine, theirs = scaled(a.processed[i], a.scaled, params), scaled(b.processed[j], b.scaled, params)
            raw_scale = float(np.abs(a.logits[i][np.isfinite(a.logits[i])]).max(initial=0.0))
            held = hold(mine, theirs, params, raw_scale, self.rules)
            if held.wrong is not None:
                token, left, right, note = held.wrong
                return self._differs("processed_logits", i, "token id", token, left, right, note)
            self.held[i] = held
        return None

    def _judge(self, i: int, token: int, params: SamplingParams, seed: int, position: int) -> Judgement:
        """Near: b's ``token`` of a's i-th request."""
        held = self.held.get(i)
        if held is None:
            if self.a.req_ids[i] in self.rules.opaque:
                return Judgement("excused" if token != self.a.sampled[i][0] else "same", "a custom processor")
            return judge(self.a.logits[i], float(self.off[i]), token, params, seed, position)
        if held.excuse:
            return Judgement("same" if token == self.a.sampled[i][0] else "excused", held.excuse)
        return judge_scores(held.scores, held.off, token, params, seed, position)

    def _outputs(self) -> Difference | None:
        params = {req_id: params for req_id, (params, _) in self.params.items()}
        found = OutputComparison(self.a, self.b, self.rules, params, self.off, self.held).first()
        return None if found is None else self._differs(*found)

    def _tokens(self) -> Difference | None:
        a, b = self.a, self.b
        self.report.rows += len(a.req_ids)
        for i, j in enumerate(self.order.tolist()):
            req_id = a.req_ids[i]
            at = int(a.positions[a.logits_indices[i]]) + 1
            if len(a.sampled[i]) != len(b.sampled[j]):
                return self._differs("tokens", i, "position", at, a.sampled[i], b.sampled[j], "not as many")
            params, seed = self.params[req_id]
            if not (a.sampled[i] and self.rules.tokens and (self.rules.draws or params.temperature == 0)):
                continue
            self.report.tokens += 1
            one, other = a.sampled[i][0], b.chosen[j]
            if self.rules.equality == "exact":
                if one != other:
                    return self._differs("tokens", i, "position", at, one, other)
                continue
            verdict = self._judge(i, other, params, seed, at - 1)
            if verdict.kind == "wrong":
                return self._differs("tokens", i, "position", at, one, other, verdict.text)
            if verdict.kind == "excused":
                self.report.excused += 1
                self.report.excuses.append(f"step {a.step}, {req_id!r} at position {at}: {verdict.text}")
        return None


def _first(a: Array, b: Array) -> int | None:
    """Index of the first element that differs, of two 1-D arrays of one length."""
    unequal = np.flatnonzero(a != b)
    return int(unequal[0]) if len(unequal) else None


def _bits(values: Array) -> Array:
    return np.ascontiguousarray(values, np.float32).view(np.int32)
