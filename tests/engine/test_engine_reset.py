"""After a broken step: ``reset()`` makes the engine as good as new."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

import mrv2lab.runner.model_runner as model_runner
from mrv2lab.engine.engine import Engine
from mrv2lab.engine.scheduler import Scheduler
from mrv2lab.engine.text import TextStream
from mrv2lab.model.decoder import Decoder
from mrv2lab.protocol import SamplingParams
from mrv2lab.runner.async_output import AsyncOutput, OutputRing
from mrv2lab.runtime import DeviceError
from mrv2lab.sample.sampler import Sampler
from mrv2lab.state.block_tables import BlockTables
from mrv2lab.state.request_state import RequestState
from tests.engine.small import sampled, small_engine
from tests.slow import mostly_slow

PROMPTS = [[1, 2, 3, 4, 5], [6, 8, 9], [10, 11, 12, 13, 14, 15, 16], [20], [1, 2, 3, 4, 5]]
TRANSPORTS: list[dict[str, Any]] = [
    {},
    {"lag": 0},
    {"stream": "threaded"},
    {"transfer": "barrier"},
    {"transfer": "pinned_copy", "lag": 1},
    {"async_scheduling": False},
]


def _label(options: dict[str, Any]) -> str:
    return "-".join(map(str, options.values())) or "plain"


each_transport = pytest.mark.parametrize("options", TRANSPORTS, ids=_label)


def answers(engine: Engine) -> list[list[int]]:
    outputs = engine.generate(PROMPTS, [sampled(6, seed=i) for i in range(len(PROMPTS))])
    while engine.has_work():  # the runner hears of the last ends
        engine.step()
    assert engine.scheduler.kv.pool.num_free == engine.scheduler.kv.pool.num_usable
    assert sorted(engine.worker.runner.req_states.free_indices) == [0, 1, 2, 3]
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with small_engine() as engine:
        return answers(engine)


def begin(engine: Engine, steps: int) -> None:
    for i, prompt in enumerate(([30, 31, 32], [33] * 12, [34, 35], [1, 2, 3, 4, 5, 6], [36])):
        engine.submit(prompt, sampled(20, seed=50 + i))
    for _ in range(steps):
        engine.step()


def run_on(engine: Engine) -> None:
    for _ in range(25):
        engine.step()


def refused(engine: Engine, cause: str) -> None:
    """Until somebody resets, a step says what is the matter."""
    with pytest.raises(RuntimeError, match=rf"a step broke off with {cause}; engine.reset\(\) drops"):
        engine.step()


def _boom() -> None:
    raise ZeroDivisionError("by a test")


@each_transport
def test_a_poisoned_stream(options: dict[str, Any], expected: list[list[int]]) -> None:
    with small_engine(**options) as engine:
        answers(engine)
        begin(engine, 4)
        engine.rt.register("boom", _boom)
        engine.rt.run("boom")
        with pytest.raises(
            DeviceError, match=r"run 'boom', launched at .*test_engine_reset.py:\d+, raised ZeroDivisionE"
        ):
            run_on(engine)
        refused(engine, "DeviceError")
        engine.reset()
        assert not engine.has_work()
        assert {output.finish_reason for output in engine.requests.values()} == {"length", "abort"}
        assert answers(engine) == expected


POINTS: dict[str, tuple[Any, str]] = {
    "schedule": (Scheduler, "_update_after_schedule"),
    "add": (RequestState, "add_request"),
    "remove": (RequestState, "remove_request"),
    "staged writes": (RequestState, "apply_staged_writes"),
    "block writes": (BlockTables, "apply_staged_writes"),
    "prepare": (model_runner, "prepare_inputs"),
    "gather": (BlockTables, "gather"),
    "forward": (Decoder, "forward"),
    "logits": (Decoder, "compute_logits"),
    "sample": (Sampler, "sample"),
    "copy": (OutputRing, "send"),
    "post_update": (model_runner, "post_update"),
    "wait": (AsyncOutput, "get_output"),
    "settle": (Scheduler, "update_from_output"),
}


def interrupt(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, after: bool) -> None:
    """The next call of ``name`` raises KeyboardInterrupt, before or after it has done its work."""
    original: Callable[..., Any] = getattr(owner, name)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if after:
            original(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("when", mostly_slow(["after", "before"], 1))
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("options", mostly_slow(TRANSPORTS, 2), ids=_label)
def test_an_interrupt_in_the_middle_of_a_step(
    options: dict[str, Any], point: str, when: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_engine(**options) as engine:
        begin(engine, 3)
        engine.abort("r0")
        with monkeypatch.context() as patch:
            interrupt(patch, *POINTS[point], after=when == "after")
            with pytest.raises(KeyboardInterrupt):
                run_on(engine)
        refused(engine, "KeyboardInterrupt")
        engine.reset()
        assert answers(engine) == expected


@each_transport
def test_an_interrupt_in_queued_work(options: dict[str, Any], expected: list[list[int]]) -> None:
    """On a deferred stream the queue runs inside the host's wait, so Ctrl-C may hit a segment half done."""
    if options.get("stream") == "threaded":
        pytest.skip("the interpreter interrupts the main thread only")

    def stop() -> None:
        raise KeyboardInterrupt

    def stop_and_run_on(engine: Engine) -> None:
        engine.rt.run("stop")  # with lag 0 it runs here
        run_on(engine)

    with small_engine(**options) as engine:
        begin(engine, 3)
        engine.rt.register("stop", stop)
        with pytest.raises(KeyboardInterrupt):
            stop_and_run_on(engine)
        engine.reset()
        assert answers(engine) == expected


