"""Counter-based Gumbel noise: a function of seed, position and token id alone, so of no batch, row or rank.

**Bits**, hash version 1. Per row, hoisted, two keys from seed lo, seed hi and position lo32 (32-bit words, wrapping)::

    mix(x):  x ^= x >> 17; x *= 0xed5ad4bb; x ^= x >> 11; x *= 0xac4c1b51; x ^= x >> 15; x *= 0x31848bab; x ^= x >> 14
    k0 = mix(mix(mix(lo + 0x9e3779b9) + hi) + pos)          k1 = mix(mix(mix(pos ^ 0x85ebca6b) + hi) + lo)

``mix`` is triple32, the three-round bijection of C. Wellons' hash-prospector (public domain; the author's exhaustive
bias is 0.021, where 32 fair bits measured the same way have 0.020). ``k0`` is one-to-one in each of its three words
while the other two stay: no two positions of a seed, and no two seeds at a position, share it. Per token, 13 integer
operations: mix(token + k0) with k1 added after the second xor. It is one-to-one in the token.

Evidence (2,048 rows, seeds 0..31 x positions 0..63, 8,192 tokens each; z is in standard deviations): 256-bin chi-square
of each row, top byte z mean 0.04, sd 0.99, worst 4.4, low byte 0.05, 0.99, 4.0; of each token across rows -0.02, 1.01,
4.8; joint 64 x 64 bins of adjacent tokens z 1.8, of adjacent positions -1.1; correlation of adjacent positions sd 0.97,
worst 3.5, adjacent seeds 1.02, 3.3, all 523,776 pairs of 1,024 rows 1.0006, 4.8 (fair: 5.3); flipping any bit of
token, seed or position moves each output bit with probability 0.5 to within 0.0152 (4.5 sd: 0.0159); 549 equal values
among 2.1e6 (expected 512); 0 equal key pairs in 10^6 (seed, position). One round fewer (lowbias32 keyed alike, 10
operations) fails the joint test of adjacent tokens at z 16.

**Uniform** u = (r + 1/2) 2^-32, assembled from the exact 16-bit halves of r with one float32 rounding; v = 1 - u, the
same from the complement of r, so both tails are as dense as float32 allows (a 24-bit uniform is biased, #51367).

**Noise** g = -log(-log1p(-u)), from 22.87 at r = 0, the winning tail, to -3.13 at r = 2^32 - 1. Both logarithms are
plain float32 multiplications and additions in one order, launched without fusing them, so that spec, interpreter and
GPU agree bit for bit: log1p(f) = f + f^2 P(f), f in [-1/3, 1/3], P of degree 7. Error against float64, on 8.4e6 r
spread over the whole range, 4e6 log-spaced ones and the 2^20 at either end: at most 3.4 ulp where |g| >= 0.5 (1.1 in
the winning tail, g >= 8.3), at most 2.0e-7 where |g| < 0.5. Along the spread r, g never rises.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.ops._op import cdiv, jit, op

tl: Any = None

HASH_VERSION = 1
"""Recordings carry it. Any change of a bit of :func:`token_bits_spec` is a new version."""


# -- the definition ---------------------------------------------------------------------------------------------------
def _mix_spec(x: Any) -> Any:
    """triple32 on uint32 arrays."""
    x = x ^ (x >> 17)
    x = x * np.uint32(0xED5AD4BB)
    x = x ^ (x >> 11)
    x = x * np.uint32(0xAC4C1B51)
    x = x ^ (x >> 15)
    x = x * np.uint32(0x31848BAB)
    return x ^ (x >> 14)


def row_keys_spec(seed: Any, position: Any) -> tuple[Any, Any]:
    """int64[n] seeds and positions -> two uint32[n]."""
    seed = np.atleast_1d(np.asarray(seed, np.int64))
    lo, hi = seed.astype(np.uint32), (seed >> 32).astype(np.uint32)
    pos = np.atleast_1d(np.asarray(position, np.int64)).astype(np.uint32)
    k0 = _mix_spec(_mix_spec(_mix_spec(lo + np.uint32(0x9E3779B9)) + hi) + pos)
    k1 = _mix_spec(_mix_spec(_mix_spec(pos ^ np.uint32(0x85EBCA6B)) + hi) + lo)
    return k0, k1


def token_bits_spec(k0: Any, k1: Any, token: Any) -> Any:
    """uint32 keys and uint32 token ids, broadcast -> uint32 bits."""
    x = token + k0
    x ^= x >> 17
    x *= np.uint32(0xED5AD4BB)
    x ^= x >> 11
    x += k1
    x *= np.uint32(0xAC4C1B51)
    x ^= x >> 15
    x *= np.uint32(0x31848BAB)
    x ^= x >> 14
    return x


def uniforms_spec(bits: Any) -> tuple[Any, Any]:
    """uint32 r -> float32 u = (r + 1/2) 2^-32 and v = 1 - u; float64 holds both exactly, so each is rounded once."""
    u = (bits.astype(np.float64) + 0.5) * 2.0**-32
    return u.astype(np.float32), (1.0 - u).astype(np.float32)


def _minus_log_spec(exponent: Any, f: Any) -> Any:
    """-log(2^(exponent >> 23) * (1 + f)), f in [-1/3, 1/3], in the order of the kernel's :func:`_minus_log`."""
    p = np.float32(0.13820920884609222) * f
    for c in (-0.15122200548648834, 0.140421524643898, -0.1647232323884964, 0.2000793069601059, -0.2500423789024353,
              0.3333326578140259, -0.5):  # fmt: skip
        p += np.float32(c)
        p *= f
    p *= f
    p += f
    return exponent.astype(np.float32) * np.float32(-8.262958294867817e-08) - p  # log(2) 2^-23


