"""From the host's batch to the device's: uploads and the input kernels, in stream order, without a wait."""

from __future__ import annotations

import numpy as np

from mrv2lab.ops.combine_tokens import combine_tokens
from mrv2lab.ops.expand_idx_mapping import expand_idx_mapping
from mrv2lab.ops.pos_seq_lens import pos_seq_lens
from mrv2lab.ops.prefill_inputs import prefill_inputs
from mrv2lab.runtime.base import Runtime
from mrv2lab.state.input_batch import HostBatch, InputBatch, InputBuffers
from mrv2lab.state.request_state import RequestState


def prepare_inputs(rt: Runtime, state: RequestState, buffers: InputBuffers, host: HostBatch, step: int) -> InputBatch:
    """Fill ``buffers`` for this step from the rows of ``state``. Counterpart in vLLM: ``prepare_inputs``."""
    count = len(host.req_ids)
    idx_mapping = buffers.idx_mapping.send(host.rows)
    query_start_loc = buffers.query_start_loc.send(host.query_start_loc)
    if host.has_prefill:
        prefill_inputs(
            rt,
            idx_mapping,
            query_start_loc,
            state.all_token_ids.gpu,
            state.prefill_len.gpu,
            state.num_computed_tokens.gpu,
            buffers.input_ids,
            state.next_prefill_tokens,
            count,
        )
    pos_seq_lens(
        rt,
        idx_mapping,
        query_start_loc,
        state.num_computed_tokens.gpu,
        buffers.positions,
        buffers.seq_lens,
        count,
    )
    if host.num_logits == count:
        cu_num_logits = buffers.arange[: count + 1]
        expanded = idx_mapping
    else:
        cumulated = np.zeros(count + 1, np.int32)
        np.cumsum(host.num_draft_tokens + 1, out=cumulated[1:])
        cu_num_logits = buffers.cu_num_logits.send(cumulated)
        expanded = buffers.expanded_idx_mapping[: host.num_logits]
        expand_idx_mapping(rt, idx_mapping, cu_num_logits, expanded, buffers.expanded_local_pos, count)
    combine_tokens(
        rt,
        idx_mapping,
        query_start_loc,
        cu_num_logits,
        buffers.seq_lens,
        state.prefill_len.gpu,
        state.last_sampled_tokens,
        state.draft_tokens.gpu,
        buffers.input_ids,
        buffers.logits_indices,
        count,
    )
    return InputBatch(
        step=step,
        host=host,
        idx_mapping=idx_mapping,
        query_start_loc=query_start_loc,
        cu_num_logits=cu_num_logits,
        expanded_idx_mapping=expanded,
        logits_indices=buffers.logits_indices[: host.num_logits],
        input_ids=buffers.input_ids[: host.num_tokens],
        positions=buffers.positions[: host.num_tokens],
        seq_lens=buffers.seq_lens[:count],
    )
