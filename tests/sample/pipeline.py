"""The whole MRV2 sampler on one batch of random logits, beside the float64 oracle: what it chose from, what it chose,
and the log-probabilities of that.

    Pipeline(rt, vocab=1000, rows=3, seed=0).check()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mrv2lab.check import sampling_draws
from mrv2lab.protocol import GrammarOutput, RequestData, SamplingParams
from mrv2lab.runtime.base import Runtime
from mrv2lab.sample import Sampler, SamplingState
from mrv2lab.sample.grammar import GrammarMask
from mrv2lab.sample.logprobs import LogprobsMode, SampleLogprobs
from mrv2lab.sample.token_logprobs import LogprobsBuffers, TokenLogprobs
from tests.sample import oracle
from tests.sample.lives import Life, Lives

INF = float("inf")
MAX_DRAFTS = 4


@dataclass
class Seeded(Life):
    """A life with a seed, half-way through its output."""

    seed: int = 0

    def data(self) -> RequestData:
        made = super().data()
        return RequestData(**{name: getattr(made, name) for name in made.__slots__} | {"seed": self.seed})


def shift(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """A custom processor: the number of tokens so far matters, and so does the last one."""
    logits[len(ids) % len(logits)] += 3
    return logits.roll(1)


def shift_np(ids: list[int], x: Any) -> Any:
    x[len(ids) % len(x)] += 3
    return np.roll(x, 1)


class Pipeline:
    """One batch. ``params``: of request i, None = drawn so that settings mix; ``levels``: logits are multiples of
    1 / levels, so that many tie."""

    def __init__(
        self,
        rt: Runtime,
        *,
        vocab: int,
        rows: int,
        drafts: int = MAX_DRAFTS,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        strided: bool = False,
        levels: int = 0,
        mode: LogprobsMode = "raw_logprobs",
        policy: str = "uva_pool",
        params: Callable[[int, np.random.Generator], SamplingParams] | None = None,
        sampler: type[Sampler] = Sampler,
    ) -> None:
        self.rt, self.vocab, self.mode = rt, vocab, mode
        self.rng = np.random.default_rng(seed)
        self.most = rows * (drafts + 1)
        self.lives = Lives(
            rt,
            lambda lives: sampler(
                rt,
                lives.transfers,
                lives.states,
                SamplingState(lives.transfers, max_num_reqs=rows, vocab_size=vocab),
                max_num_logits=self.most,
                vocab_size=vocab,
                keep_processed=True,
            ),
            lambda rng, lives: Life("", SamplingParams(), [1]),
            vocab=vocab,
            rows=rows,
            drafts=drafts,
            policy=policy,
        )
        kernels = TokenLogprobs(rt, max_rows=self.most, vocab_size=vocab)
        self.logprobs = SampleLogprobs(
            rt, self.lives.transfers, kernels, max_num_reqs=rows, max_num_logits=self.most, mode=mode
        )
        self.buffers = LogprobsBuffers(rt, "test.logprobs", max_rows=self.most, max_top=kernels.max_top)
        self.grammar = GrammarMask(rt, self.lives.transfers, max_num_logits=self.most, vocab_size=vocab)
        self.sampled = rt.zeros(self.most, torch.int64, name="test.sampled")
        self._num_drafts = drafts
        self._add(rows, seed, params)
        self.logits = self._logits(dtype, strided, levels)
        self.masks = self._masks()

    # -- the batch -----------------------------------------------------------------------------------------------------

    def _some(self, low: int, high: int) -> list[int]:
        return self.rng.integers(0, self.vocab, int(self.rng.integers(low, high))).tolist()

    def _add(self, rows: int, seed: int, params: Callable[..., SamplingParams] | None) -> None:
        settings, self.drafts = sampling_draws.settings(), {}
        for i in range(rows):
            setting = settings[(7 * seed + i) % len(settings)]
            if params is not None:
                mine = params(i, self.rng)
            else:
                mine = sampling_draws.params(setting, self.rng, self.vocab, max_tokens=20)
            prompt, outputs = self._some(1, 20), self._some(0, 12)
            if mine.bad_words and self.rng.random() < 0.7:  # so that a word is about to be completed
                word: Any = mine.bad_words[-1]
                outputs += list(word[:-1])
            stop = sorted({*mine.stop_token_ids, *self._some(1, 4)})
            own = (shift,) if self.rng.random() < 0.15 and params is None else ()
            life = Seeded(f"r{i}", mine, prompt, tuple(stop), own, (shift_np,) if own else (), outputs)
            life.seed = int(self.rng.integers(-(2**63), 2**63 - 1)) if mine.seed is None else mine.seed
            life.computed = len(life.known) - 1
            row = self.lives.add(life)
            self.logprobs.add_request(row, life.data())
            if ids := self._some(0, self._num_drafts + 1):
                self.drafts[life.req_id] = ids
        tokens = {life.req_id: 1 + len(self.drafts.get(life.req_id, [])) for life in self.lives.live}
        order = self.rng.permutation(list(tokens)).tolist()
        self.context = self.lives.begin({one: tokens[one] for one in order}, self.drafts)
        self.host = self.context.batch.host
        self.n = self.host.num_logits
        with self.lives.transfers.prepare():
            self.plan = self.logprobs.plan(self.host)

    def _logits(self, dtype: torch.dtype, strided: bool, levels: int) -> torch.Tensor:
        values = torch.from_numpy(self.rng.normal(0, 4, (self.n, self.vocab)).astype(np.float32))
        if levels:
            values = (values * levels).round() / levels
        special = torch.from_numpy(self.rng.random((self.n, self.vocab)))
        values[special < 0.05] = -INF
        values[(special > 0.999) & (special < 0.9995)] = float("nan")
        for row in range(0, self.n, 7):
            values[row, : self.vocab // 2] = -INF
        if self.n > 4:
            values[4] = -INF
        wide = torch.full((self.n, self.vocab + 5 * strided), 1e9, dtype=dtype)  # poison behind each row
        wide[:, : self.vocab] = values.to(dtype)
        self.values = wide[:, : self.vocab].float()
        return self.rt.adopt(wide.to(self.rt.device), "logits")[:, : self.vocab]

    def _masks(self) -> GrammarOutput | None:
        """Of every fifth request, in small vocabularies: the oracle reads a mask bit by bit."""
        bound = self.host.req_ids[::5]
        if self.vocab > 2000 or len(self.host.req_ids) < 3:
            return None
        words = -(-self.vocab // 32)
        mask = self.rng.integers(-(2**31), 2**31, (len(bound), self._num_drafts + 1, words)).astype(np.int32)
        return GrammarOutput(bound, mask)

    # -- what comes out ------------------------------------------------------------------------------------------------

    def run(self) -> tuple[Any, Any, Any]:
        """Processed logits float64[n, V], tokens [n], and the log-probabilities or None."""
        if self.masks is not None:
            self.grammar.apply(self.logits, self.masks, self.host)
        out = self.sampled[: self.n]
        processed = self.lives.stage.sample(out, self.logits, self.context)
        step = None
        if self.plan is not None:
            source = processed if self.logprobs.processed else self.logits
            step = self.logprobs.launch(self.plan, self.buffers, source, out)
            step.copy()
        self.rt.synchronize()
        counts = (self.host.num_draft_tokens + 1).astype(np.int32)
        given = step.read(counts) if step is not None else None
        return self.rt.read(processed).double().cpu().numpy(), self.rt.read(out).tolist(), given

    def rows(self) -> list[oracle.Row]:
        """The oracle's rows, in batch order."""
        lives = {life.req_id: life for life in self.lives.live}
        at = {req_id: i for i, req_id in enumerate(self.masks.req_ids)} if self.masks is not None else {}
        made = []
        for req_id in self.host.req_ids:
            life, own = lives[req_id], self.drafts.get(req_id, [])
            for pos in range(len(own) + 1):
                mask = self.masks.bitmask[at[req_id], pos] if req_id in at else None  # type: ignore[union-attr]
                made.append(
                    oracle.Row(
                        life.params, life.prompt, life.outputs, own[:pos], life.stop_ids, mask, life.seen_by_oracle
                    )
                )
        return made

    def seeds(self) -> list[int]:
        """Of each logits row."""
        lives = {life.req_id: life for life in self.lives.live}
        return [lives[one].seed for one in self.host.req_ids for _ in range(len(self.drafts.get(one, [])) + 1)]

    def check(self) -> int:
        """Every row; returns how many. Raises ``AssertionError``."""
        got, tokens, logprobs = self.run()
        for i, (row, seed) in enumerate(zip(self.rows(), self.seeds(), strict=True)):
            check_row(row, got[i], self.values[i].numpy(), tokens[i], seed)
            if row.params.logprobs is not None:
                base = self.values[i].numpy() if not self.logprobs.processed else got[i]
                self._check_logprobs(logprobs, i, row, base, tokens[i])
        return self.n

    def _check_logprobs(self, logprobs: Any, i: int, row: oracle.Row, base: Any, token: int) -> None:
        x = base if self.logprobs.processed else oracle.grammar(oracle.clean(base), row.mask)
        wanted = row.params.logprobs
        if np.all(x == -INF):
            return
        ids, values = oracle.top_logprobs(x, token, wanted)
        if self.mode.endswith("logits"):
            values = x[ids].tolist()
        got_ids, got = logprobs.token_ids[i, : len(ids)], logprobs.values[i, : len(ids)]
        # What is left over of a row with few finite logits: no token, or one that is impossible.
        said = [k for k in range(len(ids)) if k == 0 or values[k] > -INF]
        assert (got[len(said) :] == -INF).all()
        want = dict(zip(ids, values, strict=True))
        given, due = set(got_ids[: len(said)].tolist()), {ids[k] for k in said}
        assert given == due, _difference(given ^ due, i, token, x, got_ids, got, wanted)
        np.testing.assert_allclose(got[: len(said)], [want[one] for one in got_ids[: len(said)].tolist()], 1e-5, 1e-5)
        assert got_ids[0] == token
        if wanted != -1 and wanted <= self.buffers.max_top:  # whole rows are ordered by their float32 logarithms
            assert got_ids[: len(said)].tolist() == [ids[k] for k in said]
        assert logprobs.ranks[i] == oracle.rank(x, token)
        assert (logprobs.token_ids[i, len(ids) :] == -1).all()


