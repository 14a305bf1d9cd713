"""Allowed ids, bias and min_tokens, in this order, in one launch: one program edits a whole logits row, in place.

The steps of one row depend on each other through memory that different threads write, so a barrier stands wherever a
step reads or overwrites what the previous one wrote. Two of them are easy to forget: the allowed logits are saved
before the row is filled with -inf, and restored only after it is (vLLM #46245 lost them).
Counterpart in vLLM: ``_bias_kernel`` in ``v1/worker/gpu/sample/logit_bias.py``.
"""

from __future__ import annotations

from typing import Any

from mrv2lab.ops._op import jit, next_power_of_2, op

tl: Any = None

ALLOWED, BIASED, STOPS, MIN_LEN, KEEP_STOPS = range(5)
"""Columns of ``edits`` int32[R, 5]: how many allowed ids (0 = all are), biased ids and stop ids a row has; prompt_len +
min_tokens (0 = no minimum); and whether (1) its stop tokens stay where nothing else would."""


def logit_bias_spec(
    logits: Any,
    expanded_idx_mapping: Any,
    positions: Any,
    logits_indices: Any,
    edits: Any,
    allowed_ids: Any,
    bias_ids: Any,
    bias_values: Any,
    stop_ids: Any,
) -> None:
    """logits float32[n, V], any row stride, columns adjacent. Only allowed ids keep their logits; biases are added;
    stop ids become -inf while position + 1 < min_len, except where nothing would be left of a row that keeps its stops.

    expanded_idx_mapping int32[n] -> row of edits int32[R, 5], allowed_ids int32[R, A], bias_ids int32[R, A],
    bias_values float32[R, A] and stop_ids int32[R, S], < 0 = padding; ids of one row are distinct and those >= V are
    nobody. logits_indices int64[n] -> positions int64[t] of the token that produced each row. NaN counts as -inf.
    """
    for row, index in enumerate(expanded_idx_mapping.tolist()):
        if index < 0:
            continue
        x, vocab = logits[row], logits.shape[1]
        allowed, biased, stops, min_len, keep_stops = edits[index].tolist()
        if allowed:
            ids = _known(allowed_ids[index, :allowed], vocab)
            saved = x[ids]
            x.fill_(float("-inf"))
            x[ids] = saved
        ids = bias_ids[index, :biased]
        known = ids < vocab
        x[ids[known].long()] += bias_values[index, :biased][known]
        if int(positions[int(logits_indices[row])]) + 1 < min_len:
            ids = _known(stop_ids[index, :stops], vocab)
            saved = x[ids]
            x[ids] = float("-inf")
            if keep_stops and not bool((x > float("-inf")).any()):
                x[ids] = saved


def _known(ids: Any, vocab: int) -> Any:
    return ids[ids < vocab].long()


@jit
def logit_bias_kernel(
    logits,
    stride,
    expanded_idx_mapping,
    positions,
    logits_indices,
    edits,
    allowed_ids,
    bias_ids,
    bias_values,
    id_stride,
    stop_ids,
    stop_stride,
    vocab,
    IDS: tl.constexpr,
    STOP_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(expanded_idx_mapping + row).to(tl.int64)
    if index < 0:
        return
    logits += row * stride
    edits += index * 5
    i = tl.arange(0, IDS)

    count = tl.load(edits)
    if count > 0:
        token = tl.load(allowed_ids + index * id_stride + i, mask=i < count, other=0)
        mask = (i < count) & (token < vocab)
        saved = tl.load(logits + token, mask=mask, other=0.0)
        tl.debug_barrier()  # all are saved before any is filled
        for first in range(0, vocab, BLOCK):
            at = first + tl.arange(0, BLOCK)
            tl.store(logits + at, tl.full((BLOCK,), float("-inf"), tl.float32), mask=at < vocab)
        tl.debug_barrier()  # all is filled before any is restored
        tl.store(logits + token, saved, mask=mask)
        tl.debug_barrier()

    count = tl.load(edits + 1)
    if count > 0:
        token = tl.load(bias_ids + index * id_stride + i, mask=i < count, other=0)
        mask = (i < count) & (token < vocab)
        value = tl.load(bias_values + index * id_stride + i, mask=mask, other=0.0)
        tl.store(logits + token, tl.load(logits + token, mask=mask, other=0.0) + value, mask=mask)
        tl.debug_barrier()

    if tl.load(positions + tl.load(logits_indices + row)) + 1 < tl.load(edits + 3):
        count = tl.load(edits + 2)
        j = tl.arange(0, STOP_IDS)
        token = tl.load(stop_ids + index * stop_stride + j, mask=j < count, other=0)
        mask = (j < count) & (token < vocab)
        saved = tl.load(logits + token, mask=mask, other=0.0)
        tl.debug_barrier()
        tl.store(logits + token, tl.full((STOP_IDS,), float("-inf"), tl.float32), mask=mask)
        if tl.load(edits + 4) != 0:
            tl.debug_barrier()
            best = tl.full((BLOCK,), float("-inf"), tl.float32)
            for first in range(0, vocab, BLOCK):
                at = first + tl.arange(0, BLOCK)
                x = tl.load(logits + at, mask=at < vocab, other=float("-inf"))
                best = tl.maximum(best, tl.where(x == x, x, float("-inf")))
            if tl.max(best, axis=0) == float("-inf"):
                tl.store(logits + token, saved, mask=mask)


@op(spec=logit_bias_spec, kernel=logit_bias_kernel, writes=("logits",), numpy=False)
def logit_bias(
    kernel, logits, expanded_idx_mapping, positions, logits_indices, edits, allowed_ids, bias_ids, bias_values, stop_ids
):
    n, vocab = logits.shape
    if n:
        kernel[(n,)](
            logits, logits.stride(0), expanded_idx_mapping, positions, logits_indices, edits, allowed_ids, bias_ids,
            bias_values, bias_ids.stride(0), stop_ids, stop_ids.stride(0), vocab,
            IDS=next_power_of_2(bias_ids.shape[1]), STOP_IDS=next_power_of_2(stop_ids.shape[1]), BLOCK=4096,
            num_warps=8,
        )  # fmt: skip
