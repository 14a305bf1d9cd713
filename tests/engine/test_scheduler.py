"""The synchronous scheduler, rule by rule; projections. Random schedules are in test_schedule_properties.py."""

from __future__ import annotations

import numpy as np
import pytest

from mrv2lab.config import CacheConfig, SchedulerConfig, SpecConfig
from mrv2lab.engine.kv_manager import KVCacheManager
from mrv2lab.engine.projections import project_mrv2
from mrv2lab.engine.records import Decision, RequestUpdate
from mrv2lab.engine.request import RequestStatus
from mrv2lab.engine.scheduler import Scheduler
from mrv2lab.protocol import ModelRunnerOutput, SchedulerOutput
from tests.engine.harness import Loop, expected_output, make_request, statuses


def make_scheduler(
    blocks: int = 33, block_size: int = 4, num_spec: int = 0, caching: bool = True, **settings: object
) -> Scheduler:
    values = {"max_num_reqs": 8, "max_num_batched_tokens": 16, "max_model_len": 64, "async_scheduling": False}
    config = SchedulerConfig(**{**values, **settings})  # type: ignore[arg-type]
    return Scheduler(config, CacheConfig(blocks, block_size, caching), SpecConfig(num_spec))


def settle(scheduler: Scheduler, output: SchedulerOutput, tokens: dict[str, list[int]]) -> list[RequestUpdate]:
    """Process ``output``; requests that are not in ``tokens`` sampled nothing."""
    req_ids = sorted(output.num_scheduled_tokens)
    result = ModelRunnerOutput(output.step, req_ids, [tokens.get(r, []) for r in req_ids])
    return scheduler.update_from_output(output, result)


def test_prefill_in_chunks_beside_a_decode() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6)
    scheduler.add_request(make_request("a", 4, 3))
    scheduler.add_request(make_request("b", [9] * 9, 2))
    first = scheduler.schedule()
    assert first.num_scheduled_tokens == {"a": 4, "b": 2}
    assert [(d.req_id, d.prompt_len, d.num_computed_tokens, d.block_ids) for d in first.new] == [
        ("a", 4, 0, ([1],)),
        ("b", 9, 0, ([2],)),
    ]
    assert scheduler.decisions == [Decision("budget", "b", 9, 2)]
    assert settle(scheduler, first, {"a": [7]}) == [("a", [7], None)]

    second = scheduler.schedule()
    assert second.num_scheduled_tokens == {"a": 1, "b": 5}
    assert second.continued.req_ids == ["a", "b"]
    assert second.continued.num_computed_tokens.tolist() == [4, 2]
    assert second.continued.num_output_tokens.tolist() == [1, 0]
    assert second.continued.num_computed_tokens.dtype == second.continued.num_output_tokens.dtype == np.int32
    assert second.continued.new_block_ids == {"a": ([3],), "b": ([4],)}
    settle(scheduler, second, {"a": [8]})

    third = scheduler.schedule()
    assert third.num_scheduled_tokens == {"a": 1, "b": 2}
    assert third.continued.new_block_ids == {"b": ([5],)}
    assert settle(scheduler, third, {"a": [9], "b": [1]}) == [("a", [9], "length"), ("b", [1], None)]

    fourth = scheduler.schedule()
    assert (fourth.finished, fourth.num_scheduled_tokens) == ({"a"}, {"b": 1})
    assert settle(scheduler, fourth, {"b": [2]}) == [("b", [2], "length")]
    assert (scheduler.has_unfinished(), scheduler.has_work()) == (False, True)
    last = scheduler.schedule()
    assert (last.finished, last.total_num_scheduled_tokens) == ({"b"}, 0)
    assert settle(scheduler, last, {}) == []
    assert not scheduler.has_work()
    assert scheduler.kv.num_free_blocks == 32


