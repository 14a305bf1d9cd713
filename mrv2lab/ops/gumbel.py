"""Sampling by Gumbel-max: token = argmax(logit / T + g), g the counter-based noise of :mod:`mrv2lab.ops.noise`.

The law is softmax(logits / T), and nothing is normalised or sorted. A row's noise depends on its seed, the position of
the *input* token that produced its logits, and the token id, so a draw survives any change of batch, row or rank.

The kernel computes the noise of few tokens. A warp walks a slice of a row, and of each 512 tokens it takes the largest
upper bound of a score (``_noise_bound``). Only where that beats the best score so far does it compute scores: of that
one token, and of all 512 if the second largest bound reaches its score. What it returns is exact: a token that is
skipped cannot win. Long slices skip best: of N times 512 tokens it looks closer at about 1 + log(N).
Counterpart in vLLM: ``v1/worker/gpu/sample/gumbel.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.ops._noise_bound import RELATIVE, SLOPE, TOP, falling_bits
from mrv2lab.ops._op import cdiv, jit, op
from mrv2lab.ops.argmax import reduce_blocks
from mrv2lab.ops.noise import gumbel, noise_spec, row_keys, token_bits, token_rounds, uniforms

tl: Any = None

CHUNK = 512
"""Tokens whose bounds are compared at once: 16 a thread of one warp."""
FEW = 32
"""Tokens whose scores are computed at once."""
REGISTERS = 64
"""A thread's: then an H200 holds 32 programs a multiprocessor, all that it can."""


def num_slices(rows: int, vocab: int) -> int:
    """Columns of ``local_max`` that keep a large GPU busy with ``rows`` rows: about 4,096 programs of one warp, of
    1,024 tokens at least."""
    return max(1, min(cdiv(4096, max(rows, 1)), cdiv(vocab, 1024)))


def slice_size(vocab: int, slices: int) -> int:
    """Tokens a slice; a multiple of 16 where that is little, so that reads are aligned."""
    size = cdiv(vocab, slices)
    return size if size < 64 else cdiv(size, 16) * 16


