"""V1's dummy run: a second copy of the input preparation, kept by hand, for a batch of nobody.

It serves the memory profile, the warm-up of kernels and of each graph, the captures, and steps that only keep others
company. Whatever the preparation learns, this must learn too, and forgetting has been vLLM's trouble: real slots were
written, stale block rows were read, host buffers were filled outside the barrier (#34866, #34619, #35137). Counterpart
in vLLM: ``GPUModelRunner._dummy_run`` in ``v1/worker/gpu_model_runner.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from mrv2lab.observer import NULL_OBSERVER
from mrv2lab.protocol import NULL_BLOCK
from mrv2lab.runner_v1.graph_dispatcher import EAGER, Decision
from mrv2lab.runner_v1.prepare import HostBatch, Int32, StepBatch
from mrv2lab.runtime.base import Runtime

if TYPE_CHECKING:
    from mrv2lab.runner_v1.model_runner import ModelRunnerV1


class DummyRuns:
    """The dummy runs of one runner."""

    def __init__(self, runner: ModelRunnerV1) -> None:
        self._runner = runner
        self._null_tables: tuple[torch.Tensor, ...] = ()
        runner.rt.register("v1.dummy_inputs", _fill)

    def run(
        self,
        num_tokens: int,
        num_reqs: int | None = None,
        *,
        context: int | None = None,
        decision: Decision | None = None,
        replay: bool = True,
    ) -> None:
        """Queue the forward pass of ``num_tokens`` tokens of nobody, between two steps; nothing is sampled.

        ``num_reqs`` None = as few requests as ``max_model_len`` allows. ``context`` is the host's upper bound of their
        lengths; None = their tokens. ``decision``: what to do instead of what the dispatcher says, with ``replay``
        False eagerly, over its padded inputs. Raises ``RuntimeError`` between ``execute_model`` and ``sample_tokens``,
        and ``ValueError`` for a batch that no step can have.
        """
        runner, rt, limits = self._runner, self._runner.rt, self._runner.input_batch
        if runner.is_forwarded:
            raise RuntimeError("a dummy run must not come between execute_model and sample_tokens")
        counts = _share(num_tokens, num_reqs, len(runner.inputs.positions), limits.max_num_reqs, limits.max_model_len)
        with _unobserved(rt), torch.inference_mode(), rt.active():
            with runner.barrier:
                batch = self._prepare(counts, context)
                if decision is None:
                    decision = runner.graphs.dispatch(batch.host)
                if decision.key is not None:
                    runner.padding.pad(batch, decision.key)
                inputs = runner.inputs_builder.build(batch, decision)
            with runner.graphs.context.set(decision if replay else EAGER):
                runner.model.forward(inputs)
            rt.end_step()
            if not runner.async_scheduling:
                rt.synchronize()  # as a step's bookkeeping does there: the barrier has no event to wait for

    def capture(self, decision: Decision, replay: bool) -> None:
        """At the shape of ``decision``'s key, which is captured where it is new and ``replay`` is true."""
        key, limits = decision.key, self._runner.input_batch
        assert key is not None
        # Sizes beyond what all rows can hold serve smaller steps.
        tokens = min(key.num_tokens, limits.max_num_reqs * limits.max_model_len)
        self.run(tokens, key.num_reqs, decision=decision, replay=replay)

    def _prepare(self, counts: Int32, context: int | None) -> StepBatch:
        """The copy of ``InputPreparation.prepare``: the same buffers, filled for nobody."""
        inputs, count, total = self._runner.inputs, len(counts), int(counts.sum())
        starts = inputs.query_start_loc.np
        starts[0] = 0
        np.cumsum(counts, out=starts[1 : count + 1])
        starts[count + 1 :] = total
        inputs.num_scheduled_tokens.np[:count] = counts
        inputs.query_start_loc.copy_to_gpu(len(starts))
        inputs.num_scheduled_tokens.copy_to_gpu(count)
        tables = self._tables()
        inputs.barrier.then(self._launch, tables, count)
        upper = counts if context is None else np.maximum(counts, np.int32(min(context, inputs.batch.max_model_len)))
        host = HostBatch(
            req_ids=[f"dummy.{row}" for row in range(count)],
            num_scheduled_tokens=counts,
            query_start_loc=starts[: count + 1].copy(),
            seq_lens_upper_bound=upper,
            num_tokens=total,
            discarded=[],
        )
        return StepBatch(
            step=-1,
            host=host,
            query_start_loc=inputs.query_start_loc.gpu[: count + 1],
            logits_indices=inputs.logits_indices[:count],
            input_ids=inputs.input_ids.gpu[:total],
            positions=inputs.positions[:total],
            seq_lens=inputs.seq_lens[:count],
            block_tables=tuple(table[:count] for table in tables),
            slot_mappings=tuple(inputs.slot_mappings[g, :total] for g in range(len(tables))),
            num_holes=0,
        )

    def _tables(self) -> tuple[torch.Tensor, ...]:
        """Block tables, G x [R, B_g] int32, whose rows may be overwritten: the batch's, which every step copies anew,
        or some of our own where those lie in host memory (`uva_pool` without graphs)."""
        table = self._runner.input_batch.block_table
        if table.stays:
            return table.gpu
        if not self._null_tables:
            self._null_tables = tuple(
                self._runner.rt.zeros(tuple(one.shape), one.dtype, name=f"block_table.{g}.nobody")
                for g, one in enumerate(table.gpu)
            )
        return self._null_tables

    def _launch(self, tables: tuple[torch.Tensor, ...], count: int) -> None:
        inputs = self._runner.inputs
        written = (inputs.positions, inputs.seq_lens, inputs.slot_mappings)
        lengths = inputs.num_scheduled_tokens.gpu
        self._runner.rt.run(
            "v1.dummy_inputs", *written, tables, lengths, count, reads=(lengths,), writes=(*written, *tables)
        )


