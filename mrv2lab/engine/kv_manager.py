"""Which blocks hold which request's KV: prefix lookup, allocation, publication, release.

A request's table is append-only while it lives. Blocks are published *when the step that fills them is scheduled*,
before the device wrote them, so that a request admitted in the same step can hit them: safe because each layer writes
the KV of the whole batch before attention reads it, and steps run in stream order. For the same reason blocks may be
freed and handed out again while a step that writes them is in flight.

All groups have the same block size, so their tables have equal lengths; blocks that a group's window has left behind
go back to the pool, and their entries become the null block. The device's copies of these entries stay as they were:
attention starts at the window.

Counterpart in vLLM: ``v1/core/kv_cache_manager.py``, KVCacheManager, with ``kv_cache_coordinator.py``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mrv2lab.config import CacheConfig
from mrv2lab.engine.block_pool import Block, BlockPool, block_key
from mrv2lab.engine.kv_groups import GroupReach
from mrv2lab.engine.request import Request
from mrv2lab.protocol import BlockIds

_NEVER = 2**62


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest cached prefix: ``num_tokens`` of it, and its blocks, one list a KV-cache group, with the null block
    where a window does not reach. Held by nobody."""

    num_tokens: int
    blocks: tuple[list[Block], ...]


class KVCacheManager:
    """Block tables of the live requests over one :class:`BlockPool`. Lengths in tokens.

    ``windows``: the reach of each KV-cache group (``KVGroup.window``). ``most_at_once``: computed in one step of one
    request at most, drafts and what is promised by steps in flight included; None = ``max_model_len``.
    """

    def __init__(
        self,
        config: CacheConfig,
        max_model_len: int,
        windows: Sequence[int | None] = (None,),
        most_at_once: int | None = None,
    ) -> None:
        if config.num_blocks is None:
            raise ValueError("num_blocks is None: the worker's memory profile must have set it")
        self.pool = BlockPool(config.num_blocks)
        self.block_size = config.block_size
        self.caching = config.enable_prefix_caching
        self.max_model_len = max_model_len
        self.most_at_once = max_model_len if most_at_once is None else most_at_once
        self.groups = tuple(GroupReach(window, config.block_size) for window in windows)
        self.num_groups = len(self.groups)
        self._slides = any(group.window is not None for group in self.groups)
        # req_id -> one table a group, in order of position.
        self.tables: dict[str, tuple[list[Block], ...]] = {}
        self._no_hit = PrefixHit(0, tuple([] for _ in self.groups))

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
        return self.blocks_at_most(num_tokens) <= self.pool.num_usable

    def blocks_at_most(self, num_tokens: int) -> int:
        """Blocks that a request of ``num_tokens`` tokens holds at once, over all groups, at most."""
        return sum(group.most_blocks(num_tokens, self.most_at_once) for group in self.groups)

    @property
    def longest_fit(self) -> int:
        """Tokens of the longest request that fits into the pool when it has it alone."""
        usable = self.pool.num_usable
        return bisect_right(range(1, usable * self.block_size + 1), usable, key=self.blocks_at_most)

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
        limit = (request.num_tokens - 1) // self.block_size
        hashes = request.update_block_hashes(self.block_size)[:limit]
        found: list[list[Block | None]] = [[] for _ in self.groups]
        # For each group, the first of the cached blocks that end here without a gap.
        starts = [0] * self.num_groups
        best = 0
        for index, block_hash in enumerate(hashes):
            gone = False
            for g, group in enumerate(self.groups):
                block = self.pool.lookup(block_key(block_hash, g))
                found[g].append(block)
                if block is None:
                    starts[g] = index + 1
                    gone = gone or group.window is None
            if gone:
                break
            end = index + 1
            if not self._slides or self._reached(starts, end):
                best = end
        return PrefixHit(best * self.block_size, tuple(map(self._hit_blocks, self.groups, found, [best] * len(found))))

    def _reached(self, starts: list[int], end: int) -> bool:
        """Whether every group has all that a query behind ``end`` blocks sees."""
        position = end * self.block_size
        return all(start <= group.first_needed(position) for start, group in zip(starts, self.groups, strict=True))

    def _hit_blocks(self, group: GroupReach, found: list[Block | None], end: int) -> list[Block]:
        first = group.first_needed(end * self.block_size)
        return [self.pool.null_block] * first + [block for block in found[first:end] if block is not None]

    def blocks_needed(
        self, request: Request, num_tokens: int, hit: PrefixHit | None = None, in_chunks: bool = False
    ) -> int:
        """Free blocks it takes to hold ``num_tokens`` of ``request``, over all groups: new ones, and those of ``hit``
        that are free now and would leave the free list. ``in_chunks``: not all at once, so that a sliding group lets go
        of blocks on the way."""
        tables = self.tables.get(request.req_id)
        have = len(tables[0]) if tables is not None else 0
        if hit is not None:
            have += len(hit.blocks[0])
        new = max(self._blocks_for(num_tokens) - have, 0)
        if in_chunks and self._slides:
            total = sum(min(new, group.most_blocks(num_tokens, self.most_at_once)) for group in self.groups)
        else:
            total = new * self.num_groups
        if hit is None:
            return total
        null = self.pool.null_block
        return total + sum(b.ref_cnt == 0 and b is not null for blocks in hit.blocks for b in blocks)

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
        pool cannot give them; what windows have left behind is let go in either case. ``reserve_full_sequence``: None
        also if all known tokens would not fit with what is free now.
        """
        if self._slides:
            self._let_go(request)
        end = request.num_computed_tokens + num_new_tokens + (hit.num_tokens if hit is not None else 0)
        slots = min(end + lookahead, self.max_model_len)
        if self.blocks_needed(request, slots, hit) > self.pool.num_free:
            return None
        if reserve_full_sequence and self.blocks_needed(request, request.num_tokens, hit, True) > self.pool.num_free:
            return None
        # From here on nothing can fail.
        tables = self.tables.get(request.req_id)
        if tables is None:
            tables = self.tables[request.req_id] = tuple([] for _ in range(self.num_groups))
        if hit is not None:
            for table, hits in zip(tables, hit.blocks, strict=True):
                self.pool.touch(self._held(hits))
                table.extend(hits)
        new_ids: BlockIds = tuple(self._grow(table, slots) for table in tables)
        request.num_slots = len(tables[0]) * self.block_size
        self.cache_blocks(request, end)
        return new_ids

    def append_blocks(self, requests: Sequence[Request]) -> list[BlockIds]:
        """:meth:`allocate_slots` for the one token behind each request's full table, in order and without lookahead,
        where the caller knows that there are blocks: one for each of them and each group."""
        count, block_ids = self.num_groups, []
        blocks = [] if self._slides else self.pool.allocate(len(requests) * count)
        for i, request in enumerate(requests):
            if self._slides:  # one by one: what a window leaves behind may go to the same request
                self._let_go(request)
                taken = self.pool.allocate(count)
            else:
                taken = blocks[i * count : (i + 1) * count]
            for table, block in zip(self.tables[request.req_id], taken, strict=True):
                table.append(block)
            request.num_slots += self.block_size
            if self.caching and request.num_tokens >= request.next_hash_at:
                self.cache_blocks(request, request.num_computed_tokens + 1)
            block_ids.append(tuple([[block.block_id] for block in taken]))
        return block_ids

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Publish the full blocks among the first ``num_tokens``, as far as the tokens in them are known."""
        if not self.caching:
            request.next_hash_at = _NEVER
            return
        num_full = min(num_tokens, request.num_tokens) // self.block_size
        tables, hashes = self.tables[request.req_id], request.block_hashes
        if len(hashes) < num_full:
            request.update_block_hashes(self.block_size)
        for group, table in enumerate(tables):
            # Published blocks are a prefix of what the window has left of the table: hits, then our own.
            first = num_full
            while first > 0 and table[first - 1].key is None and table[first - 1] is not self.pool.null_block:
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
            self.pool.free(self._held(reversed(table)))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False while any request holds blocks."""
        return self.pool.reset_cache()

    def _let_go(self, request: Request) -> None:
        """Free the blocks that no later query of ``request`` sees, and null their entries.

        The next query's position is at least computed - placeholders: of what steps in flight promised, drafts may be
        rejected. (vLLM takes computed - in flight, which keeps a prefill chunk longer.)
        """
        tables = self.tables.get(request.req_id)
        if tables is None:
            return
        null, position = self.pool.null_block, request.num_computed_tokens - request.num_output_placeholders
        for group, table in zip(self.groups, tables, strict=True):
            gone, index = [], min(group.first_needed(position), len(table))
            while index > 0 and table[index - 1] is not null:
                index -= 1
                gone.append(table[index])
                table[index] = null
            self.pool.free(gone)

    def _held(self, blocks: Iterable[Block]) -> Iterable[Block]:
        """``blocks`` without the null block, which nobody holds."""
        return (block for block in blocks if block is not self.pool.null_block) if self._slides else blocks

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _grow(self, table: list[Block], num_slots: int) -> list[int]:
        new = self.pool.allocate(max(self._blocks_for(num_slots) - len(table), 0))
        table.extend(new)
        return [block.block_id for block in new]
