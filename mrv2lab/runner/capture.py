"""Capture on its own path: dummy inputs of each padded shape, then the decoder's forward alone under the graph.

Counterpart in vLLM: ``capture_model`` and ``prepare_inputs_to_capture`` in ``v1/worker/gpu/cudagraph_utils.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mrv2lab.graphs import BatchDescriptor, Decision
from mrv2lab.graphs.report import CaptureReport
from mrv2lab.protocol import ForwardInputs
from mrv2lab.runner.dummy import fabricate, unobserved
from mrv2lab.runner.prepare import prepare_inputs

if TYPE_CHECKING:
    from mrv2lab.runner.model_runner import ModelRunner


def capture_graphs(runner: ModelRunner, *, progress: bool = True) -> CaptureReport:
    """Capture every shape of the runner's table, between steps; what ran out of memory stays eager, and says so."""

    def prepare(descriptor: BatchDescriptor) -> Callable[[], object]:
        inputs = dummy_inputs(runner, descriptor)
        return lambda: runner.model.forward(inputs)

    with unobserved(runner.rt):
        return runner.graphs.capture(prepare, progress=progress)


def dummy_inputs(runner: ModelRunner, descriptor: BatchDescriptor) -> ForwardInputs:
    """Queue the preparation of nobody's batch of a graph's shape; returns what the graph will read."""
    states = runner.req_states
    # Sizes beyond what all rows can hold serve smaller steps.
    tokens = min(descriptor.num_tokens, states.max_num_reqs * states.max_model_len)
    reqs = descriptor.num_reqs or -(-tokens // states.max_model_len)
    host = fabricate(tokens, reqs, max_num_reqs=states.max_num_reqs, max_model_len=states.max_model_len)
    with runner.transfers.prepare():
        batch = prepare_inputs(runner.rt, states, runner.buffers, host, -1)
    tables = runner.block_tables.gather(batch.idx_mapping, reqs, reqs)
    slots = runner.block_tables.compute_slot_mappings(
        batch.idx_mapping, batch.query_start_loc, runner.buffers.positions, reqs
    )
    inputs = runner.forward_pass.inputs(batch, Decision(descriptor, "capture"), tables, slots)
    return runner.model_state.prepare_inputs(batch, inputs)