def _split_spec(x: Any) -> tuple[Any, Any]:
    """float32 x > 0 -> (exponent << 23, f) with x = 2^exponent (1 + f) and 1 + f in [2/3, 4/3)."""
    bits = x.view(np.int32)
    exponent = (bits - np.int32(0x3F2AAAAB)) & np.int32(-8388608)
    return exponent, (bits - exponent).view(np.float32) - np.float32(1.0)


def gumbel_spec(u: Any, v: Any) -> Any:
    """float32 g = -log(-log(1 - u)). Where 1 - u >= 2/3 the inner logarithm starts from u, so nothing cancels."""
    exponent, f = _split_spec(v)
    exponent, f = _split_spec(_minus_log_spec(exponent, np.where(exponent == 0, -u, f)))
    return _minus_log_spec(exponent, f)


def noise_spec(seed: int, position: int, vocab: int) -> Any:
    """float32[V]: one row's noise."""
    k0, k1 = row_keys_spec(seed, position)
    return gumbel_spec(*uniforms_spec(token_bits_spec(k0, k1, np.arange(vocab, dtype=np.uint32))))


# -- the same for kernels ---------------------------------------------------------------------------------------------
@jit
def _mix(x):
    x = x ^ (x >> 17)
    x = x * 0xED5AD4BB
    x = x ^ (x >> 11)
    x = x * 0xAC4C1B51
    x = x ^ (x >> 15)
    x = x * 0x31848BAB
    return x ^ (x >> 14)


@jit
def row_keys(seed, position):
    """int64 scalars -> two uint32 scalars."""
    lo = seed.to(tl.uint32)
    hi = (seed >> 32).to(tl.uint32)
    pos = position.to(tl.uint32)
    k0 = _mix(_mix(_mix(lo + 0x9E3779B9) + hi) + pos)
    k1 = _mix(_mix(_mix(pos ^ 0x85EBCA6B) + hi) + lo)
    return k0, k1


@jit
def token_bits(k0, k1, token):
    """uint32 keys, token ids[BLOCK] of any integer type -> uint32[BLOCK]."""
    x = token_rounds(k0, k1, token)
    return x ^ (x >> 14)


