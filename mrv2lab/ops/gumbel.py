"""Sampling by Gumbel-max: token = argmax(logit / T + g), g the counter-based noise of :mod:`mrv2lab.ops.noise`.

The law is softmax(logits / T), and nothing is normalised or sorted. A row's noise depends on its seed, the position of
the *input* token that produced its logits, and the token id, so a draw survives any change of batch, row or rank.
Counterpart in vLLM: ``v1/worker/gpu/sample/gumbel.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.ops._op import jit, op
from mrv2lab.ops.argmax import block_size, num_warps, reduce_blocks, store_block_maxima
from mrv2lab.ops.noise import gumbel, noise_spec, row_keys, token_bits, uniforms

tl: Any = None


def gumbel_blocks_spec(
    local_max: Any,
    local_arg: Any,
    logits: Any,
    expanded_idx_mapping: Any,
    temperature: Any,
    seeds: Any,
    positions: Any,
    logits_indices: Any,
    apply_temperature: bool,
) -> None:
    """Write local_max float32[n, B] and local_arg int32[n, B]: each block's best score and its lowest token id.

    logits [n, V] float32, bfloat16 or float16, any row stride, columns adjacent; expanded_idx_mapping int32[n] -> row
    of temperature float32[R] and seeds int64[R]; positions int64[t] of the batch's tokens, logits_indices int64[n] ->
    the token that produced each logits row. Temperature 0: no noise, greedy. ``apply_temperature`` False: the logits
    were divided before. NaN logits count as -inf; padding rows (index < 0) read no logits and write -inf and 0.
    """
    for row, index in enumerate(expanded_idx_mapping.tolist()):
        if index < 0:
            local_max[row], local_arg[row] = float("-inf"), 0
            continue
        x = logits[row].float().numpy()
        x = np.where(np.isnan(x), np.float32("-inf"), x)
        t = temperature.numpy()[index]
        if t != 0:
            if apply_temperature:
                x = x / t
            position = int(positions[int(logits_indices[row])])
            x = x + noise_spec(int(seeds[index]), position, len(x))
        store_block_maxima(local_max, local_arg, row, x)


@jit
def gumbel_blocks_kernel(
    local_max,
    local_arg,
    logits,
    stride,
    expanded_idx_mapping,
    temperature,
    seeds,
    positions,
    logits_indices,
    vocab,
    blocks,
    APPLY_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    index = tl.load(expanded_idx_mapping + row)
    if index < 0:
        tl.store(local_max + row * blocks + block, float("-inf"))
        tl.store(local_arg + row * blocks + block, 0)
        return
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    t = tl.load(temperature + index)
    if t != 0.0:
        if APPLY_TEMPERATURE:  # noqa: SIM102 (one is constexpr)
            if t != 1.0:
                x = tl.div_rn(x, t)  # correctly rounded: scores must equal the spec's
        position = tl.load(positions + tl.load(logits_indices + row))
        k0, k1 = row_keys(tl.load(seeds + index), position)
        u, v = uniforms(token_bits(k0, k1, token))
        x = x + gumbel(u, v)
    best, at = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(local_max + row * blocks + block, best)
    tl.store(local_arg + row * blocks + block, block * BLOCK + at)


@op(spec=gumbel_blocks_spec, kernel=gumbel_blocks_kernel, writes=("local_max", "local_arg"), numpy=False)
def gumbel_blocks(
    kernel,
    local_max,
    local_arg,
    logits,
    expanded_idx_mapping,
    temperature,
    seeds,
    positions,
    logits_indices,
    apply_temperature,
):
    (n, blocks), vocab = local_max.shape, logits.shape[1]
    block = block_size(vocab, blocks)
    if n:
        kernel[(n, blocks)](
            local_max, local_arg, logits, logits.stride(0), expanded_idx_mapping, temperature, seeds, positions,
            logits_indices, vocab, blocks, APPLY_TEMPERATURE=bool(apply_temperature), BLOCK=block,
            num_warps=num_warps(block), enable_fp_fusion=False,
        )  # fmt: skip


def gumbel_sample(
    rt: Any,
    out: Any,
    local_max: Any,
    local_arg: Any,
    logits: Any,
    expanded_idx_mapping: Any,
    temperature: Any,
    seeds: Any,
    positions: Any,
    logits_indices: Any,
    apply_temperature: bool,
) -> None:
    """Both launches: out int64[n], one token a logits row, 0 for padding. Arguments as in ``gumbel_blocks``."""
    gumbel_blocks(
        rt, local_max, local_arg, logits, expanded_idx_mapping, temperature, seeds, positions, logits_indices,
        apply_temperature,
    )  # fmt: skip
    reduce_blocks(rt, out, local_max, local_arg)