def test_budget_leaves_later_requests_unscheduled() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=2)
    for name in "abc":
        scheduler.add_request(make_request(name, 1, 4))
    settle(scheduler, scheduler.schedule(), {"a": [1], "b": [1]})
    output = scheduler.schedule()
    assert (output.num_scheduled_tokens, output.unscheduled) == ({"a": 1, "b": 1}, set())
    scheduler.running.append(scheduler.running.pop(0))
    settle(scheduler, output, {"a": [1], "b": [1]})
    scheduler.config = SchedulerConfig(8, 1, 64, async_scheduling=False)
    output = scheduler.schedule()
    assert (output.num_scheduled_tokens, output.unscheduled) == ({"b": 1}, {"a"})


def test_long_prefills_are_capped_only_beside_another_request() -> None:
    scheduler = make_scheduler(long_prefill_token_threshold=4)
    scheduler.add_request(make_request("a", 20, 2))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 16}
    scheduler.add_request(make_request("b", [5] * 20, 2))
    settle(scheduler, output, {})
    assert scheduler.schedule().num_scheduled_tokens == {"a": 4, "b": 4}


def test_at_most_max_num_reqs_run() -> None:
    scheduler = make_scheduler(max_num_reqs=2)
    for name in "abc":
        scheduler.add_request(make_request(name, 1, 1))
    output = scheduler.schedule()
    assert list(output.num_scheduled_tokens) == ["a", "b"]
    assert scheduler.decisions == [Decision("rows", "c", 1, 0)]
    settle(scheduler, output, {"a": [1], "b": [1]})
    assert list(scheduler.schedule().num_scheduled_tokens) == ["c"]


def test_prefix_hit_in_the_same_step_and_after_the_end() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 9, 1))
    scheduler.add_request(make_request("b", 10, 1))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 9, "b": 2}
    assert [data.block_ids for data in output.new] == [([1, 2, 3],), ([1, 2, 4],)]
    settle(scheduler, output, {"a": [1], "b": [1]})
    scheduler.add_request(make_request("c", 8, 1))
    assert scheduler.schedule().new[0].num_computed_tokens == 4
    assert scheduler.decisions == [Decision("prefix_hit", "c", 8, 4)]
    assert (scheduler.stats.prefix_queried_tokens, scheduler.stats.prefix_hit_tokens) == (27, 12)


def test_the_full_sequence_gate_holds_the_queue() -> None:
    """7 blocks: a takes 3, b's whole 20 tokens need 5; c would fit but does not overtake."""
    scheduler = make_scheduler(blocks=8)
    for request in (make_request("a", 12, 2), make_request("b", [5] * 20, 2), make_request("c", 1, 2)):
        scheduler.add_request(request)
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 12}
    assert scheduler.decisions == [Decision("full_sequence", "b", 5, 4)]
    free = make_scheduler(blocks=8, reserve_full_sequence=False)
    for request in (make_request("a", 12, 2), make_request("b", [5] * 20, 2)):
        free.add_request(request)
    assert free.schedule().num_scheduled_tokens == {"a": 12, "b": 4}


def test_fcfs_preempts_the_last_and_admits_nobody_in_that_step() -> None:
    scheduler = make_scheduler(blocks=4, caching=False)
    for name in "abc":
        scheduler.add_request(make_request(name, 4, 4))
    output = scheduler.schedule()
    scheduler.add_request(make_request("d", 1, 1))
    settle(scheduler, output, {"a": [1], "b": [2], "c": [3]})
    output = scheduler.schedule()
    # a needs a second block: c goes. b needs one too: it is the last itself.
    assert (output.num_scheduled_tokens, output.preempted) == ({"a": 1}, {"b", "c"})
    assert output.continued.new_block_ids == {"a": ([3],)}
    assert scheduler.decisions == [
        Decision("preempt", "c", 1, 0),
        Decision("preempt", "b", 1, 0),
        Decision("after_preemption", "b", 0, 1),
    ]
    assert [request.req_id for request in scheduler.waiting] == ["b", "c", "d"]
    settle(scheduler, output, {"a": [1]})
    output = scheduler.schedule()
    # b's five known tokens need two blocks, one is free; d does not overtake.
    assert (output.num_scheduled_tokens, output.preempted) == ({"a": 1}, set())
    settle(scheduler, output, {"a": [1]})
    output = scheduler.schedule()
    settle(scheduler, output, {"a": [1]})
    output = scheduler.schedule()
    assert (output.finished, output.resumed[0].req_id, output.num_scheduled_tokens) == ({"a"}, "b", {"b": 5})
    assert output.resumed[0].all_token_ids == [1, 2, 3, 4, 2]
    assert output.resumed[0].prompt_len == 4
    assert scheduler.stats.num_preemptions == 2


