"""The portable backend: the specs of ``kv_write`` and ``paged_attention``, which read the lengths when they run."""

from __future__ import annotations

from mrv2lab.attention.builder import PagedAttentionMetadata
from mrv2lab.protocol import CommonAttentionMetadata


class TorchAttentionMetadataBuilder:
    """Metadata for the torch specs."""

    name = "torch"

    def build(self, common: CommonAttentionMetadata) -> PagedAttentionMetadata:
        """See :class:`AttentionMetadataBuilder`."""
        return PagedAttentionMetadata.of(common)
