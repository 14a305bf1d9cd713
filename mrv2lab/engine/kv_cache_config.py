"""How many KV blocks there are, and in which tensors. Counterpart in vLLM: ``KVCacheConfig`` and
``v1/core/kv_cache_utils.py``.

    available = gpu_memory_utilization * total - (weights, tables, buffers + context, kernels + largest step + graphs)
    num_blocks = available // bytes of a block over all tensors

A CPU whose ``memory_bytes`` nobody gave has half of the machine's, and stops at what the scheduler's limits can fill.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from mrv2lab.config import EngineConfig
from mrv2lab.engine.kv_layout import kv_bytes_per_block, kv_tensor_of_layer, num_kv_tensors
from mrv2lab.runner.profile_memory import MemoryProfile, size_words
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.device_memory import page_bytes, physical_memory, read_memory

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
    """None = not measured: the given ``num_blocks`` take less than half of what late tables leave of what is free."""
    enough: bool = False
    """Whether there is room for more, of which ``max_num_reqs`` requests of ``max_model_len`` cannot make use (on a
    CPU without ``memory_bytes``)."""

    @property
    def nbytes(self) -> int:
        """Requested bytes of all KV tensors."""
        return self.num_blocks * self.bytes_per_block

    def __str__(self) -> str:
        one, why = size_words(self.bytes_per_block), "" if self.profile is None else f"; profile of {self.profile}"
        enough = ", all that max_num_reqs x max_model_len can fill" if self.enough else ""
        size = f"{self.num_blocks:,} blocks of {self.shape[1]} tokens, {one} each, {size_words(self.nbytes)}"
        return f"{size}{enough}{why}"


def resolve_kv_cache(config: EngineConfig, rt: Runtime, profile: Callable[[], MemoryProfile]) -> KVCacheConfig:
    """The size of the KV cache. ``profile`` measures; it is called unless ``num_blocks`` is given and certainly fits.

    Raises ``ValueError`` for a given ``num_blocks`` that does not fit, naming the largest that does, and for a
    utilisation that leaves no block, naming the smallest that would do.
    """
    cache = config.cache
    if cache.num_blocks is not None:
        reading = read_memory(rt, cache.memory_bytes)
        free = int(reading.total * cache.gpu_memory_utilization) - reading.used
        # As much again for the largest step and graphs, and the tables that come with the first request that needs
        # them: counts of tokens, processed logits and masks are R x V each, of four bytes or less.
        late = 3 * 4 * config.scheduler.max_num_reqs * config.model.vocab_size
        if 2 * cache.num_blocks * kv_bytes_per_block(config) + late <= free:
            return make_kv_cache_config(config, cache.num_blocks, None)
    measured = profile()
    most = largest_num_blocks(config, rt, measured.available)
    if most < LEAST_BLOCKS:
        raise ValueError(_no_block(config, rt, measured))
    if cache.num_blocks is None:
        # Nobody said how much of a machine that others use too is to be a device's: no more than can be of use.
        enough = most_useful_blocks(config) if rt.device.type != "cuda" and cache.memory_bytes is None else most
        made = make_kv_cache_config(config, min(most, max(LEAST_BLOCKS, enough)), measured)
        return dataclasses.replace(made, enough=enough < most)
    if cache.num_blocks > most:
        raise ValueError(_too_many(config, rt, measured, cache.num_blocks, most))
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


def most_useful_blocks(config: EngineConfig) -> int:
    """Blocks that ``max_num_reqs`` requests of ``max_model_len`` fill, and the null block."""
    scheduler, size = config.scheduler, config.cache.block_size
    return 1 + scheduler.max_num_reqs * len(config.model.kv_groups) * -(-scheduler.max_model_len // size)


def _no_block(config: EngineConfig, rt: Runtime, profile: MemoryProfile) -> str:
    """Why there is no block, and what would do for those that were asked for."""
    blocks = config.cache.num_blocks or LEAST_BLOCKS
    least = _bytes_with(config, rt, profile, blocks)
    ways = _ways(rt, profile, least)
    if not ways or not ways[0].startswith("gpu"):
        ways.insert(0, "no utilisation would do: use a smaller model")
    else:
        ways[0] = f"use {ways[0]}"
    return (
        f"gpu_memory_utilization={profile.utilization} of {size_words(profile.total)} leaves no KV block: "
        f"{size_words(profile.needed)} are needed before the first one ({profile}), and {blocks:,} blocks take "
        f"{size_words(least - profile.needed)}; {', or '.join(ways)}, or lower max_num_reqs or max_num_batched_tokens"
    )


def _too_many(config: EngineConfig, rt: Runtime, profile: MemoryProfile, asked: int, most: int) -> str:
    one = kv_bytes_per_block(config)
    ways = [f"num_blocks={most} or less", "num_blocks=None for as many as fit and are of use"]
    ways += _ways(rt, profile, _bytes_with(config, rt, profile, asked))
    return (
        f"num_blocks={asked:,} take {size_words(asked * one)} ({size_words(one)} each), but "
        f"{size_words(max(0, profile.available))} are left: at most {most:,} blocks fit ({profile}). Use "
        f"{', or '.join(ways)}"
    )


def _bytes_with(config: EngineConfig, rt: Runtime, profile: MemoryProfile, blocks: int) -> int:
    """What is needed with that many blocks."""
    tensors, page = 2 * num_kv_tensors(config.model), page_bytes(rt)
    return profile.needed + tensors * -(-(blocks * kv_bytes_per_block(config) // tensors) // page) * page


def _ways(rt: Runtime, profile: MemoryProfile, least: int) -> list[str]:
    """The options that make room for ``least`` bytes; on a CPU up to all of the machine's."""
    share, size = math.ceil(1000 * least / profile.total) / 1000, math.ceil(least / profile.utilization)
    ways = [f"gpu_memory_utilization={share} or more"] if share <= 1 else []
    if rt.device.type != "cuda" and size <= physical_memory():
        ways.append(f"memory_bytes={size} or more, the size of a CPU's device")
    return ways
