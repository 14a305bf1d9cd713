"""Scatter staged diffs into several int32 tables in one launch: ``apply_write`` with a group id per diff.

The tables come twice. As a tuple of tensors they say what is written, which the NumPy spec, the runtime and a recorder
need (None for a table that no diff of the launch is for); as ``table_ptrs``, made once because addresses never change,
they let one program pick its table at run time.

A diff ends with its row. None is longer, unless the host writes the next step's diffs while a kernel reads these (the
``unsafe`` policy): whatever mixture of the two it sees, it stays within the tables.
Counterpart in vLLM: ``FusedStagedWriter`` in ``v1/worker/gpu/buffer_utils.py``.
"""

from __future__ import annotations

from typing import Any

from mrv2lab.ops._op import cdiv, jit, op
from mrv2lab.ops.apply_write import BLOCK

tl: Any = None


# tables        G x [R, B_g] int32 or None; a table of one value a row is passed as its view [R, 1]
# table_ptrs    [G] uint64, addresses of the tables
# table_strides [G] int64, B_g
# group_ids     [w] int32
# rows          [w] int32
# starts        [w] int32
# cu_lens       [w + 1] int32, from 0
# contents      [cu_lens[w]] int32
def fused_apply_write_spec(
    tables, table_ptrs, table_strides, group_ids, rows, starts, cu_lens, contents, num_writes, max_len
):
    for w in range(num_writes):
        table, end = tables[group_ids[w]], table_strides[group_ids[w]]
        values = contents[cu_lens[w] : cu_lens[w + 1]][: max(end - starts[w], 0)]
        if table is not None:
            table[rows[w], starts[w] : starts[w] + len(values)] = values


@jit
def fused_apply_write_kernel(
    table_ptrs, table_strides, group_ids, rows, starts, cu_lens, contents, BLOCK: tl.constexpr
):
    w = tl.program_id(0)
    g = tl.load(group_ids + w)
    table = tl.load(table_ptrs + g).to(tl.pointer_type(tl.int32))
    begin = tl.load(cu_lens + w)
    length = tl.load(cu_lens + w + 1) - begin
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(starts + w) + offset
    stride = tl.load(table_strides + g)  # int64: a table may have more cells than int32 counts
    mask = (offset < length) & (column < stride)
    cells = tl.load(rows + w) * stride + column
    tl.store(table + cells, tl.load(contents + begin + offset, mask=mask), mask=mask)


@op(spec=fused_apply_write_spec, kernel=fused_apply_write_kernel, writes=("tables",))
def fused_apply_write(
    kernel, tables, table_ptrs, table_strides, group_ids, rows, starts, cu_lens, contents, num_writes, max_len
):
    """Apply ``num_writes`` staged diffs, the longest of ``max_len`` values, to the tables of their groups."""
    grid = (num_writes, cdiv(max_len, BLOCK))
    kernel[grid](table_ptrs, table_strides, group_ids, rows, starts, cu_lens, contents, BLOCK=BLOCK)
