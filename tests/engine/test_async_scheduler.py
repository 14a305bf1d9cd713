"""The placeholder rules, by literal traces."""

from __future__ import annotations

import pytest

from mrv2lab.config import CacheConfig, SchedulerConfig, SpecConfig
from mrv2lab.engine.async_scheduler import AsyncScheduler
from mrv2lab.engine.records import Decision
from mrv2lab.engine.request import Request
from mrv2lab.protocol import ModelRunnerOutput, SchedulerOutput
from tests.engine.harness import Loop, expected_output, make_request


def make_scheduler(num_spec: int = 0, budget: int = 16, blocks: int = 33) -> AsyncScheduler:
    return AsyncScheduler(SchedulerConfig(8, budget, 64), CacheConfig(blocks, 4), SpecConfig(num_spec))


def settle(
    scheduler: AsyncScheduler, output: SchedulerOutput, tokens: dict[str, list[int]]
) -> list[tuple[object, ...]]:
    req_ids = list(output.num_scheduled_tokens)
    result = ModelRunnerOutput(output.step, req_ids, [tokens.get(r, []) for r in req_ids])
    return [tuple(update) for update in scheduler.update_from_output(output, result)]


def counters(request: Request) -> tuple[int, int, int]:
    return request.num_computed_tokens, request.num_output_placeholders, request.num_tokens


def sent(output: SchedulerOutput) -> tuple[int, int]:
    return int(output.continued.num_computed_tokens[0]), int(output.continued.num_output_tokens[0])


def test_worked_trace() -> None:
    """reference/v1.md 1.6: prompt 6, chunk budget 4, max_tokens 3, depth 2, no drafts."""
    scheduler, request = make_scheduler(budget=4), make_request("a", 6, 3)
    scheduler.add_request(request)

    s0 = scheduler.schedule()
    assert (s0.num_scheduled_tokens, s0.new[0].num_computed_tokens) == ({"a": 4}, 0)
    assert counters(request) == (4, 0, 6)
    s1 = scheduler.schedule()
    assert (s1.num_scheduled_tokens, sent(s1)) == ({"a": 2}, (4, 0))
    assert counters(request) == (6, 1, 6)
    assert settle(scheduler, s0, {}) == []
    assert counters(request) == (6, 1, 6)
    s2 = scheduler.schedule()
    assert (s2.num_scheduled_tokens, sent(s2)) == ({"a": 1}, (6, 1))
    assert counters(request) == (7, 2, 6)
    assert settle(scheduler, s1, {"a": [10]}) == [("a", [10], None)]
    assert counters(request) == (7, 1, 7)
    s3 = scheduler.schedule()
    assert (s3.num_scheduled_tokens, sent(s3)) == ({"a": 1}, (7, 2))
    assert counters(request) == (8, 2, 7)
    assert settle(scheduler, s2, {"a": [11]}) == [("a", [11], None)]
    assert counters(request) == (8, 1, 8)
    s4 = scheduler.schedule()
    assert (s4.num_scheduled_tokens, s4.unscheduled) == ({}, {"a"})
    assert scheduler.decisions == [Decision("last_token", "a", 0, 0)]
    assert counters(request) == (8, 1, 8)
    assert settle(scheduler, s3, {"a": [12]}) == [("a", [12], "length")]
    assert counters(request) == (8, 0, 9)
    assert settle(scheduler, s4, {}) == []
    assert scheduler.schedule().finished == {"a"}
    assert scheduler.stats.wasted_rows == 0


def test_worked_trace_where_t1_is_eos() -> None:
    """The row of step 3 is wasted and its output ignored."""
    scheduler, request = make_scheduler(budget=4), make_request("a", 6, 3, eos=True)
    scheduler.add_request(request)
    s0, s1 = scheduler.schedule(), scheduler.schedule()
    settle(scheduler, s0, {})
    s2 = scheduler.schedule()
    settle(scheduler, s1, {"a": [10]})
    s3 = scheduler.schedule()
    assert settle(scheduler, s2, {"a": [0]}) == [("a", [0], "stop")]
    s4 = scheduler.schedule()
    assert (s4.finished, s4.num_scheduled_tokens) == ({"a"}, {})
    assert settle(scheduler, s3, {"a": [12]}) == []
    assert (request.output_token_ids, scheduler.stats.wasted_rows) == ([10, 0], 1)


def test_drafts_leave_as_many_placeholders_as_they_brought() -> None:
    scheduler, request = make_scheduler(num_spec=2), make_request("a", 4, 9)
    scheduler.add_request(request)
    s0 = scheduler.schedule()
    assert (counters(request), request.spec_token_ids) == ((4, 1, 4), [-1, -1])
    s1 = scheduler.schedule()
    assert (s1.num_scheduled_tokens, s1.scheduled_draft_tokens) == ({"a": 3}, {"a": [-1, -1]})
    assert (sent(s1), counters(request)) == ((4, 1), (7, 4, 4))
    settle(scheduler, s0, {"a": [5]})
    assert counters(request) == (7, 3, 5)
    s2 = scheduler.schedule()
    assert (sent(s2), counters(request)) == ((7, 4), (10, 6, 5))
    settle(scheduler, s1, {"a": [6, 7]})  # one of two drafts rejected
    assert counters(request) == (9, 3, 7)
    settle(scheduler, s2, {"a": [8, 9, 10]})
    assert counters(request) == (9, 0, 10)


