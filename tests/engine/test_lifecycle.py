"""Ends that come from outside the scheduler, or from the runner: nothing of the request stays behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mrv2lab.config import CacheConfig, SchedulerConfig
from mrv2lab.engine.request import RequestStatus
from tests.engine.harness import Loop, check_pool, make_request


def make_loop(depth: str, **options: int) -> Loop:
    config = SchedulerConfig(**{"max_num_reqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64} | options)
    return Loop(replace(config, async_scheduling=depth == "async"), CacheConfig(33, 4))


each_depth = pytest.mark.parametrize("depth", ["sync", "async"])


@each_depth
@pytest.mark.parametrize("state", ["waiting", "running", "preempted"])
def test_finish_in_each_state(depth: str, state: str) -> None:
    loop = make_loop(depth, max_num_reqs=1 if state == "waiting" else 4)
    other, request = make_request("other", 5, 12), make_request("x", 6, 12)
    for one in (other, request):
        loop.add(one)
    for _ in range(4):
        loop.step()
    if state == "preempted":
        loop.scheduler.preempt("x")
    assert request.status.name.lower() == state
    in_flight = len(loop.queue)
    loop.scheduler.finish("x", "stop")
    check_pool(loop.scheduler)
    assert request.status is RequestStatus.FINISHED_STOPPED
    known = list(loop.text["x"])
    loop.run()
    assert loop.text["x"] == known, "what was in flight of it is nobody's"
    assert len(loop.text["other"]) == 12
    assert loop.scheduler.stats.wasted_rows == (in_flight if state != "waiting" else 0)
    assert loop.scheduler.kv.pool.num_free == loop.scheduler.kv.pool.num_usable
    loop.scheduler.finish("x", "stop")  # no effect on one that has ended


@each_depth
def test_an_error_of_a_stale_step(depth: str) -> None:
    """The request lost its blocks while the step that failed was in flight."""
    loop = make_loop(depth)
    request = make_request("x", 6, 12)
    loop.add(request)
    loop.step()
    output = loop.scheduler.schedule()
    result = loop.runner.execute(output)
    loop.scheduler.preempt("x")
    while loop.queue:
        loop.update()
    updates = loop.scheduler.update_from_output(output, replace(result, errors={"x": "boom"}))
    assert updates == [("x", [], "error")]
    assert request.status is RequestStatus.FINISHED_ERROR
    assert not loop.scheduler.requests and not loop.scheduler.waiting and not loop.scheduler.running
    assert loop.scheduler.schedule().finished == {"x"}
