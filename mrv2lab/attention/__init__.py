"""Attention backends: each has a builder that turns CommonAttentionMetadata into what its op takes."""

from mrv2lab.attention.builder import AttentionMetadataBuilder, PagedAttentionMetadata, make_attention_builder
from mrv2lab.attention.torch_backend import TorchAttentionMetadataBuilder
from mrv2lab.attention.triton_backend import TritonAttentionMetadataBuilder

__all__ = [
    "AttentionMetadataBuilder",
    "PagedAttentionMetadata",
    "TorchAttentionMetadataBuilder",
    "TritonAttentionMetadataBuilder",
    "make_attention_builder",
]
