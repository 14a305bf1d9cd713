"""The portable backend: the spec of ``paged_attention``, which reads the lengths when it runs.

It is the definition that the others are compared with, so it can run on a GPU too; there reading the lengths stops the
host until the device has caught up, once a layer, and no graph can hold it.
"""

from __future__ import annotations

from typing import Any

import torch

from mrv2lab.attention.builder import PagedAttentionMetadata
from mrv2lab.config import KVGroup
from mrv2lab.ops.paged_attention import paged_attention
from mrv2lab.protocol import CommonAttentionMetadata


class TorchAttentionMetadataBuilder:
    """Metadata for the torch spec."""

    name = "torch"

    def build(self, common: CommonAttentionMetadata) -> PagedAttentionMetadata:
        """See :class:`AttentionMetadataBuilder`."""
        return PagedAttentionMetadata.of(common)


class TorchBackend:
    """``paged_attention``'s spec on whatever device holds the tensors."""

    name = "torch"

    def __init__(self, device: torch.device) -> None:
        self.full_graphs = device.type != "cuda"
        """A tape runs the spec again, which then reads the lengths of that step; a CUDA graph cannot hold the read."""

    def builder(self, group: KVGroup) -> TorchAttentionMetadataBuilder:
        """See :class:`AttentionBackend`. The window is no part of the metadata."""
        return TorchAttentionMetadataBuilder()

    def attend(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        args: tuple[Any, ...],
        scale: float,
        window: int | None,
    ) -> None:
        """See :class:`AttentionBackend`."""
        paged_attention.execute("spec", (out, q, key_cache, value_cache, *args, scale, window or 0))
