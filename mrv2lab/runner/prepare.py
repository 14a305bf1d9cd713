"""From the host's batch to the device's: uploads and the input kernels, in stream order, without a wait."""

from __future__ import annotations

import numpy as np
import torch

from mrv2lab.ops.combine_tokens import combine_tokens
from mrv2lab.ops.expand_idx_mapping import expand_idx_mapping
from mrv2lab.ops.pos_seq_lens import pos_seq_lens
from mrv2lab.ops.prefill_inputs import prefill_inputs
from mrv2lab.ops.prepare_batch import prepare_batch
from mrv2lab.ops.prepare_decode import prepare_decode
from mrv2lab.runtime.base import Runtime
from mrv2lab.state.block_tables import BlockTables
from mrv2lab.state.input_batch import HostBatch, InputBatch, InputBuffers
from mrv2lab.state.request_state import RequestState


def upload_batch(buffers: InputBuffers, host: HostBatch, step: int, *, fused: bool = False) -> InputBatch:
    """Send who is in the step's batch and where their tokens begin; the views of ``buffers`` that the step reads have
    yet to be filled. ``fused``: :func:`prepare_decodes` or :func:`prepare_batches` follows, which of them is for the
    batch to say (see :meth:`InputBuffers.send`)."""
    count, num_tokens, num_logits = len(host.req_ids), host.num_tokens, host.num_logits
    idx_mapping, query_start_loc = buffers.send(host, fused=fused)
    if num_logits == count:
        cu_num_logits, expanded = buffers.first_arange(count + 1), idx_mapping
    else:
        cumulated = np.zeros(count + 1, np.int32)
        np.cumsum(host.num_draft_tokens + 1, out=cumulated[1:])
        cu_num_logits = buffers.cu_num_logits.send(cumulated)
        expanded = buffers.expanded_idx_mapping[:num_logits]
    return InputBatch(
        step=step,
        host=host,
        idx_mapping=idx_mapping,
        query_start_loc=query_start_loc,
        cu_num_logits=cu_num_logits,
        expanded_idx_mapping=expanded,
        logits_indices=buffers.first_logits_indices(num_logits),
        input_ids=buffers.first_input_ids(num_tokens),
        positions=buffers.first_positions(num_tokens),
        seq_lens=buffers.first_seq_lens(count),
    )


def prepare_inputs(rt: Runtime, state: RequestState, buffers: InputBuffers, host: HostBatch, step: int) -> InputBatch:
    """Fill ``buffers`` for this step from the rows of ``state``. Counterpart in vLLM: ``prepare_inputs``."""
    batch = upload_batch(buffers, host, step)
    launch_inputs(rt, state, buffers, batch)
    return batch


def launch_inputs(rt: Runtime, state: RequestState, buffers: InputBuffers, batch: InputBatch) -> None:
    """The launches of :func:`prepare_inputs`, behind :func:`upload_batch`."""
    host, count = batch.host, batch.num_reqs
    idx_mapping, query_start_loc = batch.idx_mapping, batch.query_start_loc
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
    if host.num_logits != count:
        expand_idx_mapping(
            rt, idx_mapping, batch.cu_num_logits, batch.expanded_idx_mapping, buffers.expanded_local_pos, count
        )
    combine_tokens(
        rt,
        idx_mapping,
        query_start_loc,
        batch.cu_num_logits,
        buffers.seq_lens,
        state.prefill_len.gpu,
        state.last_sampled_tokens,
        state.draft_tokens.gpu,
        buffers.input_ids,
        buffers.logits_indices,
        count,
    )


def prepare_decodes(
    rt: Runtime,
    state: RequestState,
    buffers: InputBuffers,
    block_tables: BlockTables,
    batch: InputBatch,
    num_reqs_padded: int,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Fill ``buffers`` and the tables of attention for plain decodes (``host.is_plain_decode``) in one launch, behind
    :func:`upload_batch`; returns what ``BlockTables.gather`` and ``compute_slot_mappings`` do, whose launches, with
    those of :func:`prepare_inputs`, it replaces."""
    count = batch.num_reqs
    num_rows = block_tables.rows_to_fill(count, num_reqs_padded)
    prepare_decode(
        rt,
        batch.idx_mapping,
        state.num_computed_tokens.gpu,
        state.last_sampled_tokens,
        *block_tables.pointed_tables,
        block_tables.block_sizes_gpu,
        buffers.query_start_loc.device,
        buffers.input_ids,
        buffers.positions,
        buffers.seq_lens,
        buffers.logits_indices,
        block_tables.slot_mappings,
        count,
        num_rows,
    )
    return block_tables.first_rows(num_reqs_padded), block_tables.slot_mappings


def prepare_batches(
    rt: Runtime,
    state: RequestState,
    buffers: InputBuffers,
    block_tables: BlockTables,
    batch: InputBatch,
    num_reqs_padded: int,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """As :func:`prepare_decodes`, for any other batch in which nobody has drafts."""
    assert buffers.packed is not None, "upload_batch comes first"
    count = batch.num_reqs
    prepare_batch(
        rt,
        *buffers.packed,
        state.num_computed_tokens.gpu,
        state.prefill_len.gpu,
        state.last_sampled_tokens,
        state.all_token_ids.gpu,
        *block_tables.pointed_tables,
        block_tables.block_sizes_gpu,
        buffers.idx_mapping.device,
        buffers.query_start_loc.device,
        buffers.input_ids,
        state.next_prefill_tokens,
        buffers.positions,
        buffers.seq_lens,
        buffers.logits_indices,
        block_tables.slot_mappings,
        count,
        batch.host.num_tokens,
        block_tables.rows_to_fill(count, num_reqs_padded),
    )
    return block_tables.first_rows(num_reqs_padded), block_tables.slot_mappings