def test_priority_takes_the_place_of_a_victim_in_the_same_step() -> None:
    scheduler = make_scheduler(blocks=4, policy="priority")
    scheduler.add_request(make_request("low", 3, 6, priority=9))
    output = scheduler.schedule()
    scheduler.add_request(make_request("high", [7] * 8, 4, priority=1))
    settle(scheduler, output, {"low": [1]})
    output = scheduler.schedule()
    # low is scheduled first and fills (and publishes) its first block.
    assert output.num_scheduled_tokens == {"low": 1, "high": 8}
    settle(scheduler, output, {"low": [1], "high": [1]})
    output = scheduler.schedule()
    # low needs a block and is its own victim; then high gets what low held.
    assert (output.num_scheduled_tokens, output.preempted) == ({}, {"low"})
    settle(scheduler, output, {})
    assert scheduler.schedule().num_scheduled_tokens == {"high": 1}


def run_a_victim_in_the_same_step() -> Loop:
    """10 blocks of one token. low's second chunk is scheduled and its two blocks published; then high, behind it in the
    running list, needs a block, and low loses its place. high takes one of the two blocks; the other was never written.
    """
    config = SchedulerConfig(8, 4, 64, policy="priority", long_prefill_token_threshold=2, async_scheduling=False)
    loop = Loop(config, CacheConfig(11, 1))
    low = make_request("low", 10, 1, priority=9)
    loop.add(low)
    loop.step()
    loop.add(make_request("high", [11, 12], 2, priority=1))
    loop.run()
    assert [output.num_scheduled_tokens for output in loop.outputs[:4]] == [
        {"low": 4},
        {"low": 2, "high": 2},
        {"high": 1},
        {"low": 4},
    ]
    assert (loop.outputs[2].preempted, loop.outputs[2].total_num_scheduled_tokens) == ({"low"}, 1)
    assert loop.outputs[3].resumed[0].num_computed_tokens == 6
    assert loop.text["low"] == expected_output(low)
    return loop


def test_a_victim_in_the_same_step_takes_its_hashes_with_it() -> None:
    run_a_victim_in_the_same_step()


def test_a_victim_that_keeps_its_hashes_hits_blocks_that_nobody_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = KVCacheManager.free
    monkeypatch.setattr(KVCacheManager, "free", lambda self, request, num_valid_tokens=None: honest(self, request))
    with pytest.raises(AssertionError, match="low: KV of position 6 is not its own"):
        run_a_victim_in_the_same_step()


def test_abort_in_every_state() -> None:
    scheduler = make_scheduler(blocks=4, caching=False)
    for name in "abc":
        scheduler.add_request(make_request(name, 4, 4))
    assert scheduler.abort("c") == ("c", [], "abort")
    output = scheduler.schedule()
    assert output.finished == {"c"}
    settle(scheduler, output, {"a": [1], "b": [2]})
    scheduler.add_request(make_request("d", 4, 4))
    output = scheduler.schedule()
    assert statuses(scheduler) == {
        "a": RequestStatus.RUNNING,
        "b": RequestStatus.PREEMPTED,
        "d": RequestStatus.WAITING,
    }
    scheduler.abort("d")
    scheduler.abort("b")
    scheduler.abort("a")  # in flight
    assert settle(scheduler, output, {"a": [1]}) == []
    assert scheduler.stats.wasted_rows == 1
    for gone in ("a", "nobody"):
        with pytest.raises(ValueError, match=f"cannot abort '{gone}'"):
            scheduler.abort(gone)
    last = scheduler.schedule()
    assert (last.finished, last.total_num_scheduled_tokens) == ({"a", "b", "d"}, 0)
    assert scheduler.kv.num_free_blocks == 3


