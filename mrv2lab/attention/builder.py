"""What an attention backend adds to the common metadata, and the choice of a backend.

A builder runs once a step and KV-cache group, on the host. It never reads a device tensor: host lengths are upper
bounds (vLLM: ``v1/attention/backend.py``, ``AttentionMetadataBuilder``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mrv2lab.protocol import CommonAttentionMetadata

if TYPE_CHECKING:
    from mrv2lab.runtime.base import Runtime


class AttentionMetadataBuilder(Protocol):
    """Makes the ``attn_metadata`` entry of one KV-cache group."""

    name: str

    def build(self, common: CommonAttentionMetadata) -> Any:
        """The backend's metadata for this step."""


@dataclass(frozen=True, slots=True)
class PagedAttentionMetadata:
    """What ``kv_write`` and ``paged_attention`` take. The torch spec and the Triton kernel need the same."""

    # [r + 1] int32, device
    query_start_loc: torch.Tensor
    # [r] int32, device
    seq_lens: torch.Tensor
    # [r, B] int32, device
    block_table: torch.Tensor
    # [t] int64, device; -1 = write nothing
    slot_mapping: torch.Tensor
    # host bound; 1 = every request is a decode
    max_query_len: int

    @classmethod
    def of(cls, common: CommonAttentionMetadata) -> PagedAttentionMetadata:
        """The fields of ``common`` that the paged ops read."""
        return cls(
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table,
            slot_mapping=common.slot_mapping,
            max_query_len=common.max_query_len,
        )


def make_attention_builder(rt: Runtime) -> AttentionMetadataBuilder:
    """The builder for the kernels that ``rt`` runs: torch for specs, triton for compiled and interpreted kernels."""
    from mrv2lab.attention.torch_backend import TorchAttentionMetadataBuilder
    from mrv2lab.attention.triton_backend import TritonAttentionMetadataBuilder

    return TorchAttentionMetadataBuilder() if rt.backend == "spec" else TritonAttentionMetadataBuilder()
