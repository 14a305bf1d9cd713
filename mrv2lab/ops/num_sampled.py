"""How many of a request's tokens count, and how many drafts were rejected, once its logits rows were sampled.

A prefill chunk that does not reach the end of the prefill samples nothing: what its row gave is dropped. The last chunk
has ``seq_len == prefill_len`` and samples. Nor does a negative row, which is nobody's. Where nobody has drafts, the
sampler takes one token of each row, and ``num_sampled_without_drafts`` need not be told so. Counterpart in vLLM:
``get_num_sampled_and_rejected`` in ``v1/worker/gpu/input_batch.py``.
"""

from __future__ import annotations

from typing import Any

from mrv2lab.ops._op import cdiv, jit, op

tl: Any = None


# idx_mapping   [r] int32, < 0 = nobody's
# seq_lens      [>= r] int32
# cu_num_logits [r + 1] int32, from 0
# prefill_len   [R] int32
# num_sampled   [r] int32: in, the sampler's accepted drafts + 1; out, 0 for an unfinished prefill
# num_rejected  [r] int32
def num_sampled_and_rejected_spec(
    idx_mapping, seq_lens, cu_num_logits, prefill_len, num_sampled, num_rejected, num_reqs
):
    for i in range(num_reqs):
        if idx_mapping[i] < 0 or seq_lens[i] < prefill_len[idx_mapping[i]]:
            num_sampled[i] = num_rejected[i] = 0
        else:
            num_rejected[i] = cu_num_logits[i + 1] - cu_num_logits[i] - num_sampled[i]


@jit(do_not_specialize=["num_reqs"])
def num_sampled_and_rejected_kernel(
    idx_mapping, seq_lens, cu_num_logits, prefill_len, num_sampled, num_rejected, num_reqs, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < num_reqs
    row = tl.load(idx_mapping + i, mask=mask, other=-1)
    known = tl.load(prefill_len + row, mask=row >= 0, other=0)
    unfinished = (row < 0) | (tl.load(seq_lens + i, mask=mask, other=0) < known)
    num_logits = tl.load(cu_num_logits + i + 1, mask=mask, other=0) - tl.load(cu_num_logits + i, mask=mask, other=0)
    sampled = tl.load(num_sampled + i, mask=mask, other=0)
    tl.store(num_sampled + i, tl.where(unfinished, 0, sampled), mask=mask)
    tl.store(num_rejected + i, tl.where(unfinished, 0, num_logits - sampled), mask=mask)


@op(
    spec=num_sampled_and_rejected_spec,
    kernel=num_sampled_and_rejected_kernel,
    writes=("num_sampled", "num_rejected"),
)
def num_sampled_and_rejected(
    kernel, idx_mapping, seq_lens, cu_num_logits, prefill_len, num_sampled, num_rejected, num_reqs
):
    """Correct ``num_sampled`` in place and fill ``num_rejected``."""
    kernel[(cdiv(num_reqs, 128),)](
        idx_mapping, seq_lens, cu_num_logits, prefill_len, num_sampled, num_rejected, num_reqs, BLOCK=128
    )


# idx_mapping   [r] int32, < 0 = nobody's
# seq_lens      [>= r] int32
# prefill_len   [R] int32
# num_sampled   [r] int32, out: 1, or 0 for an unfinished prefill
# num_rejected  [r] int32, out: 0
def num_sampled_without_drafts_spec(idx_mapping, seq_lens, prefill_len, num_sampled, num_rejected, num_reqs):
    num_sampled[:num_reqs] = 1
    one_each = range(num_reqs + 1)
    num_sampled_and_rejected_spec(idx_mapping, seq_lens, one_each, prefill_len, num_sampled, num_rejected, num_reqs)


@jit(do_not_specialize=["num_reqs"])
def num_sampled_without_drafts_kernel(
    idx_mapping, seq_lens, prefill_len, num_sampled, num_rejected, num_reqs, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < num_reqs
    row = tl.load(idx_mapping + i, mask=mask, other=-1)
    known = tl.load(prefill_len + row, mask=row >= 0, other=0)
    finished = (row >= 0) & (tl.load(seq_lens + i, mask=mask, other=0) >= known)
    tl.store(num_sampled + i, finished.to(tl.int32), mask=mask)
    tl.store(num_rejected + i, tl.zeros((BLOCK,), tl.int32), mask=mask)


@op(
    spec=num_sampled_without_drafts_spec,
    kernel=num_sampled_without_drafts_kernel,
    writes=("num_sampled", "num_rejected"),
)
def num_sampled_without_drafts(kernel, idx_mapping, seq_lens, prefill_len, num_sampled, num_rejected, num_reqs):
    """Fill ``num_sampled`` and ``num_rejected`` of a batch without drafts."""
    kernel[(cdiv(num_reqs, 128),)](idx_mapping, seq_lens, prefill_len, num_sampled, num_rejected, num_reqs, BLOCK=128)
