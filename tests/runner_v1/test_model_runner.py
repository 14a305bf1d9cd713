"""The V1 runner's state on random schedules, what it writes down, and requests that come and go."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv2lab.engine.engine import Engine
from mrv2lab.observer import EventLog
from mrv2lab.protocol import SamplingParams
from mrv2lab.runner_v1 import ModelRunnerV1
from tests.engine.small import sampled, small_engine
from tests.runner.schedules import MOVES, OPTIONS, Move, drive
from tests.runner_v1.invariants import check_invariants
from tests.runner_v1.small import greedy, v1
from tests.slow import mostly_slow

# -- random schedules --------------------------------------------------------------------------------------------------

options = st.fixed_dictionaries(OPTIONS | {"reorder": st.sampled_from(["none", "decode_first", "mrv2"])})


def play(moves: list[Move], options: dict[str, Any]) -> dict[str, list[int]]:
    """Do the moves, with a check after each step, then run to the end; the greedy requests' tokens."""
    with small_engine(**options) as engine:
        plain = drive(engine, moves, check_invariants, seeded=True)
        runner = engine.worker.runner
        assert not runner.requests and not runner.input_batch.num_reqs
        engine.rt.synchronize()
        assert not runner.sampler._generators, "a generator is leaked"
        return {req_id: engine.requests[req_id].token_ids for req_id in plain}


@settings(max_examples=40, deadline=None)
@given(MOVES, options)
def test_state_on_random_schedules(moves: list[Move], options: dict[str, Any]) -> None:
    play(moves, options | {"runner": "v1"})


@pytest.mark.slow
@settings(max_examples=1200, deadline=None)
@given(MOVES, options)
def test_state_on_many_schedules(moves: list[Move], options: dict[str, Any]) -> None:
    play(moves, options | {"runner": "v1"})


# -- what is written down ----------------------------------------------------------------------------------------------


def test_the_worked_trace_of_the_asynchronous_loop() -> None:
    """reference/v1.md 1.6: prompt 6, chunks of 4, three tokens. The row's tokens, and what goes to the device."""
    prompt = [11, 12, 13, 14, 15, 16]
    log = EventLog()
    with v1(max_num_batched_tokens=4, observer=log) as engine:
        engine.submit(prompt, greedy(3), request_id="r")
        batch = engine.worker.runner.input_batch
        rows, placeholders, discarded = [], [], []
        while engine.has_work():
            log.clear()
            engine.step()
            step = engine.worker.runner.batch
            rows.append(batch.token_ids_cpu[0, : batch.num_tokens_no_spec[0]].tolist() if batch.num_reqs else None)
            placeholders.append(dict(log.gauges).get("placeholders_touched"))
            discarded.append(step.host.discarded)
    assert rows == [prompt, [*prompt, -1], [*prompt, -1, -1], [*prompt, -1, -1, -1], None, None, None]
    # Step 1 writes one, steps 2 and 3 write one and read one; then nothing is scheduled, and at last nothing launched.
    assert placeholders == [0, 1, 2, 2, 0, 0, None]
    assert discarded[:2] == [[0], []]


def test_the_synchronous_loop_writes_tokens() -> None:
    with v1(async_scheduling=False) as engine:
        engine.submit([11, 12, 13], greedy(4), request_id="r")
        for _ in range(3):
            engine.step()
        row = engine.worker.runner.input_batch.token_ids_cpu[0, :6].tolist()
        assert row == [11, 12, 13, *engine.output("r").token_ids]


def test_gauges_of_a_step_with_churn() -> None:
    log = EventLog()
    with v1(observer=log) as engine:
        for i, count in enumerate([3, 9, 9]):
            engine.submit([1 + i, 2, 3], greedy(count))
        seen = []
        for _ in range(6):
            log.clear()
            engine.step()
            seen.append({k: v for k, v in log.gauges if k in ("row_moves", "swaps", "bytes_moved")})
    nothing = {"row_moves": 0, "bytes_moved": 0, "swaps": 0}
    # Row 2 into row 0: 3 + 3 tokens, 4 scalars, 2 block ids and their count.
    moved = {"row_moves": 1, "bytes_moved": 6 * 4 + 16 + 3 * 4, "swaps": 0}
    assert seen == [nothing, nothing, nothing, moved, nothing, nothing]


def test_an_eos_in_flight_wastes_a_row() -> None:
    log = EventLog()
    with v1(observer=log) as engine:
        want = engine.generate([[1, 2, 3]], greedy(3))[0].token_ids
        log.clear()
        params = SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=(want[0],))
        engine.generate([[1, 2, 3]], params)
        while engine.has_work():
            engine.step()
    assert sum(value for name, value in log.gauges if name == "wasted_rows") == 1


# -- life --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["sync", "async"])
def test_an_aborted_id_used_again_while_its_step_is_in_flight(loop: str) -> None:
    """What the first life sampled last is on the device and is not the second one's input."""
    with v1(async_scheduling=loop == "async") as engine:
        want = engine.generate([[9, 8, 7]], sampled(6, seed=3))[0].token_ids
        engine.submit([1, 2, 3], sampled(20, seed=1), request_id="x")
        engine.submit([4, 2, 3], sampled(20, seed=2), request_id="y")
        for _ in range(3):
            engine.step()
        engine.abort("x")
        engine.submit([9, 8, 7], sampled(6, seed=3), request_id="x")
        while not engine.output("x").finished:
            engine.step()
            check_invariants(engine)
        assert engine.output("x").token_ids == want


