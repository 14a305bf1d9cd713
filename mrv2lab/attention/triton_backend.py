"""The Triton backend, compiled or interpreted. Its grids follow from host values: t, r and max_query_len.

``decode_attention`` is for single queries: it cuts long sequences over many programs and keeps their parts in a scratch
of fixed addresses. ``paged_attention`` is for chunks, and takes single queries among them where a second launch would
cost more than it gains. Where both run they write different rows, on one stream, so neither waits for the other's.

| step | kernels |
|---|---|
| every request has one query | decode |
| in a graph of any lengths | decode, paged for the rest |
| from ``SPLIT_FROM`` single queries on, or one behind ``SPLIT_BEHIND`` tokens | decode, paged for the rest |
| any other | paged |

Counterpart in vLLM: ``split_decodes_and_prefills`` of ``v1/attention/backends/utils.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mrv2lab.attention.builder import PagedAttentionMetadata
from mrv2lab.config import KVGroup, ModelConfig
from mrv2lab.ops._decode_cut import scratch_shapes
from mrv2lab.ops.decode_attention import decode_attention
from mrv2lab.ops.paged_attention import paged_attention
from mrv2lab.protocol import CommonAttentionMetadata
from mrv2lab.runtime.base import Runtime

SPLIT_FROM = 256
"""Single queries from which a mixed step outside a graph takes both kernels. A second launch costs the host 30 us a
layer. Measured on an H200, single queries behind 275 tokens and a prompt of 128, us a layer in one kernel and in both:
95 and 87 with 256 of them, 51 and 51 with 128, 27 and 32 with 64."""
SPLIT_BEHIND = 2048
"""Tokens behind which a single query alone is reason enough: one program goes through all of them in
``paged_attention``, and several in ``decode_attention``."""


@dataclass(frozen=True, slots=True)
class TritonAttentionMetadata(PagedAttentionMetadata):
    """What the two kernels take."""

    # host: whether decode_attention serves the single queries of a step that has, or may have, longer ones
    split: bool

    @property
    def args(self) -> tuple[Any, ...]:
        """See :class:`AttentionMetadata`."""
        return self.block_table, self.seq_lens, self.query_start_loc, self.max_query_len, self.split


class TritonAttentionMetadataBuilder:
    """Metadata for the Triton kernels. One choice a step, from host values that V1 and MRV2 have alike."""

    name = "triton"

    def build(self, common: CommonAttentionMetadata) -> TritonAttentionMetadata:
        """See :class:`AttentionMetadataBuilder`."""
        split = common.max_query_len > 1 and (common.any_lengths or _has_work_for_two(common))
        return TritonAttentionMetadata.of(common, split=split)


def _has_work_for_two(common: CommonAttentionMetadata) -> bool:
    if common.num_reqs < SPLIT_FROM and common.max_seq_len < SPLIT_BEHIND:
        return False
    starts = common.query_start_loc_np
    lengths = common.seq_lens_np_upper_bound[starts[1:] - starts[:-1] == 1]
    return len(lengths) >= SPLIT_FROM or bool((lengths >= SPLIT_BEHIND).any())


class TritonBackend:
    """Lengths are read on the device, so a graph serves any lengths, if it has the kernels for them.

    ``model``: whose attention it is; without one there is no scratch, and ``paged_attention`` serves all. Raises
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
        *batch, max_query_len, split = args
        heads, how = (out, q, key_cache, value_cache), (scale, window or 0)
        decodes = bool(self._scratch) and (split or max_query_len == 1)
        if decodes:
            decode_attention.execute(self._kernels, (*heads, *batch, *how, *self._scratch))
        if max_query_len > 1 or not decodes:
            paged_attention.execute(self._kernels, (*heads, *batch, max_query_len, *how, decodes))
