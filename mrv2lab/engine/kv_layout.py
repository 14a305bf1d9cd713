"""Which KV tensor holds which layer, and what a block costs.

Groups take their blocks from one pool, so a block belongs to one group at a time, and the i-th layers of all groups can
share one tensor: tensor i holds, block by block, layer ``group.layers[i]`` of whichever group has the block. With as
many sliding layers as full ones a block costs half of what it would if each layer had its own tensor; the smaller of
two unequal groups leaves the last tensors' share of its blocks unused (vLLM cuts the larger into more groups).

Counterpart in vLLM: ``v1/core/kv_cache_utils.py``, where it makes a KVCacheConfig of several groups.
"""

from __future__ import annotations

from mrv2lab.config import EngineConfig, ModelConfig

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def kv_tensor_of_layer(model: ModelConfig) -> tuple[int, ...]:
    """For each layer the index of the key tensor and value tensor, [num_blocks, block_size, Hk, D] each, it uses."""
    where = {layer: i for group in model.kv_groups for i, layer in enumerate(group.layers)}
    return tuple(where[layer] for layer in range(model.num_hidden_layers))


def layer_to_group(model: ModelConfig) -> tuple[int, ...]:
    """For each layer the index of its group in ``model.kv_groups``."""
    where = {layer: g for g, group in enumerate(model.kv_groups) for layer in group.layers}
    return tuple(where[layer] for layer in range(model.num_hidden_layers))


def num_kv_tensors(model: ModelConfig) -> int:
    """Tensor pairs that hold all layers: as many as the largest group has layers."""
    return max(len(group.layers) for group in model.kv_groups)


def kv_bytes_per_block(config: EngineConfig) -> int:
    """Bytes of one block of the pool, keys and values of every tensor pair: what ``num_blocks`` is multiplied with."""
    model = config.model
    one = config.cache.block_size * model.num_key_value_heads * model.head_dim * _BYTES[model.dtype]
    return 2 * num_kv_tensors(model) * one
