"""V1's positions and sequence lengths: one entry a token, gathered from counters in batch order.

Where MRV2 maps a request to its row and walks its tokens (``pos_seq_lens``), V1 has the host say for each token whose
it is (``req_indices``) and which of its request's in this step (``query_pos``). The results are the same. Counterpart
in vLLM: the tensor expressions behind ``num_computed_tokens`` in ``GPUModelRunner._prepare_inputs``
(``v1/worker/gpu_model_runner.py``).
"""

from __future__ import annotations

from typing import Any

from mrv2lab.ops._op import cdiv, jit, op

tl: Any = None


# req_indices          [T] int64, batch index of each token
# query_pos            [T] int64, the token's place among its request's tokens of this step
# num_computed_tokens  [R] int32
# num_scheduled_tokens [R] int32
# positions            [T] int64
# seq_lens             [R] int32, zero behind the batch
def flat_pos_seq_lens_spec(
    req_indices, query_pos, num_computed_tokens, num_scheduled_tokens, positions, seq_lens, num_tokens, num_reqs
):
    positions[:num_tokens] = num_computed_tokens[req_indices[:num_tokens]] + query_pos[:num_tokens]
    seq_lens[:num_reqs] = num_computed_tokens[:num_reqs] + num_scheduled_tokens[:num_reqs]
    seq_lens[num_reqs:] = 0


@jit(do_not_specialize=["num_tokens", "num_reqs"])
def flat_pos_seq_lens_kernel(
    req_indices,
    query_pos,
    num_computed_tokens,
    num_scheduled_tokens,
    positions,
    seq_lens,
    num_tokens,
    num_reqs,
    max_num_reqs,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = i < num_tokens
    done = tl.load(num_computed_tokens + tl.load(req_indices + i, mask=token, other=0), mask=token, other=0)
    tl.store(positions + i, done + tl.load(query_pos + i, mask=token, other=0), mask=token)
    live = i < num_reqs
    computed = tl.load(num_computed_tokens + i, mask=live, other=0)
    scheduled = tl.load(num_scheduled_tokens + i, mask=live, other=0)
    tl.store(seq_lens + i, computed + scheduled, mask=i < max_num_reqs)


@op(spec=flat_pos_seq_lens_spec, kernel=flat_pos_seq_lens_kernel, writes=("positions", "seq_lens"))
def flat_pos_seq_lens(
    kernel, req_indices, query_pos, num_computed_tokens, num_scheduled_tokens, positions, seq_lens, num_tokens, num_reqs
):
    """Fill ``positions`` for this step's tokens and all of ``seq_lens``."""
    max_num_reqs = seq_lens.shape[0]
    kernel[(cdiv(max(num_tokens, max_num_reqs), 256),)](
        req_indices,
        query_pos,
        num_computed_tokens,
        num_scheduled_tokens,
        positions,
        seq_lens,
        num_tokens,
        num_reqs,
        max_num_reqs,
        BLOCK=256,
    )
