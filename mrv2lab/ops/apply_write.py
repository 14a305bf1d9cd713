"""Scatter the diffs that the host staged since the last step into one table on the device, in one launch.

A diff is (row, start, values). The values of all diffs lie end to end in ``contents``; ``cu_lens`` says where each one
begins. One program per diff and block of 1,024 values, so two diffs of one launch that overlap land in no defined
order: the runner stages one write per row, table and step. Counterpart in vLLM: ``_apply_write_kernel`` behind
``StagedWriteTensor.apply_write`` in ``v1/worker/gpu/buffer_utils.py`` (there ``cu_lens`` has no leading 0).
"""

from __future__ import annotations

from typing import Any

from mrv2lab.ops._op import cdiv, jit, op

tl: Any = None

BLOCK = 1024
"""Values of a program, at most."""


# table    [R, B] int32, int64 or float32; a table of one value a row is passed as its view [R, 1]
# rows     [w] int32
# starts   [w] int32
# cu_lens  [w + 1] int32, from 0
# contents [cu_lens[w]], dtype of the table
def apply_write_spec(table, rows, starts, cu_lens, contents, num_writes, max_len):
    for w in range(num_writes):
        values = contents[cu_lens[w] : cu_lens[w + 1]]
        table[rows[w], starts[w] : starts[w] + len(values)] = values


@jit
def apply_write_kernel(table, table_stride, rows, starts, cu_lens, contents, BLOCK: tl.constexpr):
    w = tl.program_id(0)
    begin = tl.load(cu_lens + w)
    length = tl.load(cu_lens + w + 1) - begin
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < length
    cells = tl.load(rows + w).to(tl.int64) * table_stride + tl.load(starts + w) + offset
    tl.store(table + cells, tl.load(contents + begin + offset, mask=mask), mask=mask)


@op(spec=apply_write_spec, kernel=apply_write_kernel, writes=("table",))
def apply_write(kernel, table, rows, starts, cu_lens, contents, num_writes, max_len):
    """Apply ``num_writes`` staged diffs, the longest of ``max_len`` values, to ``table``."""
    grid = (num_writes, cdiv(max_len, BLOCK))
    kernel[grid](table, table.stride(0), rows, starts, cu_lens, contents, BLOCK=BLOCK)