def _share(num_tokens: int, num_reqs: int | None, most: int, max_num_reqs: int, max_model_len: int) -> Int32:
    """[r] tokens of each request, as even as can be, fewer first."""
    if not 0 < num_tokens <= most:
        raise ValueError(f"a dummy run takes 1 to max_num_batched_tokens = {most} tokens, got {num_tokens}")
    if num_reqs is None:
        num_reqs = -(-num_tokens // max_model_len)
    if not 0 < num_reqs <= min(max_num_reqs, num_tokens):
        raise ValueError(
            f"a dummy run of {num_tokens} tokens needs 1 to {min(max_num_reqs, num_tokens)} requests, got {num_reqs}"
        )
    if num_tokens > num_reqs * max_model_len:
        raise ValueError(
            f"{num_tokens} tokens in {num_reqs} requests are more than max_model_len = {max_model_len} in one; spread "
            f"them over {-(-num_tokens // max_model_len)} requests"
        )
    counts = np.full(num_reqs, num_tokens // num_reqs, np.int32)
    counts[num_reqs - num_tokens % num_reqs :] += 1
    return counts


def _fill(
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mappings: torch.Tensor,
    tables: tuple[torch.Tensor, ...],
    num_scheduled_tokens: torch.Tensor,
    count: int,
) -> None:
    """Nothing is computed, so lengths are what is scheduled; nothing is written, and nobody's blocks are read."""
    positions.zero_()
    seq_lens.zero_()
    seq_lens[:count].copy_(num_scheduled_tokens[:count])
    slot_mappings.fill_(-1)
    for table in tables:
        table[:count].fill_(NULL_BLOCK)


@contextmanager
def _unobserved(rt: Runtime) -> Iterator[None]:
    """Nobody is told of what ``rt`` does inside: it is no step of the engine's."""
    observer, rt.observer = rt.observer, NULL_OBSERVER
    try:
        yield
    finally:
        rt.observer = observer