def _difference(ids: set[int], i: int, token: int, x: Any, got_ids: Any, got: Any, wanted: int) -> str:
    """What to look at where the ids given are not those due: each with its logit, and how the row came out."""
    logits = {one: float(x[one]) for one in sorted(ids) if one >= 0}
    return f"row {i}, token {token} of {x[token]}, {wanted} asked: differ {logits}; given {got_ids[:50]} {got[:50]}"


def check_row(row: oracle.Row, got: Any, values: Any, token: int, seed: int) -> None:
    """One row of processed logits, and the choice from it, against the oracle's."""
    want = oracle.process(values, row)
    p = row.params
    differ = np.isneginf(got) != np.isneginf(want)
    fair = np.zeros(len(want), bool)
    if p.top_p < 1 or p.min_p > 0:
        cut = oracle.process(values, row, "top_k")
        hot = oracle.process(values, row, "temperature")
        fair = oracle.excused(cut, p.top_p) | oracle.excused(hot, 1.0, p.min_p)
    assert not (differ & ~fair).any(), (p, np.flatnonzero(differ & ~fair))
    both = ~np.isneginf(got) & ~np.isneginf(want)
    np.testing.assert_allclose(got[both], want[both], rtol=1e-5, atol=1e-5)
    if np.all(want == -INF):
        return
    assert got[token] > -INF
    scores = want if p.temperature < 1e-5 else want + oracle.noise_spec(seed, row.position, len(want))
    best = int(np.argmax(scores))
    near = scores[token] >= scores[best] - 1e-5 * max(1.0, abs(scores[best]))
    assert token == best or near or differ[best] or fair[token], (token, best, p)
    # Ties are exact where nothing was computed.
    if p == SamplingParams(logprobs=p.logprobs) and not row.processors:
        assert token == best