class _Interrupted:
    """A tokenizer's stream that Ctrl-C hits at its third token."""

    def __init__(self) -> None:
        self.left = 2

    def add(self, token_ids: Sequence[int], /) -> str:
        self.left -= len(token_ids)
        if self.left < 0:
            raise KeyboardInterrupt
        return ""

    def flush(self) -> str:
        return ""


def test_an_interrupt_while_tokens_become_text(expected: list[list[int]]) -> None:
    """The step's other requests have lost a token by then: nobody may go on as if nothing had happened."""
    with small_engine() as engine:
        begin(engine, 3)
        engine.output_processor.texts["r0"] = TextStream(_Interrupted(), SamplingParams())
        with pytest.raises(KeyboardInterrupt):
            run_on(engine)
        refused(engine, "KeyboardInterrupt")
        engine.reset()
        assert answers(engine) == expected


def test_a_broken_engine_takes_and_ends_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """And whoever was iterating over a stream sees what broke, not that its request cannot be aborted."""
    with small_engine() as engine, monkeypatch.context() as patch:
        engine.tokenizer = type("Words", (), {"stream": lambda self: _Interrupted()})()  # the text of nothing is ""
        stream = engine.stream([1, 2, 3], sampled(2))
        interrupt(patch, Scheduler, "_finish", after=True)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        for call in (lambda: engine.submit([1]), lambda: engine.abort("r0")):
            with pytest.raises(RuntimeError, match=r"engine.reset\(\) drops"):
                call()
        engine.reset()
        assert engine.output("r0").finish_reason == "abort"


@pytest.mark.parametrize("keep", [0, 3])
def test_reset_keeps_no_more_than_asked(keep: int) -> None:
    with small_engine(keep_finished=keep) as engine:
        for _ in range(4):
            begin(engine, 2)
            engine.reset()
            assert len(engine.requests) == keep


def test_reset_keeps_what_has_finished() -> None:
    with small_engine() as engine:
        (done,) = engine.generate([1, 2, 3], sampled(4))
        begin(engine, 3)
        engine.reset()
        assert engine.output(done.request_id) is done and done.finish_reason == "length"
        assert engine.output("r1").finish_reason == "abort"
        assert engine.rows().empty
        engine.reset()


def test_reset_forgets_the_prefix_cache() -> None:
    """Queued work was dropped, so nobody knows what the pool holds."""
    with small_engine() as engine:
        begin(engine, 6)
        assert engine.scheduler.kv.pool.num_cached
        engine.reset()
        assert not engine.scheduler.kv.pool.num_cached
