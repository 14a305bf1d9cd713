"""Copy the block tables of this step's requests from their permanent rows into the fixed tables that attention reads.

One table a KV-cache group, all groups in one launch. Rows of the batch get exactly their ``num_blocks`` ids (what
follows in a live row is stale and never read), or null blocks where their row is negative; rows from ``num_reqs`` up to
``num_rows`` get the null block 0. ``num_rows`` is the larger of the padded batch and the previous step's batch, so that
no row of a larger batch stays behind. Tables come as tensors and as pointers for the reason given in
``fused_apply_write``. Counterpart in vLLM: ``_gather_block_tables_kernel`` behind ``BlockTables.gather_block_tables``
in ``v1/worker/gpu/block_table.py``.
"""

from __future__ import annotations

from typing import Any

from mrv2lab.ops._op import jit, op

tl: Any = None


# idx_mapping   [r] int32, < 0 = nobody's
# num_blocks    [G, R] int32
# tables        G x [R, B_g] int32
# table_ptrs    [G] uint64
# input_tables  G x [R, B_g] int32
# input_ptrs    [G] uint64
# table_strides [G] int64, B_g
def gather_block_tables_spec(
    idx_mapping, num_blocks, tables, table_ptrs, input_tables, input_ptrs, table_strides, num_reqs, num_rows
):
    for counts, table, input_table in zip(num_blocks, tables, input_tables, strict=True):
        for i in range(num_reqs):
            row = idx_mapping[i]
            if row < 0:
                input_table[i] = 0
            else:
                input_table[i, : counts[row]] = table[row, : counts[row]]
        input_table[num_reqs:num_rows] = 0


@jit(do_not_specialize=["num_reqs"])
def gather_block_tables_kernel(
    idx_mapping, num_blocks, count_stride, table_ptrs, input_ptrs, table_strides, num_reqs, BLOCK: tl.constexpr
):
    i = tl.program_id(0)
    g = tl.program_id(1)
    stride = tl.load(table_strides + g)
    target = tl.load(input_ptrs + g).to(tl.pointer_type(tl.int32)) + i * stride
    row = tl.load(idx_mapping + i, mask=i < num_reqs, other=-1)
    if row < 0:
        for first in range(0, stride, BLOCK):
            offset = first + tl.arange(0, BLOCK)
            tl.store(target + offset, tl.zeros((BLOCK,), tl.int32), mask=offset < stride)
        return
    source = tl.load(table_ptrs + g).to(tl.pointer_type(tl.int32)) + row * stride
    count = tl.load(num_blocks + g * count_stride + row)
    for first in range(0, count, BLOCK):
        offset = first + tl.arange(0, BLOCK)
        mask = offset < count
        tl.store(target + offset, tl.load(source + offset, mask=mask), mask=mask)


@op(spec=gather_block_tables_spec, kernel=gather_block_tables_kernel, writes=("input_tables",))
def gather_block_tables(
    kernel, idx_mapping, num_blocks, tables, table_ptrs, input_tables, input_ptrs, table_strides, num_reqs, num_rows
):
    """Rows 0..num_reqs-1 of ``input_tables`` from the batch's state rows, rows num_reqs..num_rows-1 zeroed."""
    kernel[(num_rows, len(tables))](
        idx_mapping, num_blocks, num_blocks.stride(0), table_ptrs, input_ptrs, table_strides, num_reqs, BLOCK=1024
    )
