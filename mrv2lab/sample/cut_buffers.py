"""What the cut-finding kernels write, allocated once; see ``ops/top_k_top_p.py``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mrv2lab.ops._cut import BOUNDS, NEAR_TOKENS, PIVOTS, num_blocks, num_groups
from mrv2lab.ops._op import next_power_of_2
from mrv2lab.runtime.base import Runtime


@dataclass(frozen=True, slots=True)
class CutBuffers:
    """Tables of n rows. About V / 32 bytes a row and 4 for each candidate; with ``narrow`` V / 6 more."""

    # [n] float32 and int32: the cut
    cut_value: torch.Tensor
    cut_id: torch.Tensor
    # [n] int32: DONE, NARROW, SEARCH, or NEAR and beyond
    status: torch.Tensor
    # [n, 5] float32
    bounds: torch.Tensor
    # [n, ceil(V / 128)] float32
    group_max: torch.Tensor
    # [n, ceil(V / 2048)] float32
    block_max: torch.Tensor
    block_sum: torch.Tensor
    # [n, ceil(V / 2048)] int32
    block_count: torch.Tensor
    # [n, ceil(V / 2048), 8] float32; of no columns where nobody narrows
    sums: torch.Tensor
    # [n, ceil(V / 2048), 64] int32 and [n, ceil(V / 2048)] int32: tokens of each block, and their number; likewise
    near: torch.Tensor
    near_count: torch.Tensor
    # [n, L] int32: groups
    listed: torch.Tensor
    # [n, C] int32: tokens, C a power of two
    candidates: torch.Tensor

    @classmethod
    def make(
        cls, rt: Runtime, name: str, rows: int, vocab_size: int, *, listed: int, candidates: int, narrow: bool
    ) -> CutBuffers:
        """For up to ``rows`` rows. ``listed``: the greatest k that needs no search of whole rows."""
        groups, blocks = num_groups(vocab_size), num_blocks(vocab_size)
        listed, candidates = min(listed, groups), next_power_of_2(min(candidates, vocab_size + 1))

        def buffer(part: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return rt.empty(shape, dtype, name=f"{name}.{part}")

        return cls(
            cut_value=buffer("cut_value", (rows,), torch.float32),
            cut_id=buffer("cut_id", (rows,), torch.int32),
            status=buffer("status", (rows,), torch.int32),
            bounds=buffer("bounds", (rows, BOUNDS), torch.float32),
            group_max=buffer("group_max", (rows, groups), torch.float32),
            block_max=buffer("block_max", (rows, blocks), torch.float32),
            block_sum=buffer("block_sum", (rows, blocks), torch.float32),
            block_count=buffer("block_count", (rows, blocks), torch.int32),
            sums=buffer("sums", (rows, blocks if narrow else 0, PIVOTS), torch.float32),
            near=buffer("near", (rows, blocks if narrow else 0, NEAR_TOKENS), torch.int32),
            near_count=buffer("near_count", (rows, blocks if narrow else 0), torch.int32),
            listed=buffer("listed", (rows, listed), torch.int32),
            candidates=buffer("candidates", (rows, candidates), torch.int32),
        )

    def first(self, n: int) -> CutBuffers:
        """Views of the first ``n`` rows."""
        return CutBuffers(*(getattr(self, name)[:n] for name in self.__slots__))

    @property
    def nbytes(self) -> int:
        """Bytes of all tables."""
        return sum(int(getattr(self, name).nbytes) for name in self.__slots__)
