"""From one schedule to two messages: what V1 is told, and when it is told a request's tokens again."""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.config import CacheConfig, SchedulerConfig
from mrv2lab.engine.async_scheduler import AsyncScheduler
from mrv2lab.engine.projections import V1Projection
from mrv2lab.engine.scheduler import Scheduler
from mrv2lab.protocol import ModelRunnerOutput, SchedulerOutput, V1SchedulerOutput
from tests.engine.harness import make_request


class Loop:
    """A scheduler, V1's projection, and tokens 100, 101, ... for whoever reaches the end of its known tokens."""

    def __init__(self, **options: Any) -> None:
        asynchronous = options.pop("asynchronous", False)
        num_blocks = options.pop("num_blocks", 20)
        fixed = {"max_num_reqs": 4, "max_model_len": 32, "async_scheduling": asynchronous}
        config = SchedulerConfig(**fixed | options)
        kind = AsyncScheduler if asynchronous else Scheduler
        self.scheduler = kind(config, CacheConfig(num_blocks=num_blocks, block_size=4))
        self.project = V1Projection(self.scheduler.requests)
        self.next = 100
        self.chunks: dict[int, set[str]] = {}

    def add(self, req_id: str, prompt: int, max_tokens: int = 9) -> None:
        self.scheduler.add_request(make_request(req_id, prompt, max_tokens))

    def schedule(self) -> tuple[SchedulerOutput, V1SchedulerOutput]:
        output = self.scheduler.schedule()
        self.chunks[output.step] = {r.req_id for r in self.scheduler.running if r.is_prefill_chunk}
        return output, self.project(output)

    def settle(self, output: SchedulerOutput) -> None:
        sampled = []
        for req_id in output.num_scheduled_tokens:
            chunk = req_id in self.chunks[output.step]
            sampled.append([] if chunk else [self.next])
            self.next += not chunk
        self.scheduler.update_from_output(
            output, ModelRunnerOutput(output.step, list(output.num_scheduled_tokens), sampled)
        )

    def step(self) -> V1SchedulerOutput:
        output, message = self.schedule()
        self.settle(output)
        return message


def test_new_then_continued() -> None:
    loop = Loop()
    loop.add("a", 3)
    first, second = loop.step(), loop.step()
    assert [data.req_id for data in first.new_reqs] == ["a"]
    assert first.cached_reqs.req_ids == []
    cached = second.cached_reqs
    assert (second.new_reqs, cached.req_ids, cached.resumed_req_ids) == ([], ["a"], set())
    assert (cached.num_computed_tokens.tolist(), cached.num_output_tokens.tolist()) == ([3], [1])
    assert cached.new_block_ids == {}, "position 3 lies in the block that is there"
    assert cached.all_token_ids == {}, "it was scheduled in the previous step"
    assert loop.step().cached_reqs.new_block_ids == {"a": ([2],)}


def test_a_request_that_sat_out_a_step_is_told_its_tokens_again() -> None:
    """Its row is gone by then. Our scheduler leaves a running request out only to let it end, so it is hidden here."""
    loop = Loop()
    loop.add("a", 6)
    loop.add("b", 2)
    loop.step()
    hidden = loop.scheduler.running.pop()
    message = loop.step()
    assert (message.cached_reqs.req_ids, message.cached_reqs.all_token_ids) == (["a"], {})
    loop.scheduler.running.append(hidden)
    cached = loop.step().cached_reqs
    assert (cached.req_ids, cached.resumed_req_ids) == (["a", "b"], set())
    assert cached.all_token_ids == {"b": [1, 2, 101]}
    assert cached.num_output_tokens.tolist() == [2, 1]
    assert loop.step().cached_reqs.all_token_ids == {}


def test_a_preempted_request_is_absent_and_then_resumed() -> None:
    loop = Loop()
    loop.add("a", 3)
    loop.add("b", 5)
    loop.step()
    loop.step()
    loop.scheduler.preempt("a")
    output, message = loop.schedule()
    assert output.preempted == {"a"} and [data.req_id for data in output.resumed] == ["a"]
    cached = message.cached_reqs
    assert (cached.req_ids, cached.resumed_req_ids) == (["b", "a"], {"a"})
    assert message.new_reqs == [] and message.finished_req_ids == set()
    assert cached.new_block_ids["a"] == output.resumed[0].block_ids, "the whole table"
    assert cached.all_token_ids == {"a": [1, 2, 3, 100, 102]}
    assert cached.num_output_tokens.tolist() == [2, 2]
    assert cached.num_computed_tokens.dtype == cached.num_output_tokens.dtype == np.int32
    loop.settle(output)
    assert loop.step().cached_reqs.all_token_ids == {}


def test_counts_are_optimistic_under_async_scheduling() -> None:
    """reference/v1.md 1.6: what is sent is (num_computed, num_output), placeholders counted in."""
    loop = Loop(asynchronous=True, max_num_batched_tokens=4)
    loop.add("r", 6, max_tokens=3)
    sent, flight = [], []
    for _ in range(5):
        output, message = loop.schedule()
        flight.append(output)
        cached = message.cached_reqs
        sent.append([*zip(cached.num_computed_tokens.tolist(), cached.num_output_tokens.tolist(), strict=True)])
        if len(flight) == 2:
            loop.settle(flight.pop(0))
    assert sent == [[], [(4, 0)], [(6, 1)], [(7, 2)], []]


def test_the_message_owns_its_token_lists() -> None:
    loop = Loop()
    loop.add("a", 3)
    loop.step()
    loop.scheduler.preempt("a")
    message = loop.step()
    loop.step()
    assert message.cached_reqs.all_token_ids == {"a": [1, 2, 3, 100]}