def store_slice_maxima(local_max: Any, local_arg: Any, row: int, scores: Any) -> None:
    """float32 scores [V] without NaN -> row of local_max, local_arg [n, B]."""
    slices = local_max.shape[1]
    size = slice_size(len(scores), slices)
    padded = np.full((slices, size), -np.inf, np.float32)
    padded.reshape(-1)[: len(scores)] = scores
    local_max.numpy()[row] = padded.max(axis=1)
    local_arg.numpy()[row] = padded.argmax(axis=1) + np.arange(slices) * size


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
    """Write local_max float32[n, B] and local_arg int32[n, B]: each slice's best score and its lowest token id; slices
    are ``slice_size(V, B)`` tokens long.

    logits [n, V] float32, bfloat16 or float16, any row stride, columns adjacent; expanded_idx_mapping int32[n] -> row
    of temperature float32[R] and seeds int64[R]; positions int64[t] of the batch's tokens, logits_indices int64[n] ->
    the token that produced each logits row. Temperature 0: no noise, greedy. ``apply_temperature`` False: the logits
    were divided before. NaN logits count as -inf; padding rows (index < 0) read no logits and write -inf and 0. A slice
    without a finite logit names its first token.
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
        store_slice_maxima(local_max, local_arg, row, x)


@jit
def _scores(x, token, k0, k1, noisy, t, value, last, CUT: tl.constexpr):
    """What the spec calls x, of logits of any float type: launch with ``enable_fp_fusion=False``."""
    x = x.to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    if noisy & (t != 1.0):
        x = tl.div_rn(x, t)  # correctly rounded: scores must equal the spec's
    kept = x
    if CUT:
        kept = tl.where((x > value) | ((x == value) & (token <= last)), x, float("-inf"))
    if noisy:
        u, v = uniforms(token_bits(k0, k1, token))
        kept = kept + gumbel(u, v)
    return kept


@jit
def walk(
    best, arg, base, first, vocab, k0, k1, noisy, t, slope, top, up, down, least, value, last,
    CHUNK: tl.constexpr, FEW: tl.constexpr, WHOLE: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """The best score and its token, after the CHUNK tokens from ``first`` on, of which some may lie behind ``vocab``
    unless they are WHOLE. With a CUT only tokens before (value, last) count, whose logits are ``least`` or more."""
    token = first + tl.arange(0, CHUNK)
    if WHOLE:
        x = tl.load(base + token)
    else:
        x = tl.load(base + token, mask=token < vocab, other=float("-inf"))
    # NaN stays NaN in the bounds, and neither maxima nor comparisons take it.
    bound = tl.fma(falling_bits(token_rounds(k0, k1, token)), -slope, x.to(tl.float32))
    if CUT:
        bound = tl.where(x.to(tl.float32) >= least, bound, float("-inf"))
    largest = tl.max(bound, axis=0)
    # An equal score would come from a higher id.
    if tl.where(largest > 0.0, largest * up, largest * down) + top > best:
        at = tl.min(tl.where(bound == largest, token, vocab), axis=0)
        score = _scores(tl.load(base + at), at, k0, k1, noisy, t, value, last, CUT)
        second = tl.max(tl.where(token == at, float("-inf"), bound), axis=0)
        second = tl.where(second > 0.0, second * up, second * down) + top
        if (second > best) & (second >= score):
            # All of them, a few at a time: 16 a thread at once would take the registers of two warps.
            score = tl.full([], float("-inf"), tl.float32)
            for part in range(first, tl.minimum(first + CHUNK, vocab), FEW):
                few = part + tl.arange(0, FEW)
                x_of_few = tl.load(base + few, mask=few < vocab, other=float("-inf"))
                every = _scores(x_of_few, few, k0, k1, noisy, t, value, last, CUT)
                most, place = tl.max(every, axis=0, return_indices=True, return_indices_tie_break_left=True)
                at = tl.where(most > score, part + place, at)
                score = tl.maximum(most, score)
        arg = tl.where(score > best, at, arg)
        best = tl.maximum(score, best)
    return best, arg


@jit
def bounding(noisy, t, SLOPE: tl.constexpr, TOP: tl.constexpr, RELATIVE: tl.constexpr):
    """The bound of a score is (logit - slope bits) / T + top, a little further up; without noise the logit itself."""
    slope = tl.where(noisy, t * SLOPE, 0.0)
    top = tl.where(noisy, TOP, 0.0)
    up = tl.where(noisy, (1.0 + RELATIVE) / t, 1.0)
    down = tl.where(noisy, (1.0 - RELATIVE) / t, 1.0)
    return slope, top, up, down


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
    slices,
    size,
    APPLY_TEMPERATURE: tl.constexpr,
    CHUNK: tl.constexpr,
    FEW: tl.constexpr,
    SLOPE: tl.constexpr,
    TOP: tl.constexpr,
    RELATIVE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = row * slices + tl.program_id(1)
    index = tl.load(expanded_idx_mapping + row)
    if index < 0:
        tl.store(local_max + place, float("-inf"))
        tl.store(local_arg + place, 0)
        return
    t = tl.load(temperature + index)
    noisy = t != 0.0
    if not APPLY_TEMPERATURE:
        t = tl.full([], 1.0, tl.float32)
    k0, k1 = row_keys(tl.load(seeds + index), tl.load(positions + tl.load(logits_indices + row)))
    slope, top, up, down = bounding(noisy, t, SLOPE, TOP, RELATIVE)
    base = logits + row * stride
    start = tl.program_id(1) * size
    end = tl.minimum(start + size, vocab)
    whole = start + (end - start) // CHUNK * CHUNK
    best = tl.full([], float("-inf"), tl.float32)
    arg = start
    for first in range(start, whole, CHUNK):
        best, arg = walk(
            best, arg, base, first, end, k0, k1, noisy, t, slope, top, up, down, 0.0, 0.0, 0, CHUNK, FEW, True, False
        )  # fmt: skip
    if whole < end:
        best, arg = walk(
            best, arg, base, whole, end, k0, k1, noisy, t, slope, top, up, down, 0.0, 0.0, 0, CHUNK, FEW, False, False
        )  # fmt: skip
    tl.store(local_max + place, best)
    tl.store(local_arg + place, arg)


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
    (n, slices), vocab = local_max.shape, logits.shape[1]
    if n:
        kernel[(n, slices)](
            local_max, local_arg, logits, logits.stride(0), expanded_idx_mapping, temperature, seeds, positions,
            logits_indices, vocab, slices, slice_size(vocab, slices), APPLY_TEMPERATURE=bool(apply_temperature),
            CHUNK=CHUNK, FEW=FEW, SLOPE=SLOPE, TOP=TOP, RELATIVE=RELATIVE, num_warps=1, maxnreg=REGISTERS,
            enable_fp_fusion=False,
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
