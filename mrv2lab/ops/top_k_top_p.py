"""Top-k and top-p in a few passes over the logits: nothing is sorted, and nothing of their size is allocated.

    logit_groups (a pass) -> cut_from_groups -> [narrow_cut, list_near, where a row has top-p alone] -> search_cut

leave a cut for each row: value float32[n] and id int32[n] (``_cut``). Either the sampling pass applies it, with
:func:`keeps`, or :func:`apply_cut` writes -inf behind it. Top-p works on the survivors of top-k, renormalised.
Counterpart in vLLM: ``sample/top_k_top_p_triton.py``.
"""

from __future__ import annotations

from typing import Any

from mrv2lab.ops._cut import BLOCK, GROUP, NARROW, NEAR, OFF, clean_spec, load_block
from mrv2lab.ops._op import cdiv, jit, op
from mrv2lab.ops.cut_from_groups import cut_from_groups
from mrv2lab.ops.list_near import list_near
from mrv2lab.ops.logit_groups import logit_groups
from mrv2lab.ops.narrow_cut import narrow_choose, narrow_sums
from mrv2lab.ops.search_cut import search_cut

tl: Any = None

ROUNDS = (NARROW, NEAR, NEAR + 1)
"""Narrowing rounds, by the status that they leave: to be narrowed further, or to be listed. Each makes the bounds 9
times closer. The third is for rows of which the second left too many tokens; others cost it empty programs."""


def find_cut(
    rt: Any,
    buffers: Any,
    logits: Any,
    logits_rows: Any,
    idx_mapping: Any,
    tokens: Any,
    count: bool,
    top_k: Any,
    top_p: Any,
    narrow: bool,
    temperature: Any = None,
) -> None:
    """All launches: ``buffers.cut_value`` and ``buffers.cut_id`` of n rows (``sample.cut_buffers.CutBuffers``, cut to n
    rows). ``narrow``: whether any row may have top-p without top-k. ``tokens``, ``count`` and ``temperature`` as in
    ``logit_groups``."""
    b = buffers
    rows = (logits, logits_rows, idx_mapping)
    logit_groups(rt, b.group_max, b.block_max, b.block_sum, b.block_count, *rows, tokens, count, temperature)
    cut_from_groups(
        rt, b.cut_value, b.cut_id, b.status, b.bounds, b.listed, b.candidates, *rows, b.group_max, b.block_max,
        b.block_sum, top_k, top_p, temperature,
    )  # fmt: skip
    for mark in ROUNDS if narrow else ():
        narrow_sums(rt, b.sums, b.status, b.bounds, logits, logits_rows, b.group_max)
        narrow_choose(rt, b.bounds, b.status, b.sums, mark)
        if mark >= NEAR:
            list_near(rt, b.near, b.near_count, b.status, b.bounds, logits, logits_rows, b.group_max, mark)
    search_cut(
        rt, b.cut_value, b.cut_id, b.status, b.bounds, b.candidates, b.near, b.near_count, *rows, b.group_max, top_k,
        top_p,
    )  # fmt: skip


@jit
def keeps(x, token, value, last):
    """Whether clean logits x (``_cut.clean``) of ``token`` stay under the cut (value, last)."""
    return (x > value) | ((x == value) & (token <= last))


def apply_cut_spec(logits: Any, logits_rows: Any, group_max: Any, cut_value: Any, cut_id: Any) -> None:
    """Write -inf to each token that its row's cut drops, NaN included; rows whose cut_id int32[n] is OFF (padding rows
    are) stay untouched. logits [N, V] and logits_rows int32[n] as in ``logit_groups``, which wrote group_max from the
    same logits."""
    for i, (row, last) in enumerate(zip(logits_rows.tolist(), cut_id.tolist(), strict=True)):
        if last != OFF:
            x, value = clean_spec(logits[row]), cut_value.numpy()[i]
            kept = x > value
            kept[: last + 1] |= x[: last + 1] == value
            logits[row].masked_fill_(~logits.new_tensor(kept).bool(), float("-inf"))


@jit
def apply_cut_kernel(
    logits,
    stride,
    logits_rows,
    group_max,
    cut_value,
    cut_id,
    vocab,
    groups,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    OFF: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    last = tl.load(cut_id + i)
    if last == OFF:
        return
    value = tl.load(cut_value + i)
    row = tl.load(logits_rows + i).to(tl.int64)
    block = tl.program_id(1)
    # Groups below the cut need not be read, which after top-k is nearly all of them.
    token, x = load_block(logits + row * stride, group_max + i * groups, block, value, 1.0, vocab, groups, GROUP, BLOCK)
    x = tl.where(keeps(x, token, value, last), x, float("-inf"))
    tl.store(logits + row * stride + token, x.to(logits.dtype.element_ty), mask=token < vocab)


@op(spec=apply_cut_spec, kernel=apply_cut_kernel, writes=("logits",), numpy=False)
def apply_cut(kernel, logits, logits_rows, group_max, cut_value, cut_id):
    (n, groups), vocab = group_max.shape, logits.shape[1]
    if n:
        kernel[(n, cdiv(vocab, BLOCK))](
            logits, logits.stride(0), logits_rows, group_max, cut_value, cut_id, vocab, groups, BLOCK=BLOCK,
            GROUP=GROUP, OFF=OFF, num_warps=4,
        )  # fmt: skip
