"""The pages of a batch as one list, request behind request (CSR), from its padded block table.

A backend that plans on the host knows how many pages each request has, and from which one on its window reaches, but
their ids are on the device: so the host sends the row pointers and the device lays the ids out, without a wait.
Counterpart in vLLM: ``_copy_page_indices_kernel`` in ``v1/attention/backends/flashinfer.py``.
"""

from __future__ import annotations

from typing import Any

from mrv2lab.ops._op import jit, op

tl: Any = None


# indices      [N] int32, N >= indptr[r]
# block_table  [r, B] int32
# indptr       [r + 1] int32: request j's pages go to indices[indptr[j]:indptr[j + 1]]
# first_page   [r] int32: the column of its first one
def page_indices_spec(indices, block_table, indptr, first_page, num_reqs):
    for j in range(num_reqs):
        count = indptr[j + 1] - indptr[j]
        indices[indptr[j] : indptr[j + 1]] = block_table[j, first_page[j] : first_page[j] + count]


@jit
def page_indices_kernel(indices, block_table, table_stride, indptr, first_page, BLOCK: tl.constexpr):
    j = tl.program_id(0)
    start = tl.load(indptr + j)
    count = tl.load(indptr + j + 1) - start
    source = block_table + j.to(tl.int64) * table_stride + tl.load(first_page + j)
    for first in range(0, count, BLOCK):
        offset = first + tl.arange(0, BLOCK)
        mask = offset < count
        tl.store(indices + start + offset, tl.load(source + offset, mask=mask), mask=mask)


@op(spec=page_indices_spec, kernel=page_indices_kernel, writes=("indices",))
def page_indices(kernel, indices, block_table, indptr, first_page, num_reqs):
    """``indices[indptr[j] + i] = block_table[j, first_page[j] + i]`` for every page i of every request j."""
    if num_reqs:
        kernel[(num_reqs,)](indices, block_table, block_table.stride(0), indptr, first_page, BLOCK=256)
