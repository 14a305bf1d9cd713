"""A batch with sampling parameters and no model: logits in, processed logits and tokens out, beside the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mrv2lab.observer import EventLog
from mrv2lab.protocol import SamplingParams
from mrv2lab.runner_v1.cached_request import CachedRequestState
from mrv2lab.runner_v1.persistent_batch import InputBatch
from mrv2lab.runner_v1.sampler import Sampler
from mrv2lab.runner_v1.sampling_metadata import MetadataMaker
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.runtime.transfer import PinnedCopy
from tests.sample import oracle

INF = float("inf")


class SamplingBench:
    """Requests are added, logits set, and a step made of refresh and sample, as the runner does it."""

    def __init__(
        self, vocab: int = 50, rows: int = 8, dtype: torch.dtype = torch.float32, strided: bool = False, rt: Any = None
    ) -> None:
        self.rt = rt or CpuRuntime()
        self.vocab, self.dtype = vocab, dtype
        self.batch = InputBatch(rows, 64, vocab, (4,), PinnedCopy(self.rt).table)
        self.sampler = Sampler(self.rt)
        self.whole = False
        """Processed logits whole for the oracle, though no draw needs them so: as processed logprobs do."""
        self.maker = MetadataMaker(self.rt, vocab)
        self.sampled = self.rt.zeros((rows, 1), torch.int64, name="sampled")
        width = vocab + 3 * strided
        # [R, V] in wider rows that end in poison
        self.logits = self.rt.empty((rows, width), dtype, name="logits")[:, :vocab]
        self.states: dict[str, CachedRequestState] = {}

    def add(
        self,
        prompt: list[int] | None = None,
        outputs: list[int] | None = None,
        stop: tuple[int, ...] = (),
        processors: tuple[Any, ...] = (),
        **params: Any,
    ) -> CachedRequestState:
        seed = params.get("seed")
        state = CachedRequestState(
            f"r{len(self.states)}",
            prompt or [1],
            SamplingParams(**params),
            seed or 0,
            seed is not None,
            self.sampler.make_generator(seed) if seed is not None else None,
            [[1]],
            0,
            outputs if outputs is not None else [],
            stop,
            self.sampler.stages.custom.add(processors),
        )
        self.states[state.req_id] = state
        self.batch.add_request(state)
        return state

    def remove(self, req_id: str) -> None:
        self.batch.remove_request(req_id)
        self.batch.condense()

    def refresh(self) -> None:
        """What the runner does when rows have changed."""
        self.batch.temperature.publish(self.batch.num_reqs)
        if self.whole:
            self.batch.sampling.num_logprobs.update(dict.fromkeys(range(self.batch.num_reqs), 0))
        self.batch.sampling_metadata = self.maker.make(self.batch)

    def set_logits(self, values: Any) -> torch.Tensor:
        """[r, V]; returns them as the device has them."""
        values = torch.as_tensor(values).to(self.dtype)
        self.rt.raw(self.logits)[: len(values)] = values
        return values

    def step(self, values: Any, discarded: tuple[int, ...] = ()) -> tuple[np.ndarray[Any, Any], list[int]]:
        """Processed logits [r, V] and tokens [r]."""
        self.rt.synchronize()
        self.set_logits(values)
        self.refresh()
        count = self.batch.num_reqs
        self.sampler.sample(self.sampled[:count], self.logits[:count], self.batch, discarded)
        tokens = self.rt.read(self.sampled)[:count, 0].tolist()
        assert self.sampler.processed is not None
        return self.rt.read(self.sampler.processed).float().numpy(), tokens

    def rows(self, masks: dict[str, Any] | None = None) -> list[oracle.Row]:
        """The oracle's rows of the batch."""
        made = []
        for req_id in self.batch.req_ids:
            state = self.states[req_id]
            fns = [wrapped(fn) for _, fn in state.processors]
            mask = (masks or {}).get(req_id)
            made.append(
                oracle.Row(
                    state.sampling,
                    state.prompt_token_ids,
                    state.output_token_ids,
                    (),
                    state.stop_token_ids,
                    mask,
                    fns,
                )
            )
        return made

    def listen(self) -> EventLog:
        """Hear the launches from now on."""
        self.rt.observer = log = EventLog()
        return log

    def check(self, values: Any, until: str = "") -> None:
        """A step's processed logits are the oracle's: kept sets but for what is excused, values to 1e-5."""
        self.whole = self.sampler.keeps_shape = True
        got, tokens = self.step(values)
        got = oracle.clean(got)
        raw = self.rt.read(self.logits)[: len(got)].float().numpy()
        for row, mine, logits, token in zip(self.rows(), got, raw, tokens, strict=True):
            compare(row, mine, logits, until)
            want = oracle.process(logits, row, until)
            assert mine[token] > -INF or np.all(want == -INF)
            if row.params.temperature == 0 and want.max() > -INF:
                # Equal but for float32: ties go to the lowest id in both.
                assert want[token] >= want.max() - 1e-5 * max(1.0, abs(want.max()))


def compare(row: oracle.Row, mine: Any, logits: Any, until: str = "") -> None:
    """One processed row against the oracle's."""
    want = oracle.process(logits, row, until)
    differ = np.isneginf(mine) != np.isneginf(want)
    if differ.any():
        p = row.params
        hot = oracle.process(logits, row, "temperature")
        cut = oracle.process(logits, row, "top_k")
        fair = oracle.excused(cut, p.top_p) | oracle.excused(hot, 1.0, p.min_p)
        assert not (differ & ~fair).any(), (p, np.flatnonzero(differ & ~fair))
    both = ~np.isneginf(mine) & ~np.isneginf(want)
    np.testing.assert_allclose(mine[both], want[both], rtol=1e-5, atol=1e-5)


def wrapped(fn: Any) -> Any:
    """A processor of tensors, for the oracle's float64 rows."""

    def call(ids: list[int], x: Any) -> Any:
        return fn(torch.tensor(ids, dtype=torch.int32), torch.tensor(x, dtype=torch.float32)).double().numpy()

    return call
