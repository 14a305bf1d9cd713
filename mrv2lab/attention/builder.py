"""What an attention backend is: a builder that runs on the host once a step, and a function that runs in the decoder.

A builder turns :class:`CommonAttentionMetadata` into what its function takes, one object a step and KV-cache group. It
never reads a device tensor: host lengths are upper bounds (vLLM: ``v1/attention/backend.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch

from mrv2lab.config import KVGroup
from mrv2lab.protocol import CommonAttentionMetadata


class AttentionMetadata(Protocol):
    """One KV-cache group's part of ``ForwardInputs.attn_metadata``."""

    @property
    def slot_mapping(self) -> torch.Tensor:
        """[t] int64, device; -1 = write nothing."""

    @property
    def args(self) -> tuple[Any, ...]:
        """What :meth:`AttentionBackend.attend` takes behind the caches: tensors, and host values that a graph would
        freeze."""


class AttentionMetadataBuilder(Protocol):
    """Makes the ``attn_metadata`` entry of one KV-cache group."""

    name: str

    def build(self, common: CommonAttentionMetadata) -> AttentionMetadata:
        """The backend's metadata for this step."""


class AttentionBackend(Protocol):
    """Builders and the function that goes with them."""

    name: str
    full_graphs: bool
    """Whether ``attend``, captured once for r requests of one token each, may be replayed for any lengths up to
    max_model_len. vLLM: ``AttentionCGSupport``."""

    def builder(self, group: KVGroup) -> AttentionMetadataBuilder:
        """The builder of one KV-cache group."""

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
        """Write out [t, Hq, D] from q [t, Hq, D] and one layer's caches [num_blocks, block_size, Hk, D], which hold
        this step's keys and values already. Runs inside a queued segment."""


@dataclass(frozen=True, slots=True)
class PagedAttentionMetadata:
    """What ``paged_attention`` takes, spec or kernel."""

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

    @property
    def args(self) -> tuple[Any, ...]:
        """See :class:`AttentionMetadata`."""
        return self.block_table, self.seq_lens, self.query_start_loc, self.max_query_len

    @classmethod
    def of(cls, common: CommonAttentionMetadata, **more: Any) -> Self:
        """The fields of ``common`` that the paged ops read, and ``more`` of a subclass's."""
        return cls(
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table,
            slot_mapping=common.slot_mapping,
            max_query_len=common.max_query_len,
            **more,
        )