def test_a_running_request_without_tokens_is_named_unscheduled_not_preempted() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add_request(make_request("a", 4, 4))
    output = scheduler.schedule()
    scheduler.add_request(make_request("b", [9] * 8, 4))
    settle(scheduler, output, {"a": [1]})
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 1, "b": 3}
    scheduler.running.reverse()
    settle(scheduler, output, {"a": [1]})
    output = scheduler.schedule()
    assert (output.num_scheduled_tokens, output.unscheduled, output.preempted) == ({"b": 4}, {"a"}, set())


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        (1, 4, "request id 'a' is in use"),
        (60, 5, r"prompt of 60 \+ max_tokens 5 = 65 exceeds max_model_len 64"),
        (20, 10, "'b' may need 29 KV slots, the pool has 28"),
    ],
)
def test_requests_that_cannot_be_served(prompt: int, max_tokens: int, message: str) -> None:
    scheduler = make_scheduler(blocks=8)
    scheduler.add_request(make_request("a", 20, 9))  # exactly fits: the last token is never computed
    with pytest.raises(ValueError, match=message):
        scheduler.add_request(make_request("a" if prompt == 1 else "b", prompt, max_tokens))
    assert list(scheduler.requests) == ["a"]
    assert len(scheduler.waiting) == 1


def test_outputs_are_settled_in_order_and_complete() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 4, 4))
    output = scheduler.schedule()
    with pytest.raises(ValueError, match="oldest in flight is step 0, got schedule 0 with output 1"):
        scheduler.update_from_output(output, ModelRunnerOutput(1, ["a"], [[1]]))
    with pytest.raises(ValueError, match=r"the runner's requests differ from the scheduled ones in \['a', 'b'\]"):
        scheduler.update_from_output(output, ModelRunnerOutput(0, ["b"], [[1]]))
    settle(scheduler, output, {"a": [1]})
    with pytest.raises(ValueError, match="oldest in flight is step none"):
        settle(scheduler, output, {"a": [1]})


def test_drafts_are_verified_rolled_back_and_trimmed_at_a_stop() -> None:
    scheduler = make_scheduler(num_spec=3)
    request = make_request("a", 4, 9, eos=True)
    scheduler.add_request(request)
    settle(scheduler, scheduler.schedule(), {"a": [5]})
    scheduler.update_draft_token_ids({"a": [6, 7, 8], "nobody": [1]})
    output = scheduler.schedule()
    assert (output.num_scheduled_tokens, output.scheduled_draft_tokens) == ({"a": 4}, {"a": [6, 7, 8]})
    assert (request.num_computed_tokens, request.spec_token_ids) == (8, [])
    assert settle(scheduler, output, {"a": [6, 9]}) == [("a", [6, 9], None)]
    assert (request.num_computed_tokens, request.num_tokens) == (6, 7)
    scheduler.update_draft_token_ids({"a": [1, 0, 2]})
    output = scheduler.schedule()
    assert settle(scheduler, output, {"a": [1, 0, 2, 3]}) == [("a", [1, 0], "stop")]
    assert request.output_token_ids == [5, 6, 9, 1, 0]
    assert (scheduler.stats.draft_tokens, scheduler.stats.accepted_draft_tokens) == (6, 4)


def test_drafts_give_way_to_the_budget() -> None:
    scheduler = make_scheduler(num_spec=3, max_num_batched_tokens=3)
    scheduler.add_request(make_request("a", 3, 9))
    settle(scheduler, scheduler.schedule(), {"a": [5]})
    scheduler.update_draft_token_ids({"a": [6, 7, 8]})
    output = scheduler.schedule()
    assert (output.num_scheduled_tokens, output.scheduled_draft_tokens) == ({"a": 3}, {"a": [6, 7]})


