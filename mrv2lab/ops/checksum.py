"""A checksum of an integer table's valid cells, so that a rebuilt state can be compared without reading it back.

One 64-bit sum a row of ``mix(value, cell)`` over the cells that are valid, ``cell`` being the flat index; their total
modulo 2^64 is the table's checksum, whatever the order of the rows. ``mix`` multiplies and folds as splitmix64's last
rounds do, so that a moved or a changed value moves half of the bits. Stale tails are left out through ``lengths``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.ops._op import jit, op

tl: Any = None

_CELL = 0x9E3779B97F4A7C15
_FOLD = 0xBF58476D1CE4E5B9
_BLOCK = 1024


# table   [rows, cols] int32 or int64
# lengths [rows] int32: valid cells of each row, more than cols counts as cols
# out     [rows] int64
def checksum_spec(table, lengths, out):
    cols = table.shape[1]
    columns = np.arange(cols, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for row in range(len(table)):
            n = min(int(lengths[row]), cols)
            cells = np.uint64(row * cols) + columns[:n] + np.uint64(1)
            x = table[row, :n].astype(np.int64).view(np.uint64) ^ (cells * np.uint64(_CELL))
            x = (x ^ (x >> np.uint64(30))) * np.uint64(_FOLD)
            out[row] = (x ^ (x >> np.uint64(31))).sum(dtype=np.uint64).view(np.int64)


@jit
def checksum_kernel(table, stride, cols, lengths, out, CELL: tl.constexpr, FOLD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.minimum(tl.load(lengths + row), cols)
    total = tl.zeros([BLOCK], tl.uint64)
    for start in range(0, n, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < n
        value = tl.load(table + row * stride + column, mask=mask, other=0).to(tl.int64).to(tl.uint64, bitcast=True)
        cell = (row * cols + column + 1).to(tl.uint64, bitcast=True)
        x = value ^ (cell * CELL)
        x = (x ^ (x >> 30)) * FOLD
        total += tl.where(mask, x ^ (x >> 31), 0)
    tl.store(out + row, tl.sum(total, 0).to(tl.int64, bitcast=True))


@op(spec=checksum_spec, kernel=checksum_kernel, writes=("out",))
def checksum(kernel, table, lengths, out):
    """Write each row's checksum of ``table`` to ``out``."""
    kernel[(table.shape[0],)](
        table, table.stride(0), table.shape[1], lengths, out, CELL=_CELL, FOLD=_FOLD, BLOCK=_BLOCK
    )
