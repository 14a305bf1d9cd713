"""The Triton backend, compiled or interpreted. Its grid follows from host values: t, r and max_query_len."""

from __future__ import annotations

from mrv2lab.attention.builder import PagedAttentionMetadata
from mrv2lab.protocol import CommonAttentionMetadata


class TritonAttentionMetadataBuilder:
    """Metadata for the Triton kernels."""

    name = "triton"

    def build(self, common: CommonAttentionMetadata) -> PagedAttentionMetadata:
        """See :class:`AttentionMetadataBuilder`."""
        return PagedAttentionMetadata.of(common)
