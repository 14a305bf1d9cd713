"""The Triton backend, compiled or interpreted. Its grid follows from host values: t, r and max_query_len.

Steps in which every request has one query go to ``decode_attention``, which cuts long sequences over many programs and
keeps their parts in a scratch of fixed addresses; the others, decodes among them, to ``paged_attention``.
"""

from __future__ import annotations

from typing import Any

import torch

from mrv2lab.attention.builder import PagedAttentionMetadata
from mrv2lab.config import KVGroup, ModelConfig
from mrv2lab.ops._decode_cut import scratch_shapes
from mrv2lab.ops.decode_attention import decode_attention
from mrv2lab.ops.paged_attention import paged_attention
from mrv2lab.protocol import CommonAttentionMetadata
from mrv2lab.runtime.base import Runtime


class TritonAttentionMetadataBuilder:
    """Metadata for the Triton kernels."""

    name = "triton"

    def build(self, common: CommonAttentionMetadata) -> PagedAttentionMetadata:
        """See :class:`AttentionMetadataBuilder`."""
        return PagedAttentionMetadata.of(common)


class TritonBackend:
    """Lengths are read on the device, so a graph serves any lengths. Which kernel runs follows from max_query_len.

    ``model``: whose attention it is; without one there is no scratch, and ``paged_attention`` serves all steps. Raises
    ``ValueError`` where no kernel runs: on a runtime of specs.
    """

    name = "triton"
    full_graphs = True

    def __init__(self, rt: Runtime, model: ModelConfig | None = None) -> None:
        if rt.backend == "spec":
            raise ValueError(
                "attention='triton' needs Triton kernels, but this runtime runs specs; use kernels='interpret' (slow, "
                "any machine), a GPU, or attention='torch'"
            )
        self._kernels = rt.backend
        # float32[rows, D], float32[rows], int32[programs] (zeros between launches); all layers share them
        self._scratch: tuple[torch.Tensor, ...] = ()
        if model is not None:
            shapes = scratch_shapes(model.num_attention_heads, model.num_key_value_heads, model.head_dim)
            names = ("partial", "partial_lse", "counters")
            dtypes = (torch.float32, torch.float32, torch.int32)
            self._scratch = tuple(
                rt.raw(rt.zeros(shape, dtype, name=f"attention.{name}"))
                for shape, dtype, name in zip(shapes, dtypes, names, strict=True)
            )

    def builder(self, group: KVGroup) -> TritonAttentionMetadataBuilder:
        """See :class:`AttentionBackend`. The window is no part of the metadata."""
        return TritonAttentionMetadataBuilder()

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
        *batch, max_query_len = args
        heads = (out, q, key_cache, value_cache)
        if max_query_len == 1 and self._scratch:
            decode_attention.execute(self._kernels, (*heads, *batch, scale, window or 0, *self._scratch))
        else:
            paged_attention.execute(self._kernels, (*heads, *args, scale, window or 0))
