"""Attention backends: each has builders that turn CommonAttentionMetadata into what its function takes."""

from mrv2lab.attention.builder import (
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
    PagedAttentionMetadata,
)
from mrv2lab.attention.create import make_backend
from mrv2lab.attention.flashinfer_backend import FlashInferBackend, FlashInferMetadata
from mrv2lab.attention.torch_backend import TorchAttentionMetadataBuilder, TorchBackend
from mrv2lab.attention.triton_backend import TritonAttentionMetadataBuilder, TritonBackend

__all__ = [
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "FlashInferBackend",
    "FlashInferMetadata",
    "PagedAttentionMetadata",
    "TorchAttentionMetadataBuilder",
    "TorchBackend",
    "TritonAttentionMetadataBuilder",
    "TritonBackend",
    "make_backend",
]
