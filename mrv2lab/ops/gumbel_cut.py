"""Gumbel-max among the tokens that a cut keeps, of logits that nobody masked: for min-p, top-k and top-p in steps whose
processed logits nobody reads.

The cut is that of ``_cut``, in logits divided by the temperature: token t stays if x[t] > value, or x[t] == value and
t <= id. The noise is that of ``gumbel``, and so are the skipping and the slices. Groups of 128 tokens whose largest
logit lies below the cut are not read; after top-k that is nearly all of them.
No counterpart in vLLM, which writes -inf into [n, V] and draws from that.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.ops._cut import GROUP, OFF, clean_spec, divisor_spec
from mrv2lab.ops._noise_bound import RELATIVE, SLOPE, TOP
from mrv2lab.ops._op import jit, op
from mrv2lab.ops.argmax import reduce_blocks
from mrv2lab.ops.gumbel import CHUNK, FEW, REGISTERS, bounding, slice_size, store_slice_maxima, walk
from mrv2lab.ops.noise import noise_spec, row_keys

tl: Any = None

LOOK = 128
"""Groups whose maxima are looked at at once."""


def gumbel_cut_blocks_spec(
    local_max: Any,
    local_arg: Any,
    logits: Any,
    expanded_idx_mapping: Any,
    temperature: Any,
    seeds: Any,
    positions: Any,
    logits_indices: Any,
    cut_value: Any,
    cut_id: Any,
    group_max: Any,
) -> None:
    """As ``gumbel_blocks``, of the tokens that the cut keeps: cut_value float32[n], cut_id int32[n] (None: all tokens
    of that value stay). The logits are divided by the temperature here; it divided those that the cut is of, too.

    group_max float32[n, ceil(V / 128)]: the groups' largest logits as they are here, of rows that have a cut_value;
    rows of -inf keep everything, and theirs is not looked at.
    """
    for row, index in enumerate(expanded_idx_mapping.tolist()):
        if index < 0:
            local_max[row], local_arg[row] = float("-inf"), 0
            continue
        x = clean_spec(logits[row], divisor_spec(temperature, index))
        value, last = cut_value.numpy()[row], OFF if cut_id is None else int(cut_id[row])
        x = np.where((x > value) | ((x == value) & (np.arange(len(x)) <= last)), x, np.float32("-inf"))
        if temperature[index] != 0:
            x = x + noise_spec(int(seeds[index]), int(positions[int(logits_indices[row])]), len(x))
        store_slice_maxima(local_max, local_arg, row, x)


@jit
def gumbel_cut_blocks_kernel(
    local_max,
    local_arg,
    logits,
    stride,
    expanded_idx_mapping,
    temperature,
    seeds,
    positions,
    logits_indices,
    cut_value,
    cut_id,
    group_max,
    vocab,
    groups,
    slices,
    size,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    FEW: tl.constexpr,
    GROUP: tl.constexpr,
    LOOK: tl.constexpr,
    OFF: tl.constexpr,
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
    value = tl.load(cut_value + row)
    last = tl.full([], OFF, tl.int32)
    if cut_id is not None:
        last = tl.load(cut_id + row)
    noisy = t != 0.0
    k0, k1 = row_keys(tl.load(seeds + index), tl.load(positions + tl.load(logits_indices + row)))
    slope, top, up, down = bounding(noisy, t, SLOPE, TOP, RELATIVE)
    # What the cut keeps is no less than this before the division, and hardly anything else is as much.
    raw = tl.where(noisy, value * t, value)
    least = tl.where(raw > 0.0, raw * (1.0 - RELATIVE), raw * (1.0 + RELATIVE)) - 1e-37
    least = tl.minimum(least, 3.4e38)
    base = logits + row * stride
    start = tl.program_id(1) * size
    end = tl.minimum(start + size, vocab)
    best = tl.full([], float("-inf"), tl.float32)
    arg = start
    first = start
    while first < end:
        group = first // GROUP + tl.arange(0, LOOK)
        largest = tl.load(group_max + row * groups + group, mask=group < groups, other=float("-inf"))
        live = tl.min(tl.where(largest >= least, group, first // GROUP + LOOK), axis=0)
        live = tl.where(value == float("-inf"), first // GROUP, live)
        found = live < first // GROUP + LOOK
        first = tl.maximum(first, live * GROUP)
        if ALIGNED:
            first = tl.multiple_of(first, 16)
        if found & (first < end):
            if first + CHUNK <= end:
                best, arg = walk(
                    best, arg, base, first, end, k0, k1, noisy, t, slope, top, up, down, least, value, last,
                    CHUNK, FEW, True, True,
                )  # fmt: skip
            else:
                best, arg = walk(
                    best, arg, base, first, end, k0, k1, noisy, t, slope, top, up, down, least, value, last,
                    CHUNK, FEW, False, True,
                )  # fmt: skip
            first += CHUNK
    tl.store(local_max + place, best)
    tl.store(local_arg + place, arg)


@op(spec=gumbel_cut_blocks_spec, kernel=gumbel_cut_blocks_kernel, writes=("local_max", "local_arg"), numpy=False)
def gumbel_cut_blocks(
    kernel,
    local_max,
    local_arg,
    logits,
    expanded_idx_mapping,
    temperature,
    seeds,
    positions,
    logits_indices,
    cut_value,
    cut_id,
    group_max,
):
    (n, slices), vocab = local_max.shape, logits.shape[1]
    size = slice_size(vocab, slices)
    if n:
        kernel[(n, slices)](
            local_max, local_arg, logits, logits.stride(0), expanded_idx_mapping, temperature, seeds, positions,
            logits_indices, cut_value, cut_id, group_max, vocab, group_max.shape[1], slices, size,
            ALIGNED=size % 16 == 0, CHUNK=CHUNK, FEW=FEW, GROUP=GROUP, LOOK=LOOK, OFF=OFF, SLOPE=SLOPE, TOP=TOP,
            RELATIVE=RELATIVE, num_warps=1, maxnreg=REGISTERS, enable_fp_fusion=False,
        )  # fmt: skip


def gumbel_cut_sample(
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
    cut: Any,
) -> None:
    """Both launches: out int64[n], one token a logits row, 0 for padding. ``cut``: (cut_value, cut_id, group_max); the
    rest as in ``gumbel_cut_blocks``."""
    gumbel_cut_blocks(
        rt, local_max, local_arg, logits, expanded_idx_mapping, temperature, seeds, positions, logits_indices, *cut
    )
    reduce_blocks(rt, out, local_max, local_arg)
