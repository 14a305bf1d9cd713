"""Which blocks hold which request's KV: prefix lookup, allocation, publication, release.

A request's table is append-only while it lives. Blocks are published *when the step that fills them is scheduled*,
before the device wrote them, so that a request admitted in the same step can hit them: safe because each layer writes
the KV of the whole batch before attention reads it, and steps run in stream order. For the same reason blocks may be
freed and handed out again while a step that writes them is in flight.

Counterpart in vLLM: ``v1/core/kv_cache_manager.py``, KVCacheManager. Every group here is full attention with the same
block size, so their tables have equal lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

from mrv2lab.config import CacheConfig
from mrv2lab.engine.block_pool import Block, BlockPool, block_key
from mrv2lab.engine.request import Request
from mrv2lab.protocol import BlockIds

_NEVER = 2**62


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest cached prefix: ``num_tokens`` of it, and its blocks, one list a KV-cache group. Held by nobody."""

    num_tokens: int
    blocks: tuple[list[Block], ...]


class KVCacheManager:
    """Block tables of the live requests over one :class:`BlockPool`. ``max_model_len`` in tokens."""

    def __init__(self, config: CacheConfig, max_model_len: int, num_groups: int = 1) -> None:
        self.pool = BlockPool(config.num_blocks)
        self.block_size = config.block_size
        self.caching = config.enable_prefix_caching
        self.max_model_len = max_model_len
        self.num_groups = num_groups
        # req_id -> one table a group, in order of position.
        self.tables: dict[str, tuple[list[Block], ...]] = {}
        self._no_hit = PrefixHit(0, tuple([] for _ in range(num_groups)))

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be handed out now."""
        return self.pool.num_free

    @property
    def usage(self) -> float:
        """Share of the pool held by tables, 0 to 1."""
        return self.pool.usage

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a request of ``num_tokens`` tokens fits into the pool when it has it alone."""
        return self._blocks_for(num_tokens) * self.num_groups <= self.pool.num_usable

    def block_ids(self, request: Request) -> BlockIds:
        """The whole table of ``request``, one fresh list a group; empty lists if it holds nothing."""
        tables = self.tables.get(request.req_id, self._no_hit.blocks)
        return tuple([block.block_id for block in table] for table in tables)

    def get_computed_blocks(self, request: Request) -> PrefixHit:
        """The longest run of cached full blocks from the start of ``request``; changes nothing.

        At most ``num_tokens - 1`` tokens: one must be computed, or there would be no logits to sample from. None of a
        request whose prompt's log-probabilities are still owed.
        """
        if not self.caching or request.needs_whole_prompt:
            return self._no_hit
        hits: tuple[list[Block], ...] = tuple([] for _ in range(self.num_groups))
        limit = (request.num_tokens - 1) // self.block_size
        for block_hash in request.update_block_hashes(self.block_size)[:limit]:
            found = [self.pool.lookup(block_key(block_hash, group)) for group in range(self.num_groups)]
            if None in found:
                break
            for blocks, block in zip(hits, found, strict=True):
                assert block is not None
                blocks.append(block)
        return PrefixHit(len(hits[0]) * self.block_size, hits)

    def blocks_needed(self, request: Request, num_tokens: int, hit: PrefixHit | None = None) -> int:
        """Free blocks it takes to hold ``num_tokens`` of ``request``, over all groups: new ones, and those of ``hit``
        that are free now and would leave the free list."""
        tables = self.tables.get(request.req_id)
        have = len(tables[0]) if tables is not None else 0
        if hit is None:
            return max(self._blocks_for(num_tokens) - have, 0) * self.num_groups
        new = max(self._blocks_for(num_tokens) - have - len(hit.blocks[0]), 0) * self.num_groups
        return new + sum(block.ref_cnt == 0 for blocks in hit.blocks for block in blocks)

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        lookahead: int = 0,
        hit: PrefixHit | None = None,
        reserve_full_sequence: bool = False,
    ) -> BlockIds | None:
        """Make room for ``num_new_tokens`` behind the computed (and hit) ones, plus ``lookahead`` for drafts.

        Returns the ids of the new blocks, one list a group (without the hits), or None, with nothing changed, if the
        pool cannot give them. ``reserve_full_sequence``: None also if all known tokens together would not fit now.
        """
        end = request.num_computed_tokens + num_new_tokens + (hit.num_tokens if hit is not None else 0)
        slots = min(end + lookahead, self.max_model_len)
        at_once = max(slots, request.num_tokens) if reserve_full_sequence else slots
        if self.blocks_needed(request, at_once, hit) > self.pool.num_free:
            return None
        # From here on nothing can fail.
        tables = self.tables.get(request.req_id)
        if tables is None:
            tables = self.tables[request.req_id] = tuple([] for _ in range(self.num_groups))
        if hit is not None:
            for table, hits in zip(tables, hit.blocks, strict=True):
                self.pool.touch(hits)
                table.extend(hits)
        new_ids: BlockIds = tuple(self._grow(table, slots) for table in tables)
        request.num_slots = len(tables[0]) * self.block_size
        self.cache_blocks(request, end)
        return new_ids

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Publish the full blocks among the first ``num_tokens``, as far as the tokens in them are known."""
        if not self.caching:
            request.next_hash_at = _NEVER
            return
        num_full = min(num_tokens, request.num_tokens) // self.block_size
        tables = self.tables[request.req_id]
        hashes = request.update_block_hashes(self.block_size)
        for group, table in enumerate(tables):
            # Published blocks are a prefix of the table: hits, then our own.
            first = num_full
            while first > 0 and table[first - 1].key is None:
                first -= 1
            for index in range(first, num_full):
                self.pool.publish(table[index], block_key(hashes[index], group))
        request.next_hash_at = max((num_full + 1) * self.block_size, request.next_hash_at)

    def free(self, request: Request, num_valid_tokens: int | None = None) -> None:
        """Let go of every block of ``request``, a table's tail first. No effect if it holds none.

        ``num_valid_tokens``: how many tokens' KV is written, or will be by a step in flight; blocks published beyond
        it are forgotten. It matters when a request loses its place in a step that is still being put together.
        """
        tables = self.tables.pop(request.req_id, None)
        request.num_slots = request.next_hash_at = 0
        if tables is None:
            return
        for table in tables:
            if num_valid_tokens is not None:
                for block in table[num_valid_tokens // self.block_size :]:
                    self.pool.unpublish(block)
            self.pool.free(reversed(table))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False while any request holds blocks."""
        return self.pool.reset_cache()

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _grow(self, table: list[Block], num_slots: int) -> list[int]:
        new = self.pool.allocate(max(self._blocks_for(num_slots) - len(table), 0))
        table.extend(new)
        return [block.block_id for block in new]
