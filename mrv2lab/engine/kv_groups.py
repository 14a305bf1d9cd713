"""What a KV-cache group needs of a request: which entries of its block table, and how many blocks at most.

A full group needs every block from the first on. A group of sliding layers needs those that its window still reaches:
blocks behind it are let go, and their entries become the null block, so that all tables stay equally long.

Counterpart in vLLM: ``v1/core/single_type_kv_cache_manager.py``, FullAttentionManager and SlidingWindowManager.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupReach:
    """``window`` in tokens, a query's own included (None = all), over blocks of ``block_size`` tokens."""

    window: int | None
    block_size: int

    def first_needed(self, position: int) -> int:
        """The first table entry that a query at ``position``, or any later one, can see."""
        return 0 if self.window is None else max(position - self.window + 1, 0) // self.block_size

    def most_blocks(self, num_tokens: int, most_at_once: int) -> int:
        """Blocks held at once by a sequence of ``num_tokens`` that is computed ``most_at_once`` tokens a step, at most.

        A step's queries reach back ``window - 1`` tokens in front of the first of them, and the span of both may begin
        and end inside a block.
        """
        whole = -(-num_tokens // self.block_size)
        if self.window is None:
            return whole
        span = self.window - 1 + most_at_once
        return min(whole, -(-(span - 1) // self.block_size) + 1)
