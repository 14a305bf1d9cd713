"""Random lives of requests, driven through real state and input kernels, so that a stage meets everything a step can
hold: chunked prefills, drafts of which some are accepted, preemption and resumption, rows that get new owners.

    lives = Lives(rt, lambda lives: Penalties(...), random_params, policy="uva_pool", seed=0)
    lives.run(steps=12)             # every logits row that is sampled equals the oracle's
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from mrv2lab.ops.post_update import post_update
from mrv2lab.protocol import RequestData, SamplingParams
from mrv2lab.runner.prepare import prepare_inputs
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.runtime.transfer import POLICIES
from mrv2lab.sample.stage import SampleContext
from mrv2lab.state import InputBuffers, RequestState, gather_host_batch
from tests.sample import oracle
from tests.state.requests import scheduled

LENGTH = 64


@dataclass
class Life:
    """One request, as the test knows it."""

    req_id: str
    params: SamplingParams
    prompt: list[int]
    stop_ids: tuple[int, ...] = ()
    processors: tuple[Any, ...] = ()
    seen_by_oracle: tuple[Any, ...] = ()
    """The same processors over lists and NumPy."""
    outputs: list[int] = field(default_factory=list)
    computed: int = 0

    @property
    def known(self) -> list[int]:
        return [*self.prompt, *self.outputs]

    def data(self) -> RequestData:
        return RequestData(
            req_id=self.req_id,
            prompt_len=len(self.prompt),
            all_token_ids=self.known,
            sampling=self.params,
            seed=0,
            seed_given=False,
            block_ids=([1],),
            num_computed_tokens=self.computed,
            stop_token_ids=self.stop_ids,
            processors=self.processors,
        )


class Lives:
    """R rows, T tokens and K drafts of tiny requests over ``vocab`` tokens; ``make`` gives the stage under test."""

    def __init__(
        self,
        rt: Runtime,
        make: Callable[[Lives], Any],
        born: Callable[[np.random.Generator, Lives], Life],
        *,
        vocab: int = 40,
        rows: int = 5,
        drafts: int = 2,
        policy: str = "uva_pool",
        seed: int = 0,
    ) -> None:
        self.rt = rt
        self.vocab, self.rows, self.drafts = vocab, rows, drafts
        self.rng = np.random.default_rng(seed)
        self.born, self._make = born, make
        self.transfers = POLICIES[policy](rt)
        self.states = RequestState(
            rt, self.transfers, max_num_reqs=rows, max_model_len=LENGTH, num_speculative_tokens=drafts
        )
        tokens = rows * LENGTH
        self.buffers = InputBuffers(
            rt, self.transfers, max_num_reqs=rows, max_num_batched_tokens=tokens, num_speculative_tokens=drafts
        )
        self.no_drafts = rt.zeros(rows, torch.int32, name="no_drafts")
        self.num_rejected = rt.zeros(rows, torch.int32, name="num_rejected")
        self.stage = make(self)
        self.live: list[Life] = []
        self.waiting: list[Life] = []
        self.launched: list[bool] = []
        """Whether each step used the stage."""
        self._births = 0
        self._unchecked: list[tuple[torch.Tensor, np.ndarray, list[oracle.Row | None]]] = []

    # -- one step by hand ----------------------------------------------------------------------------------------------

    def add(self, life: Life) -> int:
        """Give it a row; returns the row."""
        row = self.states.add_request(life.data())
        self.stage.add_request(row, life.data())
        self.live.append(life)
        return row

    def begin(self, tokens: dict[str, int], drafts: dict[str, list[int]] | None = None, step: int = 0) -> SampleContext:
        """Apply what is staged and prepare the inputs. ``tokens`` count drafts in."""
        for req_id, ids in (drafts or {}).items():
            row = self.states.req_id_to_index[req_id]
            self.states.draft_tokens.unstage(row)
            self.states.draft_tokens.stage_write(row, 0, ids)
        with self.transfers.prepare():
            self.states.apply_staged_writes()
            self.states.draft_tokens.apply_write()
            self.stage.apply_staged_writes()
            host = gather_host_batch(self.states, scheduled(tokens, drafts))
            batch = prepare_inputs(self.rt, self.states, self.buffers, host, step)
        local = self.buffers.expanded_local_pos if drafts else self.no_drafts
        return SampleContext(batch, self.states, local[: host.num_logits])

    def logits(self, values: Any) -> torch.Tensor:
        """On the device."""
        return self.rt.adopt(torch.tensor(np.asarray(values), dtype=torch.float32).to(self.rt.device), "logits")

    def finish(self, context: SampleContext, sampled: dict[str, list[int]]) -> None:
        """Write the accepted tokens into the state, as the runner does behind sampling."""
        host = context.batch.host
        r = len(host.req_ids)
        tokens = torch.full((r, self.drafts + 1), 3)
        counts, rejected = torch.zeros(r, dtype=torch.int32), torch.zeros(r, dtype=torch.int32)
        for i, req_id in enumerate(host.req_ids):
            said = sampled.get(req_id, [])
            tokens[i, : len(said)] = torch.tensor(said, dtype=torch.int64)
            counts[i] = len(said)
            rejected[i] = int(host.num_draft_tokens[i]) + 1 - len(said) if said else 0
        args = [self.rt.adopt(one.to(self.rt.device), "sampled") for one in (tokens, counts, rejected)]
        state = self.states
        post_update(
            self.rt,
            context.batch.idx_mapping,
            context.batch.query_start_loc,
            *args,
            state.all_token_ids.gpu,
            state.last_sampled_tokens,
            state.total_len.gpu,
            state.num_computed_tokens.gpu,
            r,
        )
        if hasattr(self.stage, "count_sampled"):
            self.stage.count_sampled(context.batch, args[0], args[1])
        exact = state.num_computed_tokens_np[host.rows] + host.num_scheduled_tokens - rejected.numpy()
        state.num_computed_tokens_np[host.rows] = exact
        np.minimum(state.num_computed_tokens_np, state.prefill_len.np, out=state.num_computed_prefill_tokens)
        self.rt.end_step()

    def fails(self, *seeds: int, steps: int = 25) -> bool:
        """Whether lives like these, of some seed, meet a wrong logit, as they must for a mutant."""
        try:
            for seed in seeds:
                Lives(CpuRuntime(), self._make, self.born, vocab=self.vocab, seed=seed).run(steps)
        except AssertionError:
            return True
        return False

    # -- many steps ----------------------------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        """Random steps, each compared one step later, when the next one's host writes are done."""
        for step in range(steps):
            with self.transfers.prepare():  # under `barrier`, host tables may be written only now
                self._come_and_go()
                tokens, drafts = self._schedule()
                context = self.begin(tokens, drafts, step)
            self.check_all()
            self._sample(context, drafts)
        self.check_all()

    def _come_and_go(self) -> None:
        for life in list(self.live):
            fate = self.rng.random()
            if fate < 0.25 or len(life.known) > LENGTH - 2 * self.drafts - 4:
                self.states.remove_request(life.req_id)
                self.live.remove(life)
                if fate < 0.15 and len(life.known) <= LENGTH - 2 * self.drafts - 4:  # preempted
                    life.computed = 0
                    self.waiting.append(life)
        while len(self.live) < self.rows and (self.waiting or self.rng.random() < 0.8 or not self.live):
            if not self.waiting:
                self._births += 1
                life = self.born(self.rng, self)
                life.req_id = f"r{self._births}"
                self.waiting.append(life)
            self.add(self.waiting.pop())

    def _schedule(self) -> tuple[dict[str, int], dict[str, list[int]]]:
        tokens, drafts = {}, {}
        for i in self.rng.permutation(len(self.live)).tolist():
            life = self.live[i]
            left = len(life.known) - life.computed
            if self.rng.random() < 0.15 and tokens:
                continue
            if left > 1:
                tokens[life.req_id] = int(self.rng.choice([left, self.rng.integers(1, left + 1)]))
            else:
                ids = self.rng.integers(0, self.vocab, self.rng.integers(0, self.drafts + 1)).tolist()
                if ids:
                    drafts[life.req_id] = ids
                tokens[life.req_id] = 1 + len(ids)
        return tokens, drafts

    def _sample(self, context: SampleContext, drafts: dict[str, list[int]]) -> None:
        host = context.batch.host
        lives = {life.req_id: life for life in self.live}
        values = (self.rng.normal(0, 4, (host.num_logits, self.vocab)) * 2).round() / 2  # ties and zeros
        values[self.rng.random(values.shape) < 0.1] = -np.inf
        logits = self.logits(values)
        used = self.stage.used(host.rows)
        self.launched.append(used)
        if used:
            self.stage.apply(logits, context)
        rows: list[oracle.Row | None] = []
        sampled = {}
        for req_id, scheduled_tokens in zip(host.req_ids, host.num_scheduled_tokens.tolist(), strict=True):
            life, own = lives[req_id], drafts.get(req_id, [])
            done = life.computed + scheduled_tokens - len(own) == len(life.known)
            for pos in range(len(own) + 1):
                row = oracle.Row(
                    life.params, list(life.prompt), list(life.outputs), own[:pos], life.stop_ids, None,
                    life.seen_by_oracle,
                )  # fmt: skip
                rows.append(row if done else None)
            if done:
                accepted = int(self.rng.integers(0, len(own) + 1))
                sampled[req_id] = [*own[:accepted], int(self.rng.integers(0, self.vocab))]
        self._unchecked.append((logits, values, rows))
        self.finish(context, sampled)
        for req_id, scheduled_tokens in zip(host.req_ids, host.num_scheduled_tokens.tolist(), strict=True):
            life, own, said = lives[req_id], drafts.get(req_id, []), sampled.get(req_id, [])
            life.computed += scheduled_tokens - (len(own) + 1 - len(said) if said else 0)
            life.outputs += said

    def check_all(self) -> None:
        """Compare what the steps so far made of their logits with the oracle."""
        for logits, values, rows in self._unchecked:
            got = self.rt.read(logits).double().numpy()
            for i, row in enumerate(rows):
                if row is not None:
                    want = oracle.process(values[i].astype(np.float32), row)
                    np.testing.assert_array_equal(got[i] == -np.inf, want == -np.inf)
                    np.testing.assert_allclose(got[i], want, rtol=1e-5, atol=1e-5)
        self._unchecked.clear()
