"""Scatter staged diffs into several int32 tables in one launch: ``apply_write`` with a group id per diff.

The tables come twice. As a tuple of tensors they say what is written, which the NumPy spec, the runtime and a recorder
need; as ``table_ptrs``, made once because addresses never change, they let one program pick its table at run time.
Counterpart in vLLM: ``FusedStagedWriter`` in ``v1/worker/gpu/buffer_utils.py``.
"""

from __future__ import annotations

from typing import Any

from mrv2lab.ops._op import cdiv, jit, op

tl: Any = None


# tables        G x [R, B_g] int32
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
        values = contents[cu_lens[w] : cu_lens[w + 1]]
        tables[group_ids[w]][rows[w], starts[w] : starts[w] + len(values)] = values


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
    mask = offset < length
    cells = tl.load(rows + w) * tl.load(table_strides + g) + tl.load(starts + w) + offset
    tl.store(table + cells, tl.load(contents + begin + offset, mask=mask), mask=mask)


@op(spec=fused_apply_write_spec, kernel=fused_apply_write_kernel, writes=("tables",))
def fused_apply_write(
    kernel, tables, table_ptrs, table_strides, group_ids, rows, starts, cu_lens, contents, num_writes, max_len
):
    """Apply ``num_writes`` staged diffs, the longest of ``max_len`` values, to the tables of their groups."""
    grid = (num_writes, cdiv(max_len, 1024))
    kernel[grid](table_ptrs, table_strides, group_ids, rows, starts, cu_lens, contents, BLOCK=1024)