@jit
def token_rounds(k0, k1, token):
    """All of :func:`token_bits` but its last xor, which moves a number by less than 2^-14 of itself."""
    x = token.to(tl.uint32) + k0
    x = x ^ (x >> 17)
    x = x * 0xED5AD4BB
    x = x ^ (x >> 11)
    x = x * 0xAC4C1B51 + k1 * 0xAC4C1B51  # (x + k1) * 0xAC4C1B51: one multiply-add, the product of keys hoisted
    x = x ^ (x >> 15)
    return x * 0x31848BAB


@jit
def uniforms(bits):
    """uint32 -> float32 u and 1 - u. The halves of r enter as mantissas of 2^7 and 2^-10, which spares conversions;
    only the last operation of each rounds."""
    high = ((bits >> 16) | 0x43000000).to(tl.float32, bitcast=True) - 128.0009765625
    low = (((bits << 1) & 0x1FFFF) | 0x3A800001).to(tl.float32, bitcast=True)
    return high + low, (1.0 - high) - low


@jit
def _minus_log(exponent, f):
    p = 0.13820920884609222 * f
    p = (p + -0.15122200548648834) * f
    p = (p + 0.140421524643898) * f
    p = (p + -0.1647232323884964) * f
    p = (p + 0.2000793069601059) * f
    p = (p + -0.2500423789024353) * f
    p = (p + 0.3333326578140259) * f
    p = (p + -0.5) * f
    p = p * f
    p = p + f
    return exponent.to(tl.float32) * -8.262958294867817e-08 - p


@jit
def gumbel(u, v):
    """float32 u and v = 1 - u -> float32 g. The kernel must be launched with ``enable_fp_fusion=False``."""
    bits = v.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F2AAAAB) & -8388608
    f = (bits - exponent).to(tl.float32, bitcast=True) - 1.0
    inner = _minus_log(exponent, tl.where(exponent == 0, -u, f))
    bits = inner.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F2AAAAB) & -8388608
    return _minus_log(exponent, (bits - exponent).to(tl.float32, bitcast=True) - 1.0)


# -- an op that shows them --------------------------------------------------------------------------------------------
def noise_probe_spec(bits: Any, uniform: Any, noise: Any, seeds: Any, positions: Any) -> None:
    """Write bits int32[n, V] (holding uint32), uniform float32[n, V] and noise float32[n, V] of rows (seeds int64[n],
    positions int64[n]). For tests and lessons; sampling never stores noise."""
    for row in range(seeds.shape[0]):
        k0, k1 = row_keys_spec(int(seeds[row]), int(positions[row]))
        r = token_bits_spec(k0, k1, np.arange(bits.shape[1], dtype=np.uint32))
        u, v = uniforms_spec(r)
        bits.numpy()[row] = r.view(np.int32)
        uniform.numpy()[row] = u
        noise.numpy()[row] = gumbel_spec(u, v)


@jit
def noise_probe_kernel(bits, uniform, noise, seeds, positions, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k0, k1 = row_keys(tl.load(seeds + row), tl.load(positions + row))
    r = token_bits(k0, k1, token)
    u, v = uniforms(r)
    at = row.to(tl.int64) * vocab + token
    tl.store(bits + at, r.to(tl.int32, bitcast=True), mask=token < vocab)
    tl.store(uniform + at, u, mask=token < vocab)
    tl.store(noise + at, gumbel(u, v), mask=token < vocab)


@op(spec=noise_probe_spec, kernel=noise_probe_kernel, writes=("bits", "uniform", "noise"), numpy=False)
def noise_probe(kernel, bits, uniform, noise, seeds, positions):
    n, vocab = bits.shape
    grid = (n, cdiv(vocab, 1024))
    kernel[grid](bits, uniform, noise, seeds, positions, vocab, BLOCK=1024, enable_fp_fusion=False)
