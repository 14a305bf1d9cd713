"""The pool of KV-cache blocks: who holds them, which are free, and which full ones can be found again by content.

Counterpart in vLLM: ``v1/core/block_pool.py`` (BlockPool) and ``v1/core/kv_cache_utils.py`` (FreeKVCacheBlockQueue).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache

from mrv2lab.protocol import NULL_BLOCK

NONE_HASH = bytes(32)
"""The parent of a sequence's first block."""


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash of a full block: sha256 over its parent's hash and its tokens, so that it names the whole prefix.

    A cryptographic hash, because a collision would silently show one user another user's KV.
    """
    return hashlib.sha256(parent + _packer(len(token_ids))(*token_ids)).digest()


@lru_cache(maxsize=8)
def _packer(count: int) -> Callable[..., bytes]:
    """``count`` integers as int64, in half the time of an array's."""
    return struct.Struct(f"{count}q").pack


def block_key(block_hash: bytes, group: int) -> bytes:
    """Key in the pool's map: the hash and the KV-cache group (4 bytes), since groups do not share KV."""
    return block_hash + group.to_bytes(4, "big")


class Block:
    """One block: its id, how many tables hold it, its key if full and published, and its links in the free list."""

    __slots__ = ("block_id", "key", "next", "prev", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.key: bytes | None = None
        self.prev: Block | None = None
        self.next: Block | None = None

    def __repr__(self) -> str:
        key = self.key.hex()[:8] if self.key is not None else None
        return f"Block({self.block_id}, ref_cnt={self.ref_cnt}, key={key})"


class FreeList:
    """Doubly linked list through the blocks themselves, so that a prefix hit leaves the middle in O(1).

    The left end is handed out next. Raises ``RuntimeError`` when a block is linked twice or taken from an empty list.
    """

    def __init__(self) -> None:
        self._head = Block(-1)
        self._tail = Block(-1)
        self._head.next, self._tail.prev = self._tail, self._head
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Block]:
        block = self._head.next
        while block is not None and block is not self._tail:
            yield block
            block = block.next

    def _link(self, prev: Block, block: Block, following: Block) -> None:
        if block.next is not None:
            raise RuntimeError(f"block {block.block_id} is in the free list already")
        block.prev, block.next = prev, following
        prev.next = following.prev = block
        self._len += 1

    def popleft(self) -> Block:
        """Take the block that was freed longest ago (or an unhashed one)."""
        block = self._head.next
        assert block is not None
        if block is self._tail:
            raise RuntimeError("no free block")
        self._head.next = following = block.next
        assert following is not None
        following.prev = self._head
        block.prev = block.next = None
        self._len -= 1
        return block

    def remove(self, block: Block) -> None:
        """Take ``block`` from wherever it stands."""
        prev, following = block.prev, block.next
        if prev is None or following is None:
            raise RuntimeError(f"block {block.block_id} is not in the free list")
        prev.next, following.prev = following, prev
        block.prev = block.next = None
        self._len -= 1

    def append(self, block: Block) -> None:
        """Put ``block`` last in line for reuse."""
        last = self._tail.prev
        assert last is not None
        self._link(last, block, self._tail)

    def appendleft(self, block: Block) -> None:
        """Put ``block`` first in line for reuse."""
        first = self._head.next
        assert first is not None
        self._link(self._head, block, first)


class BlockPool:
    """``num_blocks`` blocks, of which block 0 is the null block: never handed out, never freed, what padding may read.

    A free block keeps its key until it is handed out again, so that freed KV can be hit: the free list is the LRU.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (block 0 is the null block), got {num_blocks}")
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.null_block = self.blocks[NULL_BLOCK]
        self.free_list = FreeList()
        for block in self.blocks[1:]:
            self.free_list.append(block)
        # key -> blocks with that content. Two requests that computed the same prefix side by side both keep their
        # blocks: a table is append-only, so its ids never change under a running request.
        self._cached: dict[bytes, dict[int, Block]] = {}

    @property
    def num_usable(self) -> int:
        """Blocks that can be handed out at all."""
        return len(self.blocks) - 1

    @property
    def num_free(self) -> int:
        """Blocks that no table holds, hashed ones included."""
        return len(self.free_list)

    @property
    def usage(self) -> float:
        """Share of the blocks held by tables, 0 to 1."""
        return 1.0 - self.num_free / self.num_usable

    @property
    def num_cached(self) -> int:
        """Blocks that a lookup can hit, held or free."""
        return sum(len(same) for same in self._cached.values())

    def allocate(self, count: int) -> list[Block]:
        """Hand out ``count`` blocks, each held once; what they cached is forgotten.

        Raises ``RuntimeError`` if fewer are free: the caller asks :attr:`num_free` first.
        """
        free_list = self.free_list
        if count > len(free_list):
            raise RuntimeError(f"{count} blocks asked, {self.num_free} free")
        taken = []
        for _ in range(count):
            block = free_list.popleft()
            if block.key is not None:
                self.unpublish(block)
            block.ref_cnt = 1
            taken.append(block)
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        """Hold each of ``blocks`` once more; a free one leaves the free list."""
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_list.remove(block)
            block.ref_cnt += 1

    def free(self, blocks: Iterable[Block]) -> None:
        """Let go of ``blocks`` once each, in the order in which they should be reused (a table's tail first).

        A block that nobody holds any more goes last in line if hashed, so that a prefix lives longest, and first in
        line if not, since nobody can hit it. Raises ``RuntimeError`` for a block that nobody holds.
        """
        unhashed = []
        for block in blocks:
            if block.ref_cnt <= 0:
                raise RuntimeError(f"block {block.block_id} is freed but nobody holds it")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                if block.key is None:
                    unhashed.append(block)
                else:
                    self.free_list.append(block)
        for block in reversed(unhashed):
            self.free_list.appendleft(block)

    def lookup(self, key: bytes) -> Block | None:
        """A block with this content, or None. Nothing is held by looking."""
        same = self._cached.get(key)
        return next(iter(same.values())) if same else None

    def publish(self, block: Block, key: bytes) -> None:
        """Let ``block`` be found by its content. Raises ``RuntimeError`` if it has other content already."""
        if block.key is not None:
            raise RuntimeError(f"block {block.block_id} is published already")
        block.key = key
        same = self._cached.get(key)
        if same is None:
            self._cached[key] = {block.block_id: block}
        else:
            same[block.block_id] = block

    def unpublish(self, block: Block) -> None:
        """Forget the content of ``block``. No effect if it has none."""
        if block.key is None:
            return
        same = self._cached[block.key]
        del same[block.block_id]
        if not same:
            del self._cached[block.key]
        block.key = None

    def reset_cache(self) -> bool:
        """Forget all content; False, and nothing done, while any table holds a block."""
        if self.num_free != self.num_usable:
            return False
        for block in self.blocks:
            self.unpublish(block)
        return True
