"""The MRV2 runner: a step is a table of contents. Counterpart in vLLM: ``v1/worker/gpu/model_runner.py``.

The host only queues work on one stream; it never waits in here (the ``barrier`` policy apart, which is there to be
compared). What the host must branch on are upper bounds it knows; the exact counts live on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from mrv2lab.attention import AttentionBackend
from mrv2lab.config import EngineConfig
from mrv2lab.graphs import Decision
from mrv2lab.graphs.report import CaptureReport
from mrv2lab.memory import StagedDiff
from mrv2lab.ops.num_sampled import num_sampled_and_rejected, num_sampled_without_drafts
from mrv2lab.ops.post_update import post_update
from mrv2lab.protocol import ForwardInputs, GrammarOutput, Model, ModelState, MRV2SchedulerOutput
from mrv2lab.runner.async_output import AsyncOutput, OutputRing, OutputSlot
from mrv2lab.runner.capture import capture_graphs
from mrv2lab.runner.dummy import dummy_run
from mrv2lab.runner.forward import ForwardPass
from mrv2lab.runner.prepare import prepare_batches, prepare_decodes, prepare_inputs, upload_batch
from mrv2lab.runner.sample_output import SampleOutputs, StepPlan
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.transfer import POLICIES
from mrv2lab.sample import Sampler, SamplingState
from mrv2lab.sample.grammar import GrammarMask
from mrv2lab.sample.stage import SampleContext
from mrv2lab.state import BlockTables, HostBatch, InputBatch, InputBuffers, RequestState, gather_host_batch


class ModelRunner:
    """Drives one decoder from MRV2's scheduler messages."""

    def __init__(
        self,
        config: EngineConfig,
        rt: Runtime,
        model: Model,
        attention: AttentionBackend,
        model_state: ModelState | None = None,
    ) -> None:
        scheduler, spec = config.scheduler, config.spec
        if spec.num_speculative_tokens:
            raise ValueError("the MRV2 runner has no rejection sampler yet; set num_speculative_tokens to 0")
        self.rt = rt
        self.model = model
        self.model_state = model_state or ModelState()
        depth = max(config.runner.pool_depth, 1)
        self.transfers = POLICIES[config.runner.transfer](rt, depth)
        reqs, tokens = scheduler.max_num_reqs, scheduler.max_num_batched_tokens
        self.req_states = RequestState(rt, self.transfers, max_num_reqs=reqs, max_model_len=scheduler.max_model_len)
        self.block_tables = BlockTables(
            rt,
            self.transfers,
            block_sizes=(config.cache.block_size,) * len(config.model.kv_groups),
            max_num_reqs=reqs,
            max_model_len=scheduler.max_model_len,
            max_num_batched_tokens=tokens,
        )
        self._fused_prepare = fused = config.runner.fused_prepare
        self.buffers = InputBuffers(rt, self.transfers, max_num_reqs=reqs, max_num_batched_tokens=tokens, fused=fused)
        self.forward_pass = ForwardPass(config, rt, attention, self.buffers, self.block_tables)
        self.graphs = self.forward_pass.graphs
        vocab, logits_rows, in_flight = (
            config.model.vocab_size,
            min(reqs, tokens),
            max(scheduler.max_concurrent_steps, 1),
        )
        self.sampling = SamplingState(self.transfers, max_num_reqs=reqs, vocab_size=vocab)
        self.sampler = Sampler(
            rt,
            self.transfers,
            self.req_states,
            self.sampling,
            max_num_logits=logits_rows,
            vocab_size=vocab,
            keep_processed=config.runner.logprobs_mode.startswith("processed"),
        )
        self.grammar_mask = GrammarMask(rt, self.transfers, max_num_logits=logits_rows, vocab_size=vocab)
        self.extras = SampleOutputs(
            rt,
            self.transfers,
            config.runner,
            max_num_reqs=reqs,
            max_num_logits=logits_rows,
            max_num_batched_tokens=tokens,
            vocab_size=vocab,
            depth=in_flight,
            take_errors=self.sampler.custom.take_errors,
        )
        self.outputs = OutputRing(rt, max_num_reqs=reqs, num_speculative_tokens=0, depth=in_flight)
        # [R] int32
        self.num_rejected = rt.zeros(reqs, torch.int32, name="num_rejected")
        self._none_rejected = 0
        """First rows of it that are known to be 0."""
        rt.register("num_sampled.one", _fill_one)
        self._forwarded: tuple[InputBatch, StepPlan, Decision] | None = None
        """The batch between ``execute_model`` and ``sample_tokens``, what it must bring back, and its graph."""
        self.batch: InputBatch | None = None
        """The batch of the latest step that had one, what the decoder got of it (padded as its graph was), and its
        logits [n, V], for observers."""
        self.forward_inputs: ForwardInputs | None = None
        self.logits: torch.Tensor | None = None
        self.force: Callable[[list[str], torch.Tensor], None] | None = None
        """Called after sampling with the batch's ids and the device tensor sampled int64[r, K + 1], which it may write
        by queued work before anybody reads it."""

    # -- execute_model -------------------------------------------------------------------------------------------------

    def execute_model(self, output: MRV2SchedulerOutput, fabricated: HostBatch | None = None) -> bool:
        """Queue everything up to the hidden states; False if the step has no tokens (then nothing is to be sampled).

        ``fabricated``: a batch of nobody's requests in place of the message's; see :mod:`mrv2lab.runner.dummy`.
        """
        if self._forwarded is not None:
            raise RuntimeError("execute_model was called again before sample_tokens")
        span = self.rt.observer.span
        with self.transfers.prepare():
            with span("update_states"):
                self._finish_requests(output)
                self._add_requests(output)
                self._update_requests(output)
            with span("apply_writes"):
                self.req_states.apply_staged_writes()
                self.model_state.apply_staged_writes()
                self.sampler.apply_staged_writes()
                self.block_tables.apply_staged_writes()
            if not output.total_num_scheduled_tokens:
                self.rt.gauge_copies()
                return False
            with span("prepare_inputs"):
                host, plan = self._gather_batch(output) if fabricated is None else (fabricated, StepPlan(None, None))
                fused = self._fused_prepare and host.num_logits == len(host.req_ids)
                # A dummy run's rows must not take the slot of a step in flight, which nobody need have waited for.
                fused = fused and (fabricated is None or host.is_plain_decode)
                if fused:
                    batch = upload_batch(self.buffers, host, output.step, fused=True)
                else:
                    batch = prepare_inputs(self.rt, self.req_states, self.buffers, host, output.step)
                self.batch = batch
        decision = self.forward_pass.dispatch(host)
        with span("gather"):
            padded = decision.padded_reqs or batch.num_reqs
            if fused:
                launch = prepare_decodes if host.is_plain_decode else prepare_batches
                tables, slots = launch(self.rt, self.req_states, self.buffers, self.block_tables, batch, padded)
            else:
                tables = self.block_tables.gather(batch.idx_mapping, batch.num_reqs, padded)
                slots = self.block_tables.compute_slot_mappings(
                    batch.idx_mapping, batch.query_start_loc, self.buffers.positions, batch.num_reqs
                )
        with span("prepare_attn"):
            inputs = self.forward_pass.inputs(batch, decision, tables, slots)
            self.forward_inputs = inputs = self.model_state.prepare_inputs(batch, inputs)
        with span("forward"):
            self.forward_pass.run(self.model, decision, inputs)
        self._forwarded = batch, plan, decision
        return True

    def _finish_requests(self, output: MRV2SchedulerOutput) -> None:
        for req_id in output.removed_req_ids:
            row = self.req_states.req_id_to_index.get(req_id)
            if row is not None:
                self.model_state.remove_request(row)
                self.extras.remove_request(row, req_id, req_id in output.finished_req_ids)
                self.req_states.remove_request(req_id)

    def _add_requests(self, output: MRV2SchedulerOutput) -> None:
        for request in output.new_reqs:
            row = self.req_states.add_request(request)
            self.block_tables.append_block_ids(row, request.block_ids, overwrite=True)
            self.sampler.add_request(row, request)
            self.extras.add_request(row, request)
            self.model_state.add_request(row, request)

    def _update_requests(self, output: MRV2SchedulerOutput) -> None:
        """The diffs of continued requests."""
        state, cached = self.req_states, output.cached_reqs
        if cached.req_ids:
            state.num_computed_tokens_np[state.rows(cached.req_ids)] = cached.num_computed_tokens
            if cached.new_block_ids:
                rows = state.rows_of(cached.new_block_ids)
                self.block_tables.extend_block_ids(rows, cached.new_block_ids.values())
        np.minimum(state.num_computed_tokens_np, state.prefill_len.np, out=state.num_computed_prefill_tokens)

    def _gather_batch(self, output: MRV2SchedulerOutput) -> tuple[HostBatch, StepPlan]:
        """The step's batch in its order, and what it must bring back."""
        host = gather_host_batch(self.req_states, output)
        plan = self.extras.plan(host, self.req_states)
        # The host's mirror stays an upper bound between steps too, when the device has advanced the exact count.
        self.req_states.num_computed_tokens_np[host.rows] = host.seq_lens_upper_bound
        return host, plan

    def forget_forward(self) -> None:
        """Nobody samples what ``execute_model`` has queued."""
        self._forwarded = None

    def dummy_run(self, num_tokens: int, num_reqs: int | None = None, *, context: int | None = None) -> None:
        """See :func:`mrv2lab.runner.dummy.dummy_run`."""
        dummy_run(self, num_tokens, num_reqs, context=context)

    def warm_up_and_capture(self, *, progress: bool = True) -> CaptureReport:
        """See :func:`mrv2lab.runner.capture.capture_graphs`, which warms each shape up."""
        return capture_graphs(self, progress=progress)

    # -- sample_tokens -------------------------------------------------------------------------------------------------

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> AsyncOutput:
        """Queue logits, sampling, the copy of what comes of it and the state update; returns the output on its way.

        ``grammar``: what the batch's structured requests may sample.
        """
        if self._forwarded is None:
            raise RuntimeError("sample_tokens needs an execute_model with tokens before it")
        (batch, plan, decision), self._forwarded = self._forwarded, None
        self.graphs.stats.note(batch.step, batch.host.num_tokens, batch.num_reqs, decision)
        span = self.rt.observer.span
        n, count = batch.host.num_logits, batch.num_reqs
        slot = self.outputs.take()
        sampled, num_sampled = slot.first[0](count), slot.first[1](count)
        flat = slot.flat(n)
        plain = self._fused_prepare and batch.host.is_plain_decode
        with span("logits"):
            extras = self.extras.begin(plan, batch, self.model)
            order = {"in_order": True} if plain else {}  # to be asked of models that can do with less
            self.logits = logits = self.model.compute_logits(batch.logits_indices, n, **order)
        with span("sample"):
            if grammar is not None:
                self.grammar_mask.apply(logits, grammar, batch.host)
            self.extras.count(extras, logits, batch)
            context = SampleContext(batch, self.req_states, self.buffers.local_pos(batch.host))
            processed = self.sampler.sample(flat, logits, context)
            num_ones = self._count_sampled(batch, slot)
            if self.force is not None:
                self.force(batch.host.req_ids, sampled)
            self.extras.finish(extras, plan, logits, processed, flat)
            # In front of the output, which somebody waits for: it reads UVA slots, and what nobody waits for may run
            # when the host has given them other contents.
            self.sampler.penalties.count_sampled(batch, sampled, num_sampled)
        with span("copy_output"):
            output = self.outputs.send(slot, batch.step, batch.host.req_ids, extras, num_ones)
        with span("postprocess"):
            post_update(
                self.rt,
                batch.idx_mapping,
                batch.query_start_loc,
                sampled,
                num_sampled,
                self.num_rejected,
                self.req_states.all_token_ids.gpu,
                self.req_states.last_sampled_tokens,
                self.req_states.total_len.gpu,
                self.req_states.num_computed_tokens.gpu,
                count,
            )
            self.model_state.postprocess(batch)
        self.rt.gauge_copies()
        self.rt.end_step()
        return output

    def _count_sampled(self, batch: InputBatch, slot: OutputSlot) -> int:
        """Queue num_sampled [r] and num_rejected [r], unless they hold what they will; returns how many of num_sampled
        the host knows to be 1 behind it.

        Whoever has no drafts rejects none, and samples one token unless a part of its prefill stays for later.
        """
        count, host = batch.num_reqs, batch.host
        fused = self._fused_prepare and host.num_logits == count
        known = count if fused and host.all_sample else 0
        if known and known <= min(slot.num_ones, self._none_rejected):
            return known
        slot.num_ones = self._none_rejected = 0
        num_sampled = slot.first[1](count)
        if not fused:
            self.rt.run("num_sampled.one", num_sampled, writes=(num_sampled,))
            num_sampled_and_rejected(
                self.rt,
                batch.idx_mapping,
                batch.seq_lens,
                batch.cu_num_logits,
                self.req_states.prefill_len.gpu,
                num_sampled,
                self.num_rejected,
                count,
            )
            return 0
        num_sampled_without_drafts(
            self.rt,
            batch.idx_mapping,
            batch.seq_lens,
            self.req_states.prefill_len.gpu,
            num_sampled,
            self.num_rejected,
            count,
        )
        self._none_rejected = count
        return known

    # -- for observers -------------------------------------------------------------------------------------------------

    def tables(self) -> dict[str, torch.Tensor]:
        """Every integer table of the state and of the inputs, by name, as kernels queued now would read it."""
        parts = (self.req_states, self.block_tables, self.sampling, self.buffers)
        return {name: table for part in parts for name, table in part.tables().items()} | {
            "num_rejected": self.num_rejected
        }

    def host_tables(self) -> dict[str, np.ndarray[Any, Any]]:
        """The tables whose truth is the host's, as the next ``apply_writes`` will publish them."""
        parts = (self.req_states, self.block_tables, self.sampling)
        return {name: table for part in parts for name, table in part.host_tables().items()}

    def staged(self) -> dict[str, list[StagedDiff]]:
        """The diffs that the next ``apply_writes`` will apply, by table."""
        return self.req_states.staged() | self.block_tables.staged()

    def reset(self) -> None:
        """Forget every request and the outputs in flight; buffers stay where they are."""
        for row in list(self.req_states.index_to_req_id):
            self.model_state.remove_request(row)
        self.req_states.reset()
        self.sampler.reset()
        self.extras.reset()
        self.block_tables.reset()
        self.outputs.reset()
        self._none_rejected = 0
        self._forwarded = self.batch = self.forward_inputs = self.logits = None


def _fill_one(num_sampled: torch.Tensor) -> None:
    num_sampled.fill_(1)
