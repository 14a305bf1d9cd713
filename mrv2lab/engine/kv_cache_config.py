"""How many KV blocks there are, and in which tensors. Counterpart in vLLM: ``KVCacheConfig`` and
``v1/core/kv_cache_utils.py``.

    available = gpu_memory_utilization * total - (weights, tables, buffers + context, kernels + largest step + graphs)
    num_blocks = available // bytes of a block over all tensors
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mrv2lab.config import EngineConfig
from mrv2lab.engine.kv_layout import kv_bytes_per_block, kv_tensor_of_layer, num_kv_tensors
from mrv2lab.runner.profile_memory import MemoryProfile, size_words
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.device_memory import page_bytes, read_memory

LEAST_BLOCKS = 2
"""The null block and one to hand out."""


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The KV cache's size, and what it was computed from."""

    num_blocks: int
    """The null block counted in."""
    bytes_per_block: int
    """Keys and values of every tensor."""
    # [num_blocks, block_size, Hk, D]
    shape: tuple[int, int, int, int]
    num_tensors: int
    """Key tensors, and as many value tensors."""
    tensor_of_layer: tuple[int, ...]
    profile: MemoryProfile | None
    """None = not measured: the given ``num_blocks`` take less than half of what is free."""

    @property
    def nbytes(self) -> int:
        """Requested bytes of all KV tensors."""
        return self.num_blocks * self.bytes_per_block

    def __str__(self) -> str:
        one, why = size_words(self.bytes_per_block), "" if self.profile is None else f"; profile of {self.profile}"
        return f"{self.num_blocks:,} blocks of {self.shape[1]} tokens, {one} each, {size_words(self.nbytes)}{why}"


def resolve_kv_cache(config: EngineConfig, rt: Runtime, profile: Callable[[], MemoryProfile]) -> KVCacheConfig:
    """The size of the KV cache. ``profile`` measures; it is called unless ``num_blocks`` is given and certainly fits.

    Raises ``ValueError`` for a given ``num_blocks`` that does not fit, naming the largest that does, and for a
    utilisation that leaves no block, naming the smallest that would do.
    """
    cache = config.cache
    if cache.num_blocks is not None:
        reading = read_memory(rt, cache.memory_bytes)
        free = int(reading.total * cache.gpu_memory_utilization) - reading.used
        if 2 * cache.num_blocks * kv_bytes_per_block(config) <= free:
            return make_kv_cache_config(config, cache.num_blocks, None)
    measured = profile()
    most = largest_num_blocks(config, rt, measured.available)
    if cache.num_blocks is None:
        if most < LEAST_BLOCKS:
            raise ValueError(_no_block(config, rt, measured))
        return make_kv_cache_config(config, most, measured)
    if cache.num_blocks > most:
        raise ValueError(_too_many(config, measured, cache.num_blocks, most))
    return make_kv_cache_config(config, cache.num_blocks, measured)


def make_kv_cache_config(config: EngineConfig, num_blocks: int, profile: MemoryProfile | None) -> KVCacheConfig:
    """The config of ``num_blocks`` blocks, whatever room there is."""
    model = config.model
    return KVCacheConfig(
        num_blocks=num_blocks,
        bytes_per_block=kv_bytes_per_block(config),
        shape=(num_blocks, config.cache.block_size, model.num_key_value_heads, model.head_dim),
        num_tensors=num_kv_tensors(model),
        tensor_of_layer=kv_tensor_of_layer(model),
        profile=profile,
    )


def largest_num_blocks(config: EngineConfig, rt: Runtime, available: int) -> int:
    """Blocks that ``available`` bytes hold, each tensor in whole pages of the device's allocator; 0 for none."""
    tensors, page = 2 * num_kv_tensors(config.model), page_bytes(rt)
    each = max(0, available) // tensors // page * page
    return each // (kv_bytes_per_block(config) // tensors)


def _no_block(config: EngineConfig, rt: Runtime, profile: MemoryProfile) -> str:
    """Why there is no block, and which utilisation would do."""
    tensors, page = 2 * num_kv_tensors(config.model), page_bytes(rt)
    least = profile.needed + tensors * -(-(LEAST_BLOCKS * kv_bytes_per_block(config) // tensors) // page) * page
    share = math.ceil(1000 * least / profile.total) / 1000
    why = (
        f"gpu_memory_utilization={profile.utilization} of {size_words(profile.total)} leaves no KV block: "
        f"{size_words(profile.needed)} are needed before the first one ({profile}), and {LEAST_BLOCKS} blocks take "
        f"{size_words(least - profile.needed)}"
    )
    if share <= 1:
        return f"{why}; use gpu_memory_utilization={share} or more, or lower max_num_reqs or max_num_batched_tokens"
    return f"{why}; no utilisation would do: use a smaller model, or lower max_num_reqs or max_num_batched_tokens"


def _too_many(config: EngineConfig, profile: MemoryProfile, asked: int, most: int) -> str:
    one = kv_bytes_per_block(config)
    return (
        f"num_blocks={asked:,} take {size_words(asked * one)} ({size_words(one)} each), but "
        f"{size_words(max(0, profile.available))} are left: at most {most:,} blocks fit ({profile}). Use "
        f"num_blocks={most} or less, num_blocks=None for as many as fit, or raise gpu_memory_utilization "
        f"({profile.utilization})"
    )
