"""Lookup, allocation, publication and release."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mrv2lab.config import CacheConfig
from mrv2lab.engine.block_pool import BlockPool
from mrv2lab.engine.kv_manager import KVCacheManager, PrefixHit
from mrv2lab.engine.request import Request
from tests.engine.harness import make_request


def manager(num_blocks: int = 8, block_size: int = 4, groups: int = 1, caching: bool = True) -> KVCacheManager:
    return KVCacheManager(CacheConfig(num_blocks, block_size, caching), max_model_len=64, windows=(None,) * groups)


def snapshot(kv: KVCacheManager) -> object:
    tables = {r: [[block.block_id for block in table] for table in groups] for r, groups in kv.tables.items()}
    blocks = [(block.ref_cnt, block.key) for block in kv.pool.blocks]
    return tables, blocks, [block.block_id for block in kv.pool.free_list]


def admit(kv: KVCacheManager, request: Request) -> PrefixHit:
    """Look up, allocate and count all tokens of ``request``."""
    hit = kv.get_computed_blocks(request)
    assert kv.allocate_slots(request, request.num_tokens - hit.num_tokens, hit=hit) is not None
    request.num_computed_tokens = request.num_tokens
    return hit


def test_allocate_then_grow_then_free() -> None:
    kv, request = manager(), make_request("a", 6)
    assert kv.block_ids(request) == ([],)
    assert kv.allocate_slots(request, 6) == ([1, 2],)
    request.num_computed_tokens = 6
    assert kv.allocate_slots(request, 2) == ([],)
    request.num_computed_tokens = 8
    assert kv.allocate_slots(request, 1) == ([3],)
    assert kv.block_ids(request) == ([1, 2, 3],)
    assert request.num_slots == 12
    assert kv.usage == pytest.approx(3 / 7)
    kv.free(request)
    kv.free(request)
    assert (kv.num_free_blocks, kv.tables, request.num_slots) == (7, {}, 0)


def test_lookahead_takes_slots_but_never_past_max_model_len() -> None:
    kv, request = manager(num_blocks=32), make_request("a", 63, 1)
    assert kv.allocate_slots(request, 8, lookahead=3) == ([1, 2, 3],)
    request.num_computed_tokens = 8
    new = kv.allocate_slots(request, 55, lookahead=9)
    assert new is not None
    assert request.num_slots == 64


def test_can_ever_fit() -> None:
    assert manager().can_ever_fit(28)
    assert not manager().can_ever_fit(29)
    assert not manager(groups=2).can_ever_fit(16)


def check_hit_leaves_one_token(kv: KVCacheManager) -> None:
    admit(kv, make_request("a", 8))
    hit = kv.get_computed_blocks(make_request("b", 8))
    assert hit.num_tokens == 4, "one token must be computed, so the last full block is no hit"
    assert kv.get_computed_blocks(make_request("c", 9)).num_tokens == 8


def check_failure_has_no_side_effects(kv: KVCacheManager) -> None:
    first = make_request("a", 8)
    admit(kv, first)
    kv.free(first)
    admit(kv, make_request("b", [90] * 16))
    # Its two hits are free blocks: it would take 2 hits + 2 new of 3 free ones.
    request = make_request("c", 13)
    hit = kv.get_computed_blocks(request)
    assert (hit.num_tokens, kv.num_free_blocks, kv.blocks_needed(request, 13, hit)) == (8, 3, 4)
    before = snapshot(kv)
    assert kv.allocate_slots(request, 5, hit=hit) is None
    assert snapshot(kv) == before


def check_prefix_outlives_its_tail(kv: KVCacheManager) -> None:
    request = make_request("a", 28)
    admit(kv, request)
    kv.free(request)
    other = make_request("b", [90] * 4)
    admit(kv, other)
    assert kv.get_computed_blocks(make_request("c", 29)).num_tokens == 24


def check_freed_blocks_come_back(kv: KVCacheManager) -> None:
    request = make_request("a", 28)
    admit(kv, request)
    kv.free(request)
    assert kv.num_free_blocks == 7
    admit(kv, make_request("b", [90] * 28))


def check_another_prefix_is_no_hit(kv: KVCacheManager) -> None:
    admit(kv, make_request("a", [1, 1, 1, 1, 7, 7, 7, 7]))
    assert kv.get_computed_blocks(make_request("b", [2, 2, 2, 2, 7, 7, 7, 7, 1])).num_tokens == 0
    assert kv.get_computed_blocks(make_request("c", [7, 7, 7, 7, 1])).num_tokens == 0


CHECKS = [
    check_hit_leaves_one_token,
    check_failure_has_no_side_effects,
    check_prefix_outlives_its_tail,
    check_freed_blocks_come_back,
    check_another_prefix_is_no_hit,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_invariant(check: Callable[[KVCacheManager], None]) -> None:
    check(manager())


def _hit_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = KVCacheManager.get_computed_blocks

    def mutant(self: KVCacheManager, request: Request) -> PrefixHit:
        request.num_tokens += 1
        try:
            return honest(self, request)
        finally:
            request.num_tokens -= 1

    # num_tokens instead of num_tokens - 1; the extra hash cannot be there, since its block is never full.
    monkeypatch.setattr(KVCacheManager, "get_computed_blocks", mutant)


def _touch_before_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = KVCacheManager.allocate_slots

    def mutant(self, request, n, lookahead=0, hit=None, reserve_full_sequence=False):  # type: ignore[no-untyped-def]
        if hit is not None:
            self.pool.touch(block for blocks in hit.blocks for block in blocks)
        return honest(self, request, n, lookahead, hit, reserve_full_sequence)

    monkeypatch.setattr(KVCacheManager, "allocate_slots", mutant)


def _ignore_free_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = KVCacheManager.blocks_needed

    def mutant(self, request, num_tokens, hit=None):  # type: ignore[no-untyped-def]
        free_hits = sum(block.ref_cnt == 0 for blocks in hit.blocks for block in blocks) if hit else 0
        return honest(self, request, num_tokens, hit) - free_hits

    monkeypatch.setattr(KVCacheManager, "blocks_needed", mutant)


def _free_head_first(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = BlockPool.free
    monkeypatch.setattr(BlockPool, "free", lambda self, blocks: honest(self, list(blocks)[::-1]))


def _free_without_decrement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "free", lambda self, blocks: None)


def _hash_without_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrv2lab.engine.request.hash_block", lambda parent, tokens: repr(tokens).encode())


@pytest.mark.parametrize(
    ("mutate", "check"),
    [
        (_hit_everything, check_hit_leaves_one_token),
        (_touch_before_asking, check_failure_has_no_side_effects),
        (_ignore_free_hits, check_failure_has_no_side_effects),
        (_free_head_first, check_prefix_outlives_its_tail),
        (_free_without_decrement, check_freed_blocks_come_back),
        (_hash_without_parent, check_another_prefix_is_no_hit),
    ],
    ids=lambda value: value.__name__.strip("_"),
)
def test_mutant_is_caught(
    monkeypatch: pytest.MonkeyPatch,
    mutate: Callable[[pytest.MonkeyPatch], None],
    check: Callable[[KVCacheManager], None],
) -> None:
    mutate(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        check(manager())


def test_hits_are_shared_and_counted() -> None:
    kv, a, b = manager(), make_request("a", 9), make_request("b", 10)
    admit(kv, a)
    hit = admit(kv, b)
    assert hit.num_tokens == 8
    assert (kv.block_ids(a), kv.block_ids(b)) == (([1, 2, 3],), ([1, 2, 4],))
    assert [block.ref_cnt for block in kv.pool.blocks[1:5]] == [2, 2, 1, 1]
    kv.free(a)
    assert [block.ref_cnt for block in kv.pool.blocks[1:5]] == [1, 1, 0, 1]


def test_full_sequence_gate() -> None:
    kv, request = manager(), make_request("a", 32)
    assert kv.allocate_slots(request, 4, reserve_full_sequence=True) is None
    assert kv.num_free_blocks == 7
    assert kv.allocate_slots(request, 4) == ([1],)


def test_blocks_are_published_when_scheduled_but_only_known_tokens() -> None:
    kv, request = manager(), make_request("a", 7)
    kv.allocate_slots(request, 7)
    request.num_computed_tokens = 7
    assert (kv.pool.num_cached, request.next_hash_at) == (1, 8)
    # Async: position 7 is scheduled, its token is unknown.
    kv.allocate_slots(request, 1)
    request.num_computed_tokens = 8
    assert kv.pool.num_cached == 1
    request.append_output(3)
    kv.cache_blocks(request, 8)
    assert (kv.pool.num_cached, request.next_hash_at) == (2, 12)


def test_blocks_published_for_a_step_that_never_ran_are_forgotten() -> None:
    kv, request = manager(), make_request("a", 12)
    kv.allocate_slots(request, 4)
    request.num_computed_tokens = 4
    kv.allocate_slots(request, 8)
    assert kv.pool.num_cached == 3
    kv.free(request, num_valid_tokens=4)
    assert kv.get_computed_blocks(make_request("b", 12)).num_tokens == 4


def test_without_caching_nothing_is_found() -> None:
    kv = manager(caching=False)
    first = make_request("a", 9)
    admit(kv, first)
    assert kv.get_computed_blocks(make_request("b", 9)).num_tokens == 0
    assert (kv.pool.num_cached, first.block_hashes) == (0, [])
    kv.free(first)
    assert [block.block_id for block in kv.pool.free_list][:3] == [3, 2, 1]


def test_two_groups_have_tables_of_their_own() -> None:
    kv, a, b = manager(groups=2), make_request("a", 5), make_request("b", 6)
    admit(kv, a)
    assert kv.block_ids(a) == ([1, 2], [3, 4])
    hit = admit(kv, b)
    assert (hit.num_tokens, kv.block_ids(b)) == (4, ([1, 5], [3, 6]))
    # One group's block is lost: no hit at all.
    kv.free(a)
    kv.free(b)
    kv.pool.unpublish(kv.pool.blocks[3])
    assert kv.get_computed_blocks(make_request("c", 6)) == PrefixHit(0, ([], []))


def test_reset() -> None:
    kv, request = manager(), make_request("a", 8)
    admit(kv, request)
    assert not kv.reset_prefix_cache()
    kv.free(request)
    assert kv.reset_prefix_cache()
    assert kv.get_computed_blocks(make_request("b", 9)).num_tokens == 0
