"""V1's barrier: what it protects, what is lost when a buffer is forgotten, and the other transfer policies."""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from mrv2lab.check.workloads import MODEL
from mrv2lab.engine.engine import Engine
from mrv2lab.observer import EventLog
from mrv2lab.protocol import SamplingParams
from mrv2lab.runner_v1.buffers import BUFFERS, AsyncBarrier, CpuGpuBuffer
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.runtime.transfer import POLICIES
from tests.slow import mostly_slow

SAFE = ["barrier", "pinned_copy", "uva_pool"]


# -- the context manager -----------------------------------------------------------------------------------------------


def test_a_forgotten_copy_is_queued_behind_the_record() -> None:
    rt, order = CpuRuntime(), list[str]()
    event = rt.event("prepare_inputs")
    barrier = AsyncBarrier(rt, event, ("input_ids",))
    record = event.record
    event.record = lambda stream=None: (order.append("record"), record(stream))[0]  # type: ignore[method-assign]
    with barrier:
        barrier.copy("input_ids", order.append, "input_ids")
        barrier.then(order.append, "kernel of input_ids")
        barrier.copy("query_pos", order.append, "query_pos")
        barrier.copy("input_ids", order.append, "input_ids again")
        barrier.then(order.append, "kernel of both")
    assert order == ["input_ids", "kernel of input_ids", "input_ids again", "record", "query_pos", "kernel of both"]


def test_without_an_event_there_is_no_barrier() -> None:
    rt, order, log = CpuRuntime(), list[str](), EventLog()
    rt.observer = log
    barrier = AsyncBarrier(rt, None, ())
    assert barrier.unprotected == frozenset()
    with barrier:
        barrier.copy("query_pos", order.append, "copied")
        assert order == ["copied"]
    assert not log.marks and not log.spans


def test_a_step_that_breaks_off_records_and_forgets() -> None:
    rt, order = CpuRuntime(), list[str]()
    barrier = AsyncBarrier(rt, rt.event("prepare_inputs"), ())
    with contextlib.suppress(ZeroDivisionError), barrier:
        barrier.copy("query_pos", order.append, "late")
        raise ZeroDivisionError
    with barrier:
        pass
    assert order == []


@pytest.mark.parametrize("policy", POLICIES)
def test_a_buffer_sends_its_first_elements(policy: str) -> None:
    rt = CpuRuntime()
    buffer = CpuGpuBuffer(POLICIES[policy](rt, 2), AsyncBarrier(rt, None), "query_pos", 5, torch.int64)
    for step in range(3):
        buffer.np[:] = np.arange(5) + 10 * step
        buffer.copy_to_gpu(3)
        rt.synchronize()
    assert rt.read(buffer.gpu).tolist() == [20, 21, 22, 0, 0]
    assert buffer.first(3) is buffer.first(3)
    assert rt.read(buffer.first(2)).tolist() == [20, 21]


# -- tokens ------------------------------------------------------------------------------------------------------------

SHAPE: dict[str, Any] = {
    "max_num_reqs": 6,
    "num_blocks": 200,
    "block_size": 4,
    "max_model_len": 64,
    "max_num_batched_tokens": 40,
    "long_prefill_token_threshold": 7,
}


def tokens(temperature: float, device: str = "cpu", **options: Any) -> list[list[int]]:
    """Thirty requests, one a step, in chunks and in six rows: every array changes in every step."""
    rng = np.random.default_rng(0)
    with Engine(MODEL, "v1", device, **SHAPE | options) as engine:
        for i in range(30):
            params = SamplingParams(
                max_tokens=int(rng.integers(3, 12)), ignore_eos=True, temperature=temperature * (i % 2), seed=i
            )
            engine.submit(rng.integers(0, MODEL.vocab_size, int(rng.integers(3, 14))).tolist(), params)
            engine.step()
        while engine.has_work():
            engine.step()
        return [output.token_ids for output in engine.requests.values()]


@cache
def right(temperature: float) -> list[list[int]]:
    """From a device that never trails the host."""
    return tokens(temperature, transfer="pinned_copy", lag=0)


@pytest.mark.parametrize("lag", mostly_slow([None, "threaded", 0, 1, 2], 2))
@pytest.mark.parametrize("policy", SAFE)
def test_safe_policies_give_the_right_tokens(policy: str, lag: Any) -> None:
    where = {"stream": "threaded"} if lag == "threaded" else {"lag": lag}
    assert tokens(1.0, transfer=policy, **where) == right(1.0)


HARMLESS = {"discard_request_mask"}
"""Nobody reads it: it is there for a drafter."""


@pytest.mark.parametrize("forgotten", BUFFERS)
def test_a_forgotten_buffer_gives_wrong_tokens(forgotten: str) -> None:
    """Every time, on the deferred stream: correct shapes, plausible values, no error."""
    protected = tuple(name for name in BUFFERS if name != forgotten)
    made = tokens(1.0, protected=protected)
    assert (made == right(1.0)) == (forgotten in HARMLESS)
    assert tokens(1.0, protected=protected) == made
    assert [len(one) for one in made] == [len(one) for one in right(1.0)]


@pytest.mark.parametrize("lag", [None, 1])
@pytest.mark.parametrize(
    "options", [{"transfer": "unsafe"}, {"transfer": "uva_pool", "pool_depth": 1}, {"protected": ()}], ids=str
)
def test_unsafe_settings_give_wrong_tokens(options: dict[str, Any], lag: int | None) -> None:
    made = tokens(0.0, lag=lag, **options)
    assert made != right(0.0)
    assert tokens(0.0, lag=lag, **options) == made
    assert all(0 <= token < MODEL.vocab_size for one in made for token in one)


@pytest.mark.parametrize("options", [{"transfer": "unsafe"}, {"transfer": "uva_pool", "pool_depth": 1}], ids=str)
def test_the_synchronous_loop_needs_no_protection(options: dict[str, Any]) -> None:
    """Its bookkeeping has waited for everything; vLLM makes no event there."""
    assert tokens(1.0, async_scheduling=False, **options) == tokens(1.0, async_scheduling=False, lag=0)


def test_safe_settings_pay_for_no_guard() -> None:
    """The launches that keep a race's indices inside the tables exist only where races are on purpose."""
    for options, guarded in (({}, False), ({"transfer": "unsafe"}, True), ({"transfer": "pinned_copy"}, False)):
        with Engine(MODEL, "v1", "cpu", **SHAPE | options) as engine:
            assert engine.worker.runner.inputs.exposed == guarded
            assert ("v1.bound_ids" in engine.rt._functions) == guarded


@pytest.mark.gpu
def test_a_forgotten_buffer_on_a_gpu_runs_to_the_end() -> None:
    """The window is narrow there, so the tokens may be right; what must not happen is an illegal access."""
    made = tokens(0.0, device="cuda", protected=())
    assert len(made) == 30