def test_a_mid_prefill_request_takes_no_drafts() -> None:
    scheduler = make_scheduler(num_spec=2, max_num_batched_tokens=4)
    scheduler.add_request(make_request("a", 8, 4))
    settle(scheduler, scheduler.schedule(), {})
    scheduler.update_draft_token_ids({"a": [1, 1]})
    assert scheduler.requests["a"].spec_token_ids == []


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_issue_12_the_boundary_of_a_resumed_prefill_is_prefill_len(asynchronous: bool) -> None:
    """mrv2.md 4.2 #12: prompt 3, 5 outputs, preempt, resume with chunks of 4: chunk 1 is prefill, chunk 2 samples."""
    config = SchedulerConfig(8, 4, 64, async_scheduling=asynchronous)
    loop = Loop(config, CacheConfig(33, 4, enable_prefix_caching=False))
    request = make_request("a", 3, 9)
    loop.add(request)
    while request.num_output_tokens < 5:
        loop.step()
    loop.scheduler.preempt("a")
    while loop.queue:
        loop.update()
    known = request.num_tokens
    assert known == 8 + asynchronous, "async: the stale token is appended"
    before = len(loop.outputs)
    loop.run()
    resumed = loop.outputs[before:]
    assert [output.num_scheduled_tokens["a"] for output in resumed[:3]] == [4, 4, 1]
    assert (resumed[0].preempted, resumed[0].new) == ({"a"}, [])
    assert len(resumed[0].resumed[0].all_token_ids) == known
    assert resumed[0].resumed[0].prompt_len == 3
    assert loop.text["a"] == expected_output(request)
    # Chunk 1 reaches past the prompt and still samples nothing: the text would be one token ahead.
    assert (loop.reasons["a"], len(loop.text["a"])) == ("length", 9)


def test_preempting_who_does_not_run() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 3, 9))
    with pytest.raises(ValueError, match="cannot preempt 'a': it is not running"):
        scheduler.preempt("a")


def test_projection_removes_first_then_adds() -> None:
    """Finished and submitted again, and preempted and resumed, between two schedules."""
    scheduler = make_scheduler()
    scheduler.add_request(make_request("again", 3, 1))
    scheduler.add_request(make_request("resumed", 4, 9))
    scheduler.add_request(make_request("stays", 5, 9))
    settle(scheduler, scheduler.schedule(), {"again": [1], "resumed": [1], "stays": [1]})
    scheduler.add_request(make_request("again", [9, 9], 1))
    scheduler.preempt("resumed")
    output = scheduler.schedule()
    assert (output.finished, output.preempted) == ({"again"}, {"resumed"})
    message = project_mrv2(output)
    assert [(d.req_id, d.all_token_ids) for d in message.new_reqs] == [
        ("again", [9, 9]),
        ("resumed", [1, 2, 3, 4, 1]),
    ]
    assert message.cached_reqs.req_ids == ["stays"]
    assert message.removed_req_ids == ["again", "resumed"]
    assert message.num_scheduled_tokens == {"stays": 1, "resumed": 1, "again": 2}
    assert (message.step, message.total_num_scheduled_tokens) == (1, 4)


def test_reset_prefix_cache_preempts_and_resumes_in_one_step() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 8, 9))
    settle(scheduler, scheduler.schedule(), {"a": [1]})
    assert not scheduler.reset_prefix_cache()
    assert scheduler.reset_prefix_cache(preempt_running=True)
    output = scheduler.schedule()
    assert (output.preempted, [d.num_computed_tokens for d in output.resumed]) == ({"a"}, [0])


def test_the_output_owns_its_sets() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 1, 1))
    settle(scheduler, scheduler.schedule(), {"a": [1]})
    output = scheduler.schedule()
    scheduler.add_request(make_request("b", 1, 1))
    scheduler.abort("b")
    assert output.finished == {"a"}
