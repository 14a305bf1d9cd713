"""The pool: order of reuse, reference counts, content map."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv2lab.engine.block_pool import NONE_HASH, Block, BlockPool, FreeList, block_key, hash_block


def free_ids(pool: BlockPool) -> list[int]:
    return [block.block_id for block in pool.free_list]


def held_and_published(pool: BlockPool, count: int) -> list[Block]:
    blocks = pool.allocate(count)
    for block in blocks:
        pool.publish(block, bytes([block.block_id]))
    return blocks


def test_block_0_is_never_handed_out() -> None:
    pool = BlockPool(4)
    assert [block.block_id for block in pool.allocate(3)] == [1, 2, 3]
    assert (pool.num_free, pool.usage, pool.null_block.block_id) == (0, 1.0, 0)
    with pytest.raises(RuntimeError, match="1 blocks asked, 0 free"):
        pool.allocate(1)


def test_failed_allocation_takes_nothing() -> None:
    pool = BlockPool(4)
    with pytest.raises(RuntimeError, match="4 blocks asked, 3 free"):
        pool.allocate(4)
    assert free_ids(pool) == [1, 2, 3]


def test_hashed_blocks_are_reused_last_and_unhashed_first() -> None:
    pool = BlockPool(6)
    a, b, c = pool.allocate(3)
    pool.publish(a, b"a")
    pool.publish(b, b"b")
    pool.free([c, b, a])  # a table's tail first
    assert free_ids(pool) == [3, 4, 5, 2, 1]


def test_lru_a_tail_is_evicted_before_its_prefix() -> None:
    pool = BlockPool(4)
    table = held_and_published(pool, 3)
    pool.free(reversed(table))
    pool.allocate(1)
    assert [pool.lookup(bytes([i])) is not None for i in (1, 2, 3)] == [True, True, False]


def test_touch_saves_a_free_block_and_counts_a_held_one() -> None:
    pool = BlockPool(4)
    (block,) = held_and_published(pool, 1)
    pool.free([block])
    assert free_ids(pool) == [2, 3, 1]
    pool.touch([block])
    pool.touch([block])
    assert (block.ref_cnt, free_ids(pool)) == (2, [2, 3])
    pool.free([block])
    assert (block.ref_cnt, free_ids(pool)) == (1, [2, 3])


def test_double_free_is_an_error() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.free([block])
    with pytest.raises(RuntimeError, match="block 1 is freed but nobody holds it"):
        pool.free([block])
    with pytest.raises(RuntimeError, match="block 0 is freed"):
        pool.free([pool.null_block])


def test_duplicates_keep_their_own_blocks() -> None:
    """Two requests with the same content side by side: both published, and one may go without the other."""
    pool = BlockPool(4)
    a, b = pool.allocate(2)
    pool.publish(a, b"same")
    pool.publish(b, b"same")
    assert (pool.lookup(b"same"), pool.num_cached) == (a, 2)
    pool.unpublish(a)
    assert pool.lookup(b"same") is b
    pool.unpublish(b)
    assert (pool.lookup(b"same"), pool.num_cached) == (None, 0)
    pool.unpublish(b)
    pool.publish(a, b"same")
    with pytest.raises(RuntimeError, match="published already"):
        pool.publish(a, b"other")


def test_reset_cache_only_when_nobody_holds_a_block() -> None:
    pool = BlockPool(3)
    (block,) = held_and_published(pool, 1)
    assert not pool.reset_cache()
    assert pool.num_cached == 1
    pool.free([block])
    assert pool.reset_cache()
    assert (pool.num_cached, block.key) == (0, None)


def test_free_list_refuses_to_break() -> None:
    queue, block = FreeList(), Block(1)
    with pytest.raises(RuntimeError, match="no free block"):
        queue.popleft()
    with pytest.raises(RuntimeError, match="not in the free list"):
        queue.remove(block)
    queue.append(block)
    with pytest.raises(RuntimeError, match="in the free list already"):
        queue.appendleft(block)
    assert (queue.popleft(), len(queue)) == (block, 0)


def test_hashes_name_the_whole_prefix_and_the_group() -> None:
    assert hash_block(NONE_HASH, [1, 23]) != hash_block(NONE_HASH, [12, 3])
    assert hash_block(NONE_HASH, [1]) != hash_block(hash_block(NONE_HASH, [1]), [1])
    digest = hash_block(NONE_HASH, [1, 2])
    assert len(digest) == 32
    assert digest == hashlib.sha256(bytes(32) + struct.pack("=2q", 1, 2)).digest()
    assert block_key(digest, 1) == digest + b"\0\0\0\1"


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from(["allocate", "free", "touch", "publish"]), st.integers(0, 10_000)), max_size=80)
)
def test_random_use_conserves_blocks(ops: list[tuple[str, int]]) -> None:
    """Against a model: a multiset of holders."""
    pool = BlockPool(8)
    holders: list[Block] = []
    for number, (op, pick) in enumerate(ops):
        if op == "allocate":
            count = pick % 4
            if count <= pool.num_free:
                new = pool.allocate(count)
                assert not {block.block_id for block in new} & {block.block_id for block in holders}
                assert all(block.key is None for block in new)
                holders += new
        elif op == "free" and holders:
            pool.free([holders.pop(pick % len(holders))])
        elif op == "touch" and (cached := [block for block in pool.blocks if block.key is not None]):
            block = cached[pick % len(cached)]
            pool.touch([block])
            holders.append(block)
        elif op == "publish" and holders and (block := holders[pick % len(holders)]).key is None:
            pool.publish(block, f"{number % 5}".encode())
        assert [block.ref_cnt for block in pool.blocks] == [holders.count(block) for block in pool.blocks]
        free = free_ids(pool)
        assert sorted(free) == [block.block_id for block in pool.blocks[1:] if block not in holders]
        assert len(free) == pool.num_free
        assert pool.num_cached == sum(block.key is not None for block in pool.blocks)
