"""Sliding-window layers as a second KV-cache group: what is let go, what is found again, how much fits."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from mrv2lab.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mrv2lab.engine.block_pool import block_key
from mrv2lab.engine.kv_groups import GroupReach
from mrv2lab.engine.kv_layout import kv_bytes_per_block, kv_tensor_of_layer, layer_to_group, num_kv_tensors
from mrv2lab.engine.kv_manager import KVCacheManager
from mrv2lab.engine.request import Request, RequestStatus
from tests.engine.group_loop import GroupLoop, finish
from tests.engine.harness import expected_output, make_request
from tests.engine.small import MODEL
from tests.slow import mostly_slow


def manager(
    windows: tuple[int | None, ...], num_blocks: int = 64, block_size: int = 4, **options: int
) -> KVCacheManager:
    return KVCacheManager(CacheConfig(num_blocks, block_size), 512, windows, **options)


def admit(kv: KVCacheManager, request: Request, num_tokens: int | None = None) -> int:
    """Look up and compute up to ``num_tokens`` of ``request`` (all), as one step; the tokens hit."""
    hit = kv.get_computed_blocks(request)
    end = request.num_tokens if num_tokens is None else num_tokens
    assert kv.allocate_slots(request, end - hit.num_tokens, hit=hit) is not None
    request.num_computed_tokens = end
    return hit.num_tokens


# -- what a window needs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "position", "first"),
    # Golden vector A5 of reference/mrv2.md: reach 32 (a window of 33 counts the query's own token), blocks of 16.
    [
        (33, 100, 4),
        (32, 100, 4),
        (32, 95, 4),
        (33, 95, 3),
        (32, 31, 0),
        (32, 46, 0),
        (32, 47, 1),
        (1, 48, 3),
        (None, 99, 0),
    ],
)
def test_first_needed(window: int | None, position: int, first: int) -> None:
    assert GroupReach(window, 16).first_needed(position) == first


def test_most_blocks_is_the_most_over_all_positions() -> None:
    for window in (1, 2, 5, 8):
        for most in (1, 3, 4, 9):
            group = GroupReach(window, 4)
            worst = max(-(-(start + most) // 4) - group.first_needed(start) for start in range(60 - most))
            assert group.most_blocks(60, most) == worst
            assert group.most_blocks(4, most) == 1


# -- letting go --------------------------------------------------------------------------------------------------------


def check_a5(kv: KVCacheManager) -> None:
    """Position 100 is next: entries 0..3 of the sliding group are nulled and free, the full group keeps all."""
    request = make_request("a", 120)
    admit(kv, request, 100)
    before = kv.block_ids(request)
    assert [len(ids) for ids in before] == [7, 7]
    free = kv.num_free_blocks
    assert kv.allocate_slots(request, 20) is not None
    full, sliding = kv.block_ids(request)
    assert full[:7] == before[0]
    assert sliding[:7] == [0, 0, 0, 0, *before[1][4:]]
    assert kv.num_free_blocks == free - 2 + 4
    kv.free(request)
    assert kv.num_free_blocks == kv.pool.num_usable
    assert kv.pool.null_block.ref_cnt == 0


def test_golden_a5() -> None:
    check_a5(manager((None, 33), block_size=16))
    check_a5(manager((None, 32), block_size=16))


def test_drafts_in_flight_keep_what_they_may_roll_back_to() -> None:
    """16 computed, 6 of them placeholders: the next query may be at 10, which sees from 7 on with a window of 4."""
    kv, request = manager((4,)), make_request("a", 30)
    admit(kv, request, 16)
    request.num_output_placeholders = 6
    assert kv.allocate_slots(request, 4) is not None
    assert [block_id == 0 for block_id in kv.block_ids(request)[0]] == [True] + [False] * 4


def test_a_block_that_was_let_go_is_handed_out_again_last() -> None:
    """It stays in the cache, published, as long as others are free."""
    kv, a = manager((None, 4), num_blocks=16), make_request("a", 24)
    admit(kv, a, 16)
    gone = kv.block_ids(a)[1][:3]
    assert kv.allocate_slots(a, 1) is not None
    assert [block.block_id for block in kv.pool.free_list][-3:] == gone[::-1]
    assert all(kv.pool.blocks[block_id].key is not None for block_id in gone)


def test_failure_leaves_tables_that_still_serve() -> None:
    kv, a, b = manager((None, 4), num_blocks=14), make_request("a", 40), make_request("b", [9] * 8)
    admit(kv, a, 16)
    admit(kv, b, 8)
    assert kv.allocate_slots(a, 24) is None
    assert kv.block_ids(a)[1][:3] == [0, 0, 0], "these no query of it sees, whatever happens"
    assert kv.allocate_slots(a, 4) is not None
    kv.free(a)
    kv.free(b)
    assert kv.num_free_blocks == kv.pool.num_usable


# -- finding again -----------------------------------------------------------------------------------------------------


def test_a_hit_needs_only_the_window_of_a_sliding_group() -> None:
    """a computed 24 tokens in two steps; group 1 let blocks go, which are handed out again. b hits all the same."""
    kv, a = manager((None, 4), num_blocks=14), make_request("a", 24)
    admit(kv, a, 16)
    admit_more(kv, a, 8)  # needs 4 blocks of 5 free
    kv.free(a)
    for index in (0, 1):
        stale = kv.pool.lookup(_key(a, index, 1))
        assert stale is not None
        kv.pool.unpublish(stale)
    b = make_request("b", [*list(range(1, 25)), 50])
    hit = kv.get_computed_blocks(b)
    assert hit.num_tokens == 24
    assert [block.block_id == 0 for block in hit.blocks[1]] == [True] * 5 + [False]
    assert all(block.block_id for block in hit.blocks[0])
    assert kv.blocks_needed(b, 25, hit) == 2 + 7, "two new ones, six full and one sliding out of the free list"
    assert admit(kv, b) == 24
    assert kv.block_ids(b)[1][:5] == [0] * 5
    kv.free(b)
    assert kv.num_free_blocks == kv.pool.num_usable


def admit_more(kv: KVCacheManager, request: Request, n: int) -> None:
    assert kv.allocate_slots(request, n) is not None
    request.num_computed_tokens += n


def _key(request: Request, index: int, group: int) -> bytes:
    return block_key(request.update_block_hashes(4)[index], group)


def check_hit_holds_in_all_groups(kv: KVCacheManager) -> None:
    """Window 6: a query behind block 5 (position 20) sees from 15 on: blocks 3 and 4."""
    a = make_request("a", 24)
    admit(kv, a)
    kv.free(a)
    b = make_request("b", [*list(range(1, 25)), 50])
    lost = kv.pool.lookup(_key(a, 4, 1))
    assert lost is not None
    kv.pool.unpublish(lost)
    # 24 needs sliding blocks 4 and 5, 20 needs 3 and 4; 16 is the longest that holds in both groups.
    assert kv.get_computed_blocks(b).num_tokens == 16
    full = kv.pool.lookup(_key(a, 2, 0))
    assert full is not None
    kv.pool.unpublish(full)
    assert kv.get_computed_blocks(b).num_tokens == 8


def test_hit_holds_in_all_groups() -> None:
    check_hit_holds_in_all_groups(manager((None, 6)))


def test_sliding_groups_alone_hit_behind_a_gap() -> None:
    kv, a = manager((6,)), make_request("a", 24)
    admit(kv, a)
    kv.free(a)
    lost = kv.pool.lookup(_key(a, 1, 0))
    assert lost is not None
    kv.pool.unpublish(lost)
    assert kv.get_computed_blocks(make_request("b", [*list(range(1, 25)), 50])).num_tokens == 24


# -- how much fits -----------------------------------------------------------------------------------------------------


def test_can_ever_fit() -> None:
    """10 blocks of 4: a full group alone takes 40 tokens, a sliding one of window 8 goes on for ever."""
    assert manager((None,), num_blocks=11).longest_fit == 40
    assert manager((None, None), num_blocks=11).longest_fit == 20
    kv = manager((8,), num_blocks=11, most_at_once=4)
    assert kv.blocks_at_most(400) == 4
    assert kv.can_ever_fit(400)
    # 4 blocks for the window leave 6 for the full group.
    both = manager((None, 8), num_blocks=11, most_at_once=4)
    assert both.longest_fit == 24
    assert both.can_ever_fit(24) and not both.can_ever_fit(25)


def test_full_sequence_counts_what_is_held_at_once() -> None:
    """36 tokens in chunks of 4 through 6 free blocks: the window lets go on the way."""
    kv = manager((8,), num_blocks=7, most_at_once=4)
    request = make_request("a", 36)
    assert kv.allocate_slots(request, 4, reserve_full_sequence=True) is not None
    request.num_computed_tokens = 4
    while request.num_computed_tokens < 36:
        admit_more(kv, request, 4)
    full = manager((None,), num_blocks=7, most_at_once=4)
    assert full.allocate_slots(make_request("a", 36), 4, reserve_full_sequence=True) is None


# -- whole schedules ---------------------------------------------------------------------------------------------------

WINDOWS = [(None, 5), (3,), (None, 1), (9, 4)]


def run(seed: int, windows: tuple[int | None, ...], *, asynchronous: bool = True, num_spec: int = 0) -> GroupLoop:
    """Random requests through a small pool, with preemptions and aborts; every text must be its own."""
    rng = random.Random(seed)
    requests = [
        make_request(
            f"r{i}",
            [1, 2, 3, 4, 5, 6, 7, 8][: rng.randint(0, 8)] + [rng.randint(1, 15) for _ in range(rng.randint(1, 12))],
            rng.randint(1, 12),
        )
        for i in range(10)
    ]
    budget = rng.choice([3, 8, 24])
    config = SchedulerConfig(
        max_num_reqs=4,
        max_num_batched_tokens=budget,
        max_model_len=48,
        long_prefill_token_threshold=rng.choice([0, 3]),
        reserve_full_sequence=rng.random() < 0.5,
        async_scheduling=asynchronous,
    )
    block_size = rng.choice([1, 2, 4])
    longest = max(request.max_total_tokens for request in requests) + 3 * num_spec
    probe = KVCacheManager(CacheConfig(4096, block_size), 48, windows, budget + num_spec + 2 * (1 + num_spec))
    blocks = 1 + probe.blocks_at_most(min(longest, 48)) + rng.choice([0, 2, 10])
    loop = GroupLoop(config, CacheConfig(blocks, block_size), windows, num_spec)
    aborted = set()
    for request in requests:
        loop.add(request)
    for _ in range(3_000):
        if not loop.busy():
            break
        if rng.random() < 0.1 and loop.scheduler.requests:
            victim = rng.choice(list(loop.scheduler.requests.values()))
            if rng.random() < 0.3:
                loop.abort(victim.req_id)
                aborted.add(victim.req_id)
            elif victim.status is RequestStatus.RUNNING:
                loop.scheduler.preempt(victim.req_id)
        loop.step()
    else:
        raise AssertionError(f"{loop.scheduler.requests} never finished")
    for request in requests:
        full = expected_output(request)
        text = loop.text[request.req_id]
        assert text == (full[: len(text)] if request.req_id in aborted else full)
    assert loop.scheduler.kv.num_free_blocks == blocks - 1, "a block leaked"
    return loop


@pytest.mark.parametrize("seeds", mostly_slow([range(2), range(2, 40)], 1), ids=str)
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("num_spec", [0, 2])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_random_schedules(windows: tuple[int | None, ...], num_spec: int, asynchronous: bool, seeds: range) -> None:
    for seed in seeds:
        run(seed, windows, asynchronous=asynchronous, num_spec=num_spec)


def test_random_schedules_preempt_and_hit() -> None:
    """So that the above is no idle run."""
    loops = [run(seed, (None, 5)) for seed in range(6)]
    assert sum(loop.scheduler.stats.num_preemptions for loop in loops) > 3
    assert sum(loop.scheduler.stats.prefix_hit_tokens for loop in loops) > 20


def test_a_long_text_through_a_small_pool() -> None:
    """5 blocks of 4 carry 48 tokens where every layer slides."""
    config = SchedulerConfig(max_num_reqs=2, max_num_batched_tokens=4, max_model_len=48)
    request = make_request("a", 8, 40)
    loop = GroupLoop(config, CacheConfig(6, 4), (6,))
    assert finish(loop, [request])["a"] == expected_output(request)
    assert loop.scheduler.stats.num_preemptions == 0


# -- bugs that the above must catch ------------------------------------------------------------------------------------


def _mutant(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, made: object) -> None:
    monkeypatch.setattr(owner, name, made)


_honest = GroupReach.first_needed
_honest_let_go = KVCacheManager._let_go


def _one_block_more(self: GroupReach, position: int) -> int:
    return 0 if self.window is None else max(position - self.window + 1 + self.block_size, 0) // self.block_size


def _optimistic(self: KVCacheManager, request: Request) -> None:
    placeholders, request.num_output_placeholders = request.num_output_placeholders, 0
    _honest_let_go(self, request)
    request.num_output_placeholders = placeholders


def _keep_the_entry(self: KVCacheManager, request: Request) -> None:
    """Frees, but leaves the table as it is."""
    tables = self.tables.get(request.req_id)
    before = [list(table) for table in tables or ()]
    _honest_let_go(self, request)
    for table, old in zip(tables or (), before, strict=True):
        table[: len(old)] = old


def _nothing_let_go(self: KVCacheManager, request: Request) -> None:
    """Keeps everything."""


MUTANTS: dict[str, tuple[type, str, object]] = {
    "lets_go_of_a_block_too_many": (GroupReach, "first_needed", _one_block_more),
    "forgets_that_drafts_may_be_rejected": (KVCacheManager, "_let_go", _optimistic),
    "does_not_null_the_entry": (KVCacheManager, "_let_go", _keep_the_entry),
    "lets_nothing_go": (KVCacheManager, "_let_go", _nothing_let_go),
    "hit_ignores_the_windows": (KVCacheManager, "_reached", lambda self, starts, end: True),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _mutant(monkeypatch, *MUTANTS[name])
    checks: list[Callable[[], object]] = [
        lambda: check_a5(manager((None, 33), block_size=16)),
        lambda: check_hit_holds_in_all_groups(manager((None, 6))),
        test_drafts_in_flight_keep_what_they_may_roll_back_to,
        *(lambda seed=seed: run(seed, (None, 5), num_spec=2) for seed in range(4)),
    ]
    assert any(_fails(check) for check in checks)


def _fails(check: Callable[[], object]) -> bool:
    try:
        check()
    except (AssertionError, RuntimeError):
        return True
    return False


# -- layout ------------------------------------------------------------------------------------------------------------


def layers(kinds: str, window: int = 8) -> ModelConfig:
    """f = full, s = sliding."""
    names = {"f": "full_attention", "s": "sliding_attention"}
    return replace(
        MODEL,
        num_hidden_layers=len(kinds),
        sliding_window=window,
        layer_types=tuple(names[kind] for kind in kinds),  # type: ignore[misc]
    )


def test_layers_of_different_groups_share_tensors() -> None:
    model = layers("fsfs")
    assert layer_to_group(model) == (0, 1, 0, 1)
    assert kv_tensor_of_layer(model) == (0, 0, 1, 1)
    assert num_kv_tensors(model) == 2
    # 2 (key, value) x 2 tensors x 4 tokens x 1 head x 8 x 4 bytes
    assert kv_bytes_per_block(EngineConfig(model, CacheConfig(8, 4), SchedulerConfig(max_model_len=64))) == 512


def test_unequal_groups_take_the_larger_one() -> None:
    model = layers("sssf")
    assert layer_to_group(model) == (1, 1, 1, 0)
    assert kv_tensor_of_layer(model) == (0, 1, 2, 0)
    assert num_kv_tensors(model) == 3


def test_one_group_has_a_tensor_a_layer() -> None:
    for model in (layers("fff"), layers("sss"), MODEL):
        assert layer_to_group(model) == (0,) * model.num_hidden_layers
        assert kv_tensor_of_layer(model) == tuple(range(model.num_hidden_layers))
