"""Where each token of this step goes in the paged KV cache: ``slot = block * block_size + position % block_size``.

One mapping a KV-cache group. A request with a negative row gets -1, which no kernel writes, and so does everything
behind the step's last actual token, up to T: a stale slot there would let a padded graph overwrite somebody's KV (vLLM
#36580). Tables come as tensors and as pointers for the reason given in ``fused_apply_write``. Counterpart in vLLM:
``_compute_slot_mappings_kernel`` behind ``BlockTables.compute_slot_mappings`` in ``v1/worker/gpu/block_table.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.ops._op import jit, op

tl: Any = None


# idx_mapping     [r] int32, -1 = no writes
# query_start_loc [>= r + 1] int32
# positions       [T] int64
# tables          G x [R, B_g] int32
# table_ptrs      [G] uint64
# table_strides   [G] int64, B_g
# block_sizes     [G] int32
# slot_mappings   [G, T] int64
def slot_mapping_spec(
    idx_mapping, query_start_loc, positions, tables, table_ptrs, table_strides, block_sizes, slot_mappings, num_reqs
):
    for table, block_size, slots in zip(tables, block_sizes, slot_mappings, strict=True):
        slots[:] = -1
        for i in range(num_reqs):
            if idx_mapping[i] >= 0:
                query = slice(query_start_loc[i], query_start_loc[i + 1])
                block, offset = positions[query] // block_size, positions[query] % block_size
                slots[query] = table[idx_mapping[i], block].astype(np.int64) * block_size + offset


@jit
def slot_mapping_kernel(
    idx_mapping,
    query_start_loc,
    positions,
    table_ptrs,
    table_strides,
    block_sizes,
    slot_mappings,
    slot_stride,
    max_num_tokens,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0)
    g = tl.program_id(1)
    num_reqs = tl.num_programs(0) - 1
    slots = slot_mappings + g.to(tl.int64) * slot_stride
    start = tl.load(query_start_loc + i)
    if i == num_reqs:
        for first in range(start, max_num_tokens, BLOCK):
            tail = first + tl.arange(0, BLOCK)
            tl.store(slots + tail, tl.full((BLOCK,), -1, tl.int64), mask=tail < max_num_tokens)
        return
    end = tl.load(query_start_loc + i + 1)
    row = tl.load(idx_mapping + i)
    block_size = tl.load(block_sizes + g)
    table = tl.load(table_ptrs + g).to(tl.pointer_type(tl.int32)) + row * tl.load(table_strides + g)
    for first in range(start, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        mask = token < end
        position = tl.load(positions + token, mask=mask, other=0)
        live = tl.where(mask, row, -1) >= 0
        block = tl.load(table + position // block_size, mask=live, other=0)
        slot = block.to(tl.int64) * block_size + position % block_size
        tl.store(slots + token, tl.where(live, slot, -1), mask=mask)


@op(spec=slot_mapping_spec, kernel=slot_mapping_kernel, writes=("slot_mappings",))
def slot_mapping(
    kernel,
    idx_mapping,
    query_start_loc,
    positions,
    tables,
    table_ptrs,
    table_strides,
    block_sizes,
    slot_mappings,
    num_reqs,
):
    """Fill all of ``slot_mappings``: a slot for every token of the step, -1 elsewhere."""
    kernel[(num_reqs + 1, len(tables))](
        idx_mapping,
        query_start_loc,
        positions,
        table_ptrs,
        table_strides,
        block_sizes,
        slot_mappings,
        slot_mappings.stride(0),
        slot_mappings.shape[1],
        BLOCK=1024,
    )
