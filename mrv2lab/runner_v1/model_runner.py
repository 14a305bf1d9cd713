"""The V1 runner: a persistent batch edited on the host, copied to the device in every step. Counterpart in vLLM:
``GPUModelRunner`` in ``v1/worker/gpu_model_runner.py``.

Synchronous: each step waits for its tokens in the bookkeeping. Asynchronous: nothing waits but the barrier, and the
host writes placeholders for what it does not know yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mrv2lab.attention import AttentionBackend
from mrv2lab.config import EngineConfig
from mrv2lab.protocol import ForwardInputs, GrammarOutput, Model, RequestData, V1SchedulerOutput
from mrv2lab.runner_v1.async_output import AsyncOutput, OutputRing, Slot, SyncOutput
from mrv2lab.runner_v1.bookkeeping import bookkeep_async, bookkeep_sync, repair_outputs
from mrv2lab.runner_v1.buffers import AsyncBarrier, GuardedTable
from mrv2lab.runner_v1.cached_request import CachedRequestState
from mrv2lab.runner_v1.dummy import DummyRuns
from mrv2lab.runner_v1.extras import StepExtras
from mrv2lab.runner_v1.forward_inputs import InputsBuilder
from mrv2lab.runner_v1.grammar import GrammarMask
from mrv2lab.runner_v1.graph_capture import V1Graphs
from mrv2lab.runner_v1.graph_dispatcher import Decision
from mrv2lab.runner_v1.graph_stats import V1GraphReport
from mrv2lab.runner_v1.padding import TailPadding
from mrv2lab.runner_v1.persistent_batch import GREEDY_BELOW, InputBatch
from mrv2lab.runner_v1.prepare import InputPreparation, StepBatch
from mrv2lab.runner_v1.reorder import ReorderDemand, reorder_batch
from mrv2lab.runner_v1.sampler import Sampler
from mrv2lab.runner_v1.sampling_metadata import MetadataMaker
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.transfer import POLICIES, Barrier, PinnedCopy, UvaPool

_DEMANDS: dict[str, ReorderDemand] = {"none": None, "decode_first": 1, "mrv2": "mrv2"}


class ModelRunnerV1:
    """Drives one decoder from V1's scheduler messages."""

    def __init__(self, config: EngineConfig, rt: Runtime, model: Model, attention: AttentionBackend) -> None:
        scheduler = config.scheduler
        _refuse(config)
        self.rt = rt
        self.graphs = V1Graphs(config, rt, model, attention)
        self.model: Model = self.graphs.model
        """The decoder, with graphs hidden in its forward where there are any."""
        self.async_scheduling = scheduler.async_scheduling
        self.transfers = POLICIES[config.runner.transfer](rt, config.runner.pool_depth)
        # vLLM makes the event only for async scheduling: else the bookkeeping has waited for everything.
        event = self.transfers.event if isinstance(self.transfers, Barrier) and self.async_scheduling else None
        self.barrier = AsyncBarrier(rt, event, config.runner.protected)
        self.requests: dict[str, CachedRequestState] = {}
        """Every unfinished request that was ever scheduled, in the batch or not."""
        self.input_batch = InputBatch(
            scheduler.max_num_reqs,
            scheduler.max_model_len,
            config.model.vocab_size,
            (config.cache.block_size,) * len(config.model.kv_groups),
            self._make_table,
        )
        self.inputs = InputPreparation(
            rt,
            self.transfers,
            self.barrier,
            self.input_batch,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            exposed=self._races_on_purpose(config),
        )
        self.padding = TailPadding(self.inputs)
        self.inputs_builder = InputsBuilder(config, attention, self.inputs)
        self.dummies = DummyRuns(self)
        self.sampler = Sampler(rt)
        self.metadata = MetadataMaker(rt, config.model.vocab_size)
        self.grammar = GrammarMask(rt)
        self.extras = StepExtras(config, rt, self.sampler)
        self.outputs = OutputRing(rt, max_num_reqs=scheduler.max_num_reqs, depth=scheduler.max_concurrent_steps)
        self.reorder_demand = _DEMANDS[config.runner.reorder]
        self.force: Callable[[list[str], torch.Tensor], None] | None = None
        """Called after sampling with the batch's ids and the device tensor sampled int64[r, 1], which it may write by
        queued work before anybody reads it."""
        self.batch: StepBatch | None = None
        """The batch of the latest step that had one, and its logits [r, V], for observers."""
        self.logits: torch.Tensor | None = None
        self._forwarded: tuple[StepBatch, Decision] | None = None
        """The batch between ``execute_model`` and ``sample_tokens``, and its graph."""
        self._unrepaired: Slot | None = None
        """The previous step's tokens, where the batch reads output ids on the host."""

    def _make_table(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> GuardedTable:
        # Masks, [R, V] of them, go through fresh pinned memory: pinned tables of that size are nobody's. So do block
        # tables that would take turns in a pool's slots: a graph looks for them at one address.
        moves = isinstance(self.transfers, UvaPool) and bool(self.graphs.dispatcher.sizes)
        fresh = dtype == torch.bool or (moves and name.startswith("block_table"))
        return GuardedTable(PinnedCopy(self.rt) if fresh else self.transfers, self.barrier, name, shape, dtype)

    def _races_on_purpose(self, config: EngineConfig) -> bool:
        """Whether the settings let the host overwrite what a queued copy has yet to read."""
        depth = config.scheduler.max_concurrent_steps
        if depth == 1:
            return False
        pool = config.runner.transfer == "uva_pool" and config.runner.pool_depth < depth
        return config.runner.transfer == "unsafe" or pool or bool(self.barrier.unprotected)

    # -- execute_model -------------------------------------------------------------------------------------------------

    def execute_model(self, output: V1SchedulerOutput) -> bool:
        """Queue everything up to the hidden states; False if the step has no tokens (then nothing is to be sampled)."""
        if self._forwarded is not None:
            raise RuntimeError("execute_model was called again before sample_tokens")
        if output.scheduled_draft_tokens:
            raise ValueError(
                f"the V1 runner has no rejection sampler yet, but step {output.step} has drafts for "
                f"{sorted(output.scheduled_draft_tokens)}; set num_speculative_tokens to 0"
            )
        span = self.rt.observer.span
        with self.barrier:
            with span("update_states"):
                self._update_states(output)
            if not output.total_num_scheduled_tokens:
                self._emit_gauges(0)
                return False
            with span("prepare_inputs"):
                self.batch = batch = self.inputs.prepare(self.requests, output)
            decision = self.graphs.dispatch(batch.host)
            with span("prepare_attn"):
                if decision.key is not None:
                    self.padding.pad(batch, decision.key)
                inputs = self._attention_metadata(batch, decision)
        with span("forward"), self.graphs.context.set(decision):
            self.model.forward(inputs)
        self._forwarded = batch, decision
        return True

    def _update_states(self, output: V1SchedulerOutput) -> None:
        """Make the batch hold exactly the scheduled requests, dense and in order."""
        batch, span = self.input_batch, self.rt.observer.span
        batch.moves.reset()
        for req_id in output.finished_req_ids:
            self._finish(req_id)
        # Running requests without a token, preempted ones, and those that were preempted and are back already.
        scheduled = output.num_scheduled_tokens.keys() - output.cached_reqs.resumed_req_ids
        for req_id in batch.req_id_to_index.keys() - scheduled:
            self._evict(req_id)
        to_add = [self._remember(data) for data in output.new_reqs]
        to_add += self._update_cached(output)
        for state in to_add:
            batch.add_request(state)
        with span("update_states/condense"):
            batch.condense()
        if self.reorder_demand is not None:
            with span("update_states/reorder"):
                reorder_batch(batch, self.reorder_demand, output.num_scheduled_tokens, output.scheduled_draft_tokens)
        if batch.moves.changed:
            if not batch.all_greedy:
                batch.temperature.publish(batch.num_reqs)
            batch.sampling_metadata = self.metadata.make(batch)

    def _finish(self, req_id: str) -> None:
        state = self.requests.pop(req_id, None)
        if state is not None and state.generator is not None:
            self.sampler.forget(state.generator)
        if state is not None:
            self.sampler.stages.custom.forget(state.processors)
            self.extras.prompts.remove_request(req_id)
        self._evict(req_id)

    def _evict(self, req_id: str) -> None:
        """Take the row away. What the request sampled last, on the device, is not its next input then: it comes back,
        if at all, with tokens that the host knows; and the id may be another request's by that time."""
        self.input_batch.remove_request(req_id)
        if self.input_batch.prev_req_id_to_index is not None:
            self.input_batch.prev_req_id_to_index.pop(req_id, None)

    def _remember(self, data: RequestData) -> CachedRequestState:
        sampling = data.sampling
        draws = data.seed_given and sampling.temperature >= GREEDY_BELOW
        state = CachedRequestState(
            req_id=data.req_id,
            prompt_token_ids=data.all_token_ids[: data.prompt_len],
            sampling=sampling,
            seed=data.seed,
            seed_given=data.seed_given,
            generator=self.sampler.make_generator(data.seed) if draws else None,
            block_ids=[list(ids) for ids in data.block_ids],
            num_computed_tokens=data.num_computed_tokens,
            output_token_ids=data.all_token_ids[data.prompt_len :],
            stop_token_ids=data.stop_token_ids,
            processors=self.sampler.stages.custom.add(data.processors),
        )
        self.requests[data.req_id] = state
        self.extras.prompts.add_request(data.req_id, data.prompt_len, sampling.prompt_logprobs)
        return state

    def _update_cached(self, output: V1SchedulerOutput) -> list[CachedRequestState]:
        """The diffs of requests that are remembered, one turn of the loop each; returns those that need a row."""
        batch, requests, cached = self.input_batch, self.requests, output.cached_reqs
        rows, computed_np = batch.req_id_to_index, batch.num_computed_tokens.np
        new_blocks, resumed = cached.new_block_ids, cached.resumed_req_ids
        counts = zip(
            cached.req_ids, cached.num_computed_tokens.tolist(), cached.num_output_tokens.tolist(), strict=True
        )
        to_add: list[CachedRequestState] = []
        for req_id, num_computed, num_outputs in counts:
            state = requests[req_id]
            state.num_computed_tokens = num_computed
            outputs = state.output_token_ids
            row = rows.get(req_id)
            if row is None:
                # The row is gone, and the last outputs may be placeholders that nobody has filled in.
                known = cached.all_token_ids[req_id]
                outputs[:] = known[len(known) - num_outputs :]
            elif num_outputs < len(outputs):
                del outputs[num_outputs:]
                batch.num_tokens_no_spec[row] = state.num_prompt_tokens + num_outputs
            blocks = new_blocks.get(req_id)
            if req_id in resumed:
                assert blocks is not None
                state.block_ids = [list(ids) for ids in blocks]
            elif blocks is not None:
                for mine, ids in zip(state.block_ids, blocks, strict=True):
                    mine.extend(ids)
            if row is None:
                to_add.append(state)
                continue
            computed_np[row] = num_computed
            if blocks is not None:
                batch.block_table.append_row(blocks, row)
        return to_add

    def _attention_metadata(self, batch: StepBatch, decision: Decision) -> ForwardInputs:
        return self.inputs_builder.build(batch, decision)

    # -- before the first request, and between steps -------------------------------------------------------------------

    @property
    def is_forwarded(self) -> bool:
        """Whether a step stands between ``execute_model`` and ``sample_tokens``."""
        return self._forwarded is not None

    def dummy_run(self, num_tokens: int, num_reqs: int | None = None, *, context: int | None = None) -> None:
        """See :meth:`mrv2lab.runner_v1.dummy.DummyRuns.run`."""
        self.dummies.run(num_tokens, num_reqs, context=context)

    def warm_up_and_capture(self, *, progress: bool = True) -> V1GraphReport:
        """Capture the graph of every key by dummy runs, which warm each shape up first."""
        return self.graphs.capture(self.dummies.capture, progress=progress)

    def graph_report(self) -> V1GraphReport:
        """What the graphs cost, and what the steps did with them."""
        return self.graphs.report()

    # -- sample_tokens -------------------------------------------------------------------------------------------------

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> SyncOutput | AsyncOutput:
        """Queue logits and sampling, write down what came of it, and return the output: known after a wait
        (synchronous), or on its way, its copy queued behind everything else of the step (asynchronous).

        ``grammar`` masks the raw logits of structured requests, in place.
        """
        if self._forwarded is None:
            raise RuntimeError("sample_tokens needs an execute_model with tokens before it")
        (batch, decision), self._forwarded = self._forwarded, None
        host, span = batch.host, self.rt.observer.span
        self.graphs.stats.note(batch.step, host.num_tokens, batch.num_reqs, decision)
        slot = self.outputs.take()
        sampled = slot.sampled[: batch.num_reqs]
        with span("logits"):
            rows = self.input_batch.req_id_to_index
            completed = self.extras.launch_prompts(self.requests, rows, batch, self.model)
            self.logits = logits = self.model.compute_logits(batch.logits_indices, batch.num_reqs)
        with span("sample"):
            with span("sample/output_repair"):
                self._repair_outputs()
            if grammar is not None:
                self.grammar.apply(logits, rows, grammar)
            self.sampler.sample(sampled, logits, self.input_batch, host.discarded)
            if self.force is not None:
                self.force(host.req_ids, sampled)
            extras = self.extras.launch(slot, sampled, logits, self.input_batch)
        output: SyncOutput | AsyncOutput
        num_placeholders = batch.num_holes
        if self.async_scheduling:
            with span("postprocess"), span("postprocess/bookkeeping"):
                num_placeholders += bookkeep_async(
                    self.input_batch, self.requests, host.req_ids, sampled, host.discarded
                )
                extras = self.extras.collect_prompts(completed, extras)
            with span("copy_output"):
                output = self.outputs.send(slot, batch.step, host.req_ids, host.discarded, extras)
            self._unrepaired = slot if extras.repairs else None
        else:
            with span("postprocess"), span("postprocess/bookkeeping"):
                extras = self.extras.collect_prompts(completed, extras)
                made = self.outputs.wait(slot, batch.step, host.req_ids, host.discarded, extras)
                bookkeep_sync(self.input_batch, self.requests, host.req_ids, made.sampled_token_ids)
            output = SyncOutput(made)
        self._emit_gauges(num_placeholders)
        self.rt.end_step()
        return output

    def _repair_outputs(self) -> None:
        """Where a stage of the sampler reads output ids (penalties, bad words, custom processors), wait for the
        previous step's tokens and replace the trailing placeholders: what V1's asynchronous loop pays for them. The
        forward of this step is queued already, so the device does not starve; the host's slack is what shrinks."""
        slot, self._unrepaired = self._unrepaired, None
        metadata = self.input_batch.sampling_metadata
        if slot is not None and metadata is not None and metadata.reads_output_ids:
            slot.repair.synchronize()
            repair_outputs(self.input_batch, slot.sampled_np)

    # -- for observers -------------------------------------------------------------------------------------------------

    def _emit_gauges(self, num_placeholders: int) -> None:
        """``placeholders_touched``: written by this step's bookkeeping, or read as a hole in its input ids."""
        observer = self.rt.observer
        if not observer.enabled:
            return
        moves = self.input_batch.moves
        observer.gauge("row_moves", moves.row_moves)
        observer.gauge("bytes_moved", moves.bytes_moved)
        observer.gauge("swaps", moves.swaps)
        observer.gauge("placeholders_touched", num_placeholders)
        self.rt.gauge_copies()

    def tables(self) -> dict[str, torch.Tensor]:
        """Every table of the batch and of the inputs, by name, as kernels queued now would read it."""
        return self.input_batch.tables() | self.inputs.tables()

    def host_tables(self) -> dict[str, np.ndarray[Any, Any]]:
        """The host's truth, by name: what the next step publishes, and what never leaves the host."""
        return self.input_batch.host_tables() | self.inputs.host_tables()

    def staged(self) -> dict[str, list[Any]]:
        """Nothing: V1 has no staged diffs, it copies whole arrays."""
        return {}

    def reset(self) -> None:
        """Forget every request and the outputs in flight; buffers stay where they are."""
        self.requests.clear()
        self.input_batch.reset()
        self.barrier.reset()
        self.outputs.reset()
        self.sampler.reset()
        self.extras.prompts.reset()
        self._forwarded = self.batch = self.logits = self._unrepaired = None


def _refuse(config: EngineConfig) -> None:
    """Raise ``ValueError`` for what this runner cannot do, with the reason."""
    if config.spec.num_speculative_tokens:
        raise ValueError(
            "the V1 runner has no rejection sampler yet, so it cannot verify drafts; set num_speculative_tokens to 0"
        )
    if config.runner.protected is not None and not config.scheduler.async_scheduling:
        raise ValueError(
            "protected says what V1's barrier protects, and V1 makes the barrier for asynchronous scheduling only; "
            "set async_scheduling=True or leave protected out"
        )