def test_an_id_in_both_lives_would_be_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: the map from ids to last step's rows keeps those whose row is gone."""
    monkeypatch.setattr(
        ModelRunnerV1, "_evict", lambda self, req_id: self.input_batch.remove_request(req_id), raising=True
    )
    with pytest.raises(AssertionError):
        test_an_aborted_id_used_again_while_its_step_is_in_flight("async")


def test_preempted_and_resumed_in_one_schedule() -> None:
    """``reset_prefix_cache(preempt_running=True)``: to V1 the request is cached, resumed, and has a row already."""
    with v1(async_scheduling=False) as engine:
        want = engine.generate([[1, 2, 3, 4, 5, 6]], sampled(8, seed=4))[0].token_ids
        engine.submit([1, 2, 3, 4, 5, 6], sampled(8, seed=4), request_id="x")
        for _ in range(3):
            engine.step()
        engine.scheduler.reset_prefix_cache(preempt_running=True)
        engine.step()
        check_invariants(engine)
        assert [data.req_id for data in engine.core.last_schedule.resumed] == ["x"]
        while engine.has_work():
            engine.step()
        assert engine.output("x").token_ids == want


def test_seeded_requests_repeat_themselves() -> None:
    """Whatever the company, with preemptions and chunks; a request without a seed of its own does not."""
    prompts = [[1 + i, 2, 3, 4, 5 + i] for i in range(6)]

    def texts(seeded: bool, **options: Any) -> list[list[int]]:
        params = [sampled(14, seed=i if seeded else None) for i in range(6)]
        with v1(**options) as engine:
            made = [output.token_ids for output in engine.generate(prompts, params)]
            assert engine.scheduler.stats.num_preemptions or "num_blocks" not in options
            return made

    alone = texts(True, max_num_reqs=1)
    for crowd in (
        {"num_blocks": 12},
        {"num_blocks": 12, "async_scheduling": False},
        {"num_blocks": 9, "long_prefill_token_threshold": 2, "reorder": "mrv2"},
        {"long_prefill_token_threshold": 2, "reorder": "decode_first"},
        {"stream": "threaded"},
    ):
        assert texts(True, **crowd) == alone, crowd
    assert texts(False, max_num_reqs=1) != texts(False)


POINTS = {
    "update_states": "_update_states",
    "cached": "_update_cached",
    "metadata": "_attention_metadata",
    "repair": "_repair_outputs",
    "gauges": "_emit_gauges",
}


def run_on(engine: Engine) -> None:
    for _ in range(9):
        engine.step()


@pytest.mark.parametrize("when", mostly_slow(["after", "before"], 1))
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("options", [{}, {"async_scheduling": False}, {"stream": "threaded"}, {"protected": ()}])
def test_reset_after_an_interrupt(
    options: dict[str, Any], point: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = [[1, 2, 3], [4, 5]], [sampled(6, seed=1), greedy(6)]
    safe = {key: value for key, value in options.items() if key != "protected"}
    with v1(**safe) as engine:
        want = [output.token_ids for output in engine.generate(prompts, params)]
    with v1(**options) as engine:
        for i in range(4):
            engine.submit([7 + i] * 5, sampled(20, seed=i))
        for _ in range(3):
            engine.step()
        with monkeypatch.context() as patch:
            original = getattr(ModelRunnerV1, POINTS[point])

            def interrupted(*args: Any) -> Any:
                if when == "after":
                    original(*args)
                raise KeyboardInterrupt

            patch.setattr(ModelRunnerV1, POINTS[point], interrupted)
            with pytest.raises(KeyboardInterrupt):
                run_on(engine)
        engine.reset()
        assert not engine.has_work() and not engine.worker.runner.requests
        if "protected" not in options:
            assert [output.token_ids for output in engine.generate(prompts, params)] == want


# -- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["barrier", "pinned_copy", "uva_pool"])
def test_a_step_on_a_gpu_has_no_implicit_sync(policy: str) -> None:
    with v1(device="cuda", transfer=policy, num_blocks=60) as engine:
        for i in range(3):
            engine.submit([1 + i, 2, 3], SamplingParams(max_tokens=30, temperature=0.5 * i, ignore_eos=True, seed=i))
        for _ in range(8):  # kernels are compiled here
            engine.step()
        with engine.rt.watch_syncs() as seen:
            for _ in range(10):
                engine.step()
        assert seen == []


@pytest.mark.gpu
@pytest.mark.parametrize("loop", ["sync", "async"])
def test_greedy_tokens_on_a_gpu_equal_mrv2s(loop: str) -> None:
    made = []
    for options in ({"runner": "v1", "reorder": "mrv2"}, {"runner": "mrv2"}):
        with small_engine(device="cuda", async_scheduling=loop == "async", num_blocks=12, **options) as engine:
            outputs = engine.generate([[1 + i, 2, 3, 4] for i in range(9)], greedy(12))
            made.append([output.token_ids for output in outputs])
    assert made[0] == made[1]
