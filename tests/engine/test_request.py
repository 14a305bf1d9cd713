"""A request's counters, stops and hashes; the queues it waits in."""

from __future__ import annotations

import pytest

from mrv2lab.engine.block_pool import NONE_HASH, hash_block
from mrv2lab.engine.request import FINISHED, Request, RequestStatus
from mrv2lab.engine.request_queue import FCFSQueue, PriorityQueue, make_queue
from mrv2lab.protocol import SamplingParams
from tests.engine.harness import make_request


def test_statuses_are_ordered() -> None:
    order = [RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.PREEMPTED, *FINISHED.values()]
    assert order == sorted(order)
    assert [status.finished for status in order] == [False] * 3 + [True] * 4


@pytest.mark.parametrize(
    ("prompt", "message"), [([], "the prompt is empty"), ([3, -1], "token id -1 in the prompt is negative")]
)
def test_bad_prompts(prompt: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Request("r", prompt)


def test_seed_from_the_user_goes_before_the_drawn_one() -> None:
    drawn, given = Request("a", [1], seed=7), Request("b", [1], SamplingParams(seed=5), seed=7)
    assert (drawn.seed, drawn.seed_given) == (7, False)
    assert (given.seed, given.seed_given) == (5, True)


@pytest.mark.parametrize(
    ("params", "tokens", "reasons"),
    [
        (SamplingParams(max_tokens=3), [5, 6, 7], [None, None, "length"]),
        (SamplingParams(max_tokens=3), [5, 2], [None, "stop"]),
        (SamplingParams(max_tokens=1), [2], ["stop"]),
        (SamplingParams(max_tokens=3, ignore_eos=True), [2, 2, 2], [None, None, "length"]),
        (SamplingParams(max_tokens=3, ignore_eos=True, stop_token_ids=(6,)), [2, 6], [None, "stop"]),
    ],
    ids=["length", "eos", "eos_wins_over_length", "ignore_eos", "stop_token"],
)
def test_stops(params: SamplingParams, tokens: list[int], reasons: list[str | None]) -> None:
    request = Request("r", [1, 1], params, eos_token_ids=(2,))
    assert [request.append_output(token) for token in tokens] == reasons
    assert (request.prompt_token_ids, request.output_token_ids) == ([1, 1], tokens)


def test_preemption_resets_the_counters_and_keeps_the_tokens() -> None:
    request = make_request("r", 3, 4)
    request.append_output(9)
    request.status = RequestStatus.RUNNING
    request.num_computed_tokens, request.num_in_flight_tokens, request.num_output_placeholders = 5, 1, 1
    request.spec_token_ids = [-1, -1]
    request.preempted()
    assert request.status is RequestStatus.PREEMPTED
    assert (request.num_computed_tokens, request.num_output_placeholders, request.spec_token_ids) == (0, 0, [])
    assert (request.num_stale_output_tokens, request.num_in_flight_tokens) == (1, 1)
    assert request.all_token_ids == [1, 2, 3, 9]
    assert request.num_preemptions == 1


def test_hashes_are_chained_incremental_and_of_full_blocks_of_known_tokens() -> None:
    request = make_request("r", [5, 6, 7, 5, 6], 4)
    request.spec_token_ids = [-1, -1, -1]
    first = hash_block(NONE_HASH, [5, 6])
    second = hash_block(first, [7, 5])
    assert request.update_block_hashes(2) == [first, second]
    request.append_output(6)
    # The same tokens as an earlier block, but another prefix.
    assert request.update_block_hashes(2) == [first, second, hash_block(second, [6, 6])]
    assert hash_block(first, [5, 6]) != first
    assert request.update_block_hashes(2) is request.block_hashes


def test_fcfs_puts_who_comes_back_first() -> None:
    queue, (a, b, c) = FCFSQueue(), [make_request(name, 1) for name in "abc"]
    queue.add(a)
    queue.add(b)
    queue.requeue(c)
    assert list(queue) == [c, a, b]
    queue.remove(a)
    assert (queue.peek(), queue.pop(), queue.pop(), len(queue)) == (c, c, b, 0)


def test_priority_goes_by_priority_then_arrival_then_order() -> None:
    queue = make_queue("priority")
    assert isinstance(queue, PriorityQueue)
    requests = [
        make_request("late", 1, priority=1, arrival_time=5.0),
        make_request("tie", 1, priority=1, arrival_time=1.0),
        make_request("first", 1, priority=1, arrival_time=1.0),
        make_request("urgent", 1, priority=-1, arrival_time=9.0),
    ]
    for request, order in zip(requests, [0, 2, 1, 3], strict=True):
        request.arrival_order = order
        queue.add(request)
    late, tie, first, urgent = requests
    assert list(queue) == [urgent, first, tie, late]
    queue.remove(first)
    assert [queue.pop() for _ in range(3)] == [urgent, tie, late]


def test_removing_who_is_not_there() -> None:
    for queue in (FCFSQueue(), PriorityQueue()):
        with pytest.raises(ValueError, match="not in"):
            queue.remove(make_request("r", 1))
