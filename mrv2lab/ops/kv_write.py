"""Store this step's keys and values in the paged cache. Counterpart in vLLM: ``reshape_and_cache``."""

from __future__ import annotations

from mrv2lab.ops._op import jit, next_power_of_2, op

tl = None


def kv_write_spec(key_cache, value_cache, k, v, slot_mapping):
    """cache[slot // block_size, slot % block_size] = row, for every token whose slot is >= 0.

    key_cache, value_cache: [num_blocks, block_size, Hk, D]; k, v: [t, Hk*D]; slot_mapping: int64[t], -1 = skip.
    """
    keep = slot_mapping >= 0
    slots = slot_mapping[keep]
    at = (slots // key_cache.shape[1], slots % key_cache.shape[1])
    for cache, rows in ((key_cache, k), (value_cache, v)):
        cache[at] = rows[keep].unflatten(-1, cache.shape[2:])


@jit
def kv_write_kernel(
    key_cache, value_cache, key_block_stride, value_block_stride, k, k_stride, v, v_stride, slot_mapping,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, WIDTH_P2: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + row)
    col = tl.arange(0, WIDTH_P2)
    mask = col < tl.where(slot >= 0, WIDTH, 0)
    block = slot // BLOCK_SIZE
    inside = (slot % BLOCK_SIZE) * WIDTH + col
    key = tl.load(k + row * k_stride + col, mask=mask, other=0.0)
    value = tl.load(v + row * v_stride + col, mask=mask, other=0.0)
    tl.store(key_cache + block * key_block_stride + inside, key, mask=mask)
    tl.store(value_cache + block * value_block_stride + inside, value, mask=mask)


@op(spec=kv_write_spec, kernel=kv_write_kernel, writes=("key_cache", "value_cache"), numpy=False)
def kv_write(kernel, key_cache, value_cache, k, v, slot_mapping):
    """Write k, v [t, Hk*D] to the slots int64[t] of the caches [num_blocks, block_size, Hk, D]; slot -1 writes nothing.

    A block must be contiguous; blocks may be any stride apart.
    """
    t, width = k.shape
    if t:
        kernel[(t,)](
            key_cache, value_cache, key_cache.stride(0), value_cache.stride(0),
            k, k.stride(0), v, v.stride(0), slot_mapping,
            BLOCK_SIZE=key_cache.shape[1], WIDTH=width, WIDTH_P2=next_power_of_2(width),
        )  # fmt: skip
