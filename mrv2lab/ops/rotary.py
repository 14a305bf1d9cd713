"""Rotary position embedding in place on q and k, with Qwen3's per-head q/k norm fused before it when it has one.

Source: Su et al., "RoFormer" (2021), in Hugging Face's rotate_half convention: element i of a head is paired with
element i + D/2. The table is float32 and the rotation is computed in float32 and rounded once.
"""

from __future__ import annotations

from mrv2lab.ops._op import jit, next_power_of_2, op

tl = None


def rotary_spec(q, k, positions, cos, sin, q_weight, k_weight, eps):
    """Rotate every head of q [t, Hq*D] and k [t, Hk*D] by its position: (a, b) -> (a cos - b sin, b cos + a sin).

    positions: int64[t]; cos, sin: float32[L, D/2]; q_weight, k_weight: [D], RMS norm of each head first, or None.
    """
    import torch

    from mrv2lab.ops.rms_norm import rms_norm_spec

    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    for x, weight in ((q, q_weight), (k, k_weight)):
        heads = x.unflatten(-1, (-1, 2 * cos.shape[1]))
        if weight is not None:
            normed = torch.empty(heads.shape, dtype=x.dtype, device=x.device)
            rms_norm_spec(normed, heads, weight, eps)
            a, b = normed.float().chunk(2, dim=-1)
        else:
            a, b = heads.float().chunk(2, dim=-1)
        heads.copy_(torch.cat((a * c - b * s, b * c + a * s), dim=-1))


@jit
def _rotate_heads(
    x, weight, c, s, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, H_P2: tl.constexpr, HALF_P2: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Rotate the HEADS heads of the row at ``x``; c, s: [HALF_P2]."""
    head = tl.arange(0, H_P2)[:, None]
    d = tl.arange(0, HALF_P2)[None, :]
    mask = (head < HEADS) & (d < HALF)
    at = x + head * (2 * HALF) + d
    dtype = x.dtype.element_ty
    a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF) + eps)
        wa = tl.load(weight + d, mask=d < HALF, other=0.0).to(tl.float32)
        wb = tl.load(weight + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)
        a = ((a * scale[:, None]).to(dtype).to(tl.float32) * wa).to(dtype).to(tl.float32)
        b = ((b * scale[:, None]).to(dtype).to(tl.float32) * wb).to(dtype).to(tl.float32)
    c = c[None, :]
    s = s[None, :]
    tl.store(at, (a * c - b * s).to(dtype), mask=mask)
    tl.store(at + HALF, (b * c + a * s).to(dtype), mask=mask)


@jit
def rotary_kernel(
    q, q_stride, k, k_stride, positions, cos, sin, q_weight, k_weight, eps,
    HQ: tl.constexpr, HK: tl.constexpr, HALF: tl.constexpr,
    HQ_P2: tl.constexpr, HK_P2: tl.constexpr, HALF_P2: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    d = tl.arange(0, HALF_P2)
    c = tl.load(cos + position * HALF + d, mask=d < HALF, other=0.0)
    s = tl.load(sin + position * HALF + d, mask=d < HALF, other=0.0)
    _rotate_heads(q + row * q_stride, q_weight, c, s, eps, HQ, HALF, HQ_P2, HALF_P2, NORM)
    _rotate_heads(k + row * k_stride, k_weight, c, s, eps, HK, HALF, HK_P2, HALF_P2, NORM)


@op(spec=rotary_spec, kernel=rotary_kernel, writes=("q", "k"), numpy=False)
def rotary(kernel, q, k, positions, cos, sin, q_weight, k_weight, eps):
    """Rotate q [t, Hq*D] and k [t, Hk*D] (column views of one qkv buffer) in place by ``positions`` int64[t].

    ``cos`` and ``sin`` are contiguous float32[L, D/2]. ``q_weight`` and ``k_weight`` [D] ask for the q/k norm with
    ``eps``; None, None: no norm.
    """
    t, half = q.shape[0], cos.shape[1]
    norm = q_weight is not None
    heads_q, heads_k = q.shape[1] // (2 * half), k.shape[1] // (2 * half)
    if t:
        kernel[(t,)](
            q, q.stride(0), k, k.stride(0), positions, cos, sin, q_weight if norm else q, k_weight if norm else k, eps,
            HQ=heads_q, HK=heads_k, HALF=half,
            HQ_P2=next_power_of_2(heads_q), HK_P2=next_power_of_2(heads_k), HALF_P2=next_power_of_2(half), NORM=norm,
        )  # fmt: skip