def test_placeholder_drafts_are_one_shared_list_that_nobody_writes() -> None:
    scheduler = make_scheduler(num_spec=2)
    for name in "ab":
        scheduler.add_request(make_request(name, 4, 9))
    s0 = scheduler.schedule()
    a, b = scheduler.running
    assert a.spec_token_ids is b.spec_token_ids
    s1 = scheduler.schedule()
    settle(scheduler, s0, {"a": [1], "b": [1]})
    settle(scheduler, s1, {"a": [1], "b": [1, 1, 1]})
    assert a.spec_token_ids == b.spec_token_ids == [-1, -1]


def test_preempted_with_output_in_flight() -> None:
    """Stale tokens are appended, leave the reset counters alone, and the request waits until they have drained."""
    scheduler, request = make_scheduler(), make_request("a", 4, 9)
    scheduler.add_request(request)
    s0, s1 = scheduler.schedule(), scheduler.schedule()
    scheduler.preempt("a")
    assert (counters(request), request.num_stale_output_tokens) == ((0, 0, 4), 5)
    s2 = scheduler.schedule()
    assert (s2.preempted, s2.num_scheduled_tokens) == ({"a"}, {})
    assert scheduler.decisions == [Decision("draining", "a", 5, 0)]
    assert settle(scheduler, s0, {"a": [5]}) == [("a", [5], None)]
    assert (counters(request), request.num_stale_output_tokens) == ((0, 0, 5), 1)
    s3 = scheduler.schedule()
    assert s3.num_scheduled_tokens == {}
    assert settle(scheduler, s1, {"a": [6]}) == [("a", [6], None)]
    assert (counters(request), request.num_stale_output_tokens) == ((0, 0, 6), 0)
    s4 = scheduler.schedule()
    assert s4.resumed[0].all_token_ids == [1, 2, 3, 4, 5, 6]
    for output in (s2, s3):
        settle(scheduler, output, {})
    assert request.num_computed_tokens == 6


def test_a_stale_token_may_end_a_preempted_request() -> None:
    scheduler, request = make_scheduler(), make_request("a", 4, 9, eos=True)
    scheduler.add_request(request)
    s0, s1 = scheduler.schedule(), scheduler.schedule()
    scheduler.preempt("a")
    assert settle(scheduler, s0, {"a": [0]}) == [("a", [0], "stop")]
    assert len(scheduler.waiting) == 0
    assert settle(scheduler, s1, {"a": [3]}) == []
    last = scheduler.schedule()
    assert (last.preempted, last.finished, last.num_scheduled_tokens) == ({"a"}, {"a"}, {})


def test_an_id_submitted_again_while_its_first_life_is_in_flight() -> None:
    scheduler, first, second = make_scheduler(), make_request("a", 4, 9), make_request("a", [7] * 6, 9)
    scheduler.add_request(first)
    s0, s1 = scheduler.schedule(), scheduler.schedule()
    scheduler.abort("a")
    scheduler.add_request(second)
    s2 = scheduler.schedule()
    assert (s2.finished, [d.all_token_ids for d in s2.new]) == ({"a"}, [[7] * 6])
    assert settle(scheduler, s0, {"a": [1]}) == settle(scheduler, s1, {"a": [2]}) == []
    assert (first.output_token_ids, second.output_token_ids, scheduler.stats.wasted_rows) == ([], [], 2)
    assert settle(scheduler, s2, {"a": [3]}) == [("a", [3], None)]


def test_a_block_is_published_once_its_tokens_are_known() -> None:
    scheduler, request = make_scheduler(), make_request("a", 7, 9)
    scheduler.add_request(request)
    s0, s1 = scheduler.schedule(), scheduler.schedule()
    assert (request.num_computed_tokens, scheduler.kv.pool.num_cached) == (8, 1)
    settle(scheduler, s0, {"a": [5]})
    assert scheduler.kv.pool.num_cached == 1, "known, but the step that computes it is in flight"
    settle(scheduler, s1, {"a": [6]})
    assert scheduler.kv.pool.num_cached == 2


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_a_length_stop_wastes_no_row(max_tokens: int) -> None:
    loop = Loop(SchedulerConfig(8, 16, 64), CacheConfig(33, 4))
    requests = [make_request(name, 4, max_tokens) for name in "abc"]
    for request in requests:
        loop.add(request)
    loop.run()
    assert [loop.text[r.req_id] for r in requests] == [expected_output(r) for r in requests]
    assert loop.scheduler.stats.wasted_rows == 0


@pytest.mark.parametrize("num_spec", [0, 2])
def test_a_sequence_may_fill_max_model_len(num_spec: int) -> None:
    loop = Loop(SchedulerConfig(8, 16, 16), CacheConfig(33, 4), num_spec)
    request = make_request("a", 4, 12)
    loop.add(request)
    loop.run()
    assert (loop.text["a"], request.num_tokens) == (expected_output(request), 16)
