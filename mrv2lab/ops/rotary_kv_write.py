"""rotary.py and kv_write.py in one kernel: what stands between the qkv product and attention."""

from __future__ import annotations

from mrv2lab.ops._op import cdiv, jit, next_power_of_2, op
from mrv2lab.ops._pdl import early_start, let_next_start, wait_for_previous

tl = None


def rotary_kv_write_spec(qkv, key_cache, value_cache, positions, slot_mapping, cos, sin, q_weight, k_weight, eps):
    """q and k rotated in place, behind their norm if they have one; then k and v written to their slots.

    qkv: [t, (Hq + 2 Hk) * D]; the rest as in rotary.py and kv_write.py.
    """
    from mrv2lab.ops.kv_write import kv_write_spec
    from mrv2lab.ops.rotary import rotary_spec

    kv_size = key_cache.shape[2] * key_cache.shape[3]
    k_start = qkv.shape[1] - 2 * kv_size
    k, v = qkv[:, k_start : k_start + kv_size], qkv[:, k_start + kv_size :]
    rotary_spec(qkv[:, :k_start], k, positions, cos, sin, q_weight, k_weight, eps)
    kv_write_spec(key_cache, value_cache, k, v, slot_mapping)


@jit
def _norm_half(a, scale, weight, dtype: tl.constexpr):
    """Half of each head, float32, rounded where rotary.py rounds."""
    return ((a * scale[:, None]).to(dtype).to(tl.float32) * weight.to(tl.float32)[None, :]).to(dtype).to(tl.float32)


@jit
def rotary_kv_write_kernel(
    qkv, qkv_stride, key_cache, key_block_stride, value_cache, value_block_stride,
    positions, slot_mapping, cos, sin, q_weight, k_weight, eps,
    HQ: tl.constexpr, HK: tl.constexpr, HALF: tl.constexpr, HALF_P2: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr, V_HEADS: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    d = tl.arange(0, HALF_P2)
    inside = d < HALF
    if NORM:
        qa = tl.load(q_weight + d, mask=inside, other=0.0)
        qb = tl.load(q_weight + HALF + d, mask=inside, other=0.0)
        ka = tl.load(k_weight + d, mask=inside, other=0.0)
        kb = tl.load(k_weight + HALF + d, mask=inside, other=0.0)
    wait_for_previous(PDL)
    position = tl.load(positions + row)
    slot = tl.load(slot_mapping + row)
    c = tl.load(cos + position * HALF + d, mask=inside, other=0.0)[None, :]
    s = tl.load(sin + position * HALF + d, mask=inside, other=0.0)[None, :]
    block = slot // BLOCK_SIZE
    in_block = (slot % BLOCK_SIZE) * (2 * HALF * HK)

    # q's heads and k's lie one behind the other in the row.
    head = part * HEADS + tl.arange(0, HEADS)
    mask = (head < HQ + HK)[:, None] & inside[None, :]
    at = qkv + row * qkv_stride + head[:, None] * (2 * HALF) + d[None, :]
    dtype = qkv.dtype.element_ty
    a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    is_key = (head >= HQ)[:, None]
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * HALF) + eps)
        a = tl.where(is_key, _norm_half(a, scale, ka, dtype), _norm_half(a, scale, qa, dtype))
        b = tl.where(is_key, _norm_half(b, scale, kb, dtype), _norm_half(b, scale, qb, dtype))
    first, second = (a * c - b * s).to(dtype), (b * c + a * s).to(dtype)
    tl.store(at, first, mask=mask)
    tl.store(at + HALF, second, mask=mask)
    key_at = key_cache + block * key_block_stride + in_block + (head - HQ)[:, None] * (2 * HALF) + d[None, :]
    key_mask = ((head >= HQ) & (head < tl.where(slot >= 0, HQ + HK, 0)))[:, None] & inside[None, :]
    tl.store(key_at, first, mask=key_mask)
    tl.store(key_at + HALF, second, mask=key_mask)

    head = part * V_HEADS + tl.arange(0, V_HEADS)
    mask = (head < tl.where(slot >= 0, HK, 0))[:, None] & inside[None, :]
    at = qkv + row * qkv_stride + (HQ + HK + head)[:, None] * (2 * HALF) + d[None, :]
    value_at = value_cache + block * value_block_stride + in_block + head[:, None] * (2 * HALF) + d[None, :]
    a = tl.load(at, mask=mask, other=0.0)
    b = tl.load(at + HALF, mask=mask, other=0.0)
    tl.store(value_at, a, mask=mask)
    tl.store(value_at + HALF, b, mask=mask)


FEW_TOKENS = 32
"""Up to here a token's heads are spread over several programs: one is not done before the others have begun."""


@op(
    spec=rotary_kv_write_spec,
    kernel=rotary_kv_write_kernel,
    writes=("qkv", "key_cache", "value_cache"),
    numpy=False,
)
def rotary_kv_write(
    kernel, qkv, key_cache, value_cache, positions, slot_mapping, cos, sin, q_weight, k_weight, eps
):  # fmt: skip
    """Rotate q and k of ``qkv`` [t, (Hq + 2 Hk) * D] in place by ``positions`` int64[t]; write k and v to their slots.

    Caches [num_blocks, block_size, Hk, D], each block contiguous; ``slot_mapping`` int64[t], -1 writes nothing.
    ``cos``, ``sin``: contiguous float32[L, D/2]. ``q_weight``, ``k_weight`` [D] ask for the q/k norm with ``eps``;
    None, None: no norm.
    """
    t, half = qkv.shape[0], cos.shape[1]
    kv_heads, block_size = key_cache.shape[2], key_cache.shape[1]
    heads = qkv.shape[1] // (2 * half) - kv_heads
    norm = q_weight is not None
    per_program = min(4 if t <= FEW_TOKENS else 32, next_power_of_2(heads))
    parts = cdiv(heads, per_program)
    if t:
        kernel[(t, parts)](
            qkv, qkv.stride(0), key_cache, key_cache.stride(0), value_cache, value_cache.stride(0),
            positions, slot_mapping, cos, sin, q_weight if norm else qkv, k_weight if norm else qkv, eps,
            HQ=heads - kv_heads, HK=kv_heads, HALF=half, HALF_P2=next_power_of_2(half), BLOCK_SIZE=block_size,
            HEADS=per_program, V_HEADS=next_power_of_2(cdiv(kv_heads, parts)), NORM=norm,
            num_warps=min(4, max(1, per_program // 4)) if t <= FEW_TOKENS else 4, **early_start(qkv),
        )  # fmt: skip
