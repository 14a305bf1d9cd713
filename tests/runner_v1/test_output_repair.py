"""The price of output ids on the host: where the asynchronous loop waits for them; nobody meets a placeholder."""

from __future__ import annotations

from typing import Any

import pytest

from mrv2lab.observer import EventLog
from mrv2lab.protocol import SamplingParams
from mrv2lab.runner_v1 import bookkeeping
from mrv2lab.runner_v1.model_runner import ModelRunnerV1
from tests.engine.small import VOCAB
from tests.runner_v1.small import greedy, v1
from tests.runner_v1.test_sampling_params import check_some
from tests.runner_v1.watched import watched

READERS: dict[str, dict[str, Any]] = {
    "penalty": {"presence_penalty": 1.5},
    "repetition": {"repetition_penalty": 3.0},
    "bad_words": {"bad_words": ((5, 6),)},
    "processor": {"extra_args": {"count": True}},
}


class Count:
    """Pushes token k where k tokens were generated so far, and notes what it was shown."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def make(self, params: SamplingParams) -> Any:
        return self.call if params.extra_args.get("count") else None

    def call(self, ids: Any, logits: Any) -> Any:
        self.seen.append(ids.tolist())
        logits[len(ids)] += 1000
        return logits


def run(log: EventLog | None = None, processors: Any = (), **options: Any) -> list[list[int]]:
    """Two requests of 8 tokens, the second with ``options['params']``."""
    params = SamplingParams(max_tokens=8, ignore_eos=True, **options.pop("params", {}))
    given = {"observer": log} if log is not None else {}
    with v1(logits_processors=list(processors), **given, **options) as engine:
        outputs = engine.generate([[1, 2, 3], [4, 5]], [greedy(8), params])
        return [output.token_ids for output in outputs]


@pytest.mark.parametrize("loop", ["sync", "async"])
@pytest.mark.parametrize("name", [*READERS, "top_k", "min_tokens"])
def test_the_wait_is_in_batches_that_read_output_ids_and_in_no_other(name: str, loop: str) -> None:
    """AS2's contrast: the asynchronous loop waits for the previous step in the middle of sampling."""
    others = {"top_k": {"top_k": 3, "temperature": 1.0}, "min_tokens": {"min_tokens": 4, "stop_token_ids": (3,)}}
    log = EventLog()
    params = READERS[name] if name in READERS else others[name]
    run(log, [Count()], params=params, async_scheduling=loop == "async", transfer="barrier")
    waits = [mark.name.rpartition(".")[2] for mark in log.waits()]
    # Eight steps; the first finds nothing in flight.
    expected = 7 if name in READERS and loop == "async" else 0
    assert waits.count("output_repair") == expected
    assert set(waits) - {"output_repair"} == ({"prepare_inputs", "copied"} if loop == "async" else {"copied"})


def test_the_wait_ends_with_the_request_that_needs_it() -> None:
    log = EventLog()
    with v1(observer=log) as engine:
        engine.submit([1, 2, 3], greedy(14))
        engine.submit([4, 5], SamplingParams(max_tokens=5, ignore_eos=True, presence_penalty=0.5))
        waits = []
        for _ in range(12):
            log.clear()
            engine.step()
            waits.append(sum(mark.name.endswith("output_repair") for mark in log.waits()))
    assert waits == [0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0]


def test_processors_never_see_a_placeholder() -> None:
    count = Count()
    made = run(None, [count], params=READERS["processor"])
    assert made[1] == list(range(8))
    assert count.seen == [list(range(n)) for n in range(8)]


@pytest.mark.parametrize("name", READERS)
def test_both_loops_make_the_same_tokens(name: str) -> None:
    made = [run(None, [Count()], params=READERS[name], async_scheduling=on) for on in (True, False)]
    assert made[0] == made[1]


def test_a_placeholder_that_stays_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant of vLLM #26467: they stay in the output ids, where they count as nothing."""
    monkeypatch.setattr(ModelRunnerV1, "_repair_outputs", lambda self: None)
    count = Count()
    run(None, [count], params=READERS["processor"])
    assert count.seen[2] == [VOCAB, VOCAB]
    with pytest.raises(AssertionError):
        check_some()


def test_repairs_by_row_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: the previous step's tokens taken by the present row, though rows have moved."""

    def by_row(batch: Any, sampled: Any) -> int:
        batch.prev_req_id_to_index = {
            req_id: min(batch.req_id_to_index.get(req_id, 0), len(sampled) - 1)
            for req_id in batch.prev_req_id_to_index or {}
        }
        return bookkeeping.repair_outputs(batch, sampled)

    monkeypatch.setattr("mrv2lab.runner_v1.model_runner.repair_outputs", by_row)
    with pytest.raises(AssertionError):
        check_some()


def test_penalties_after_preemption_count_prompt_and_outputs_right() -> None:
    """Resumed, its outputs are prefill: frequency counts them, not the prompt."""
    params = SamplingParams(max_tokens=20, ignore_eos=True, frequency_penalty=2.0, repetition_penalty=1.3)
    for options in ({}, {"async_scheduling": False}):
        with watched(num_blocks=60, **options) as watch:
            engine = watch.engine
            given = {engine.submit([1 + i, 2, 3], params): params for i in range(3)}
            for step in range(60):
                if step in (6, 11) and engine.scheduler.running:
                    engine.scheduler.preempt(engine.scheduler.running[0].req_id)
                engine.step()
            assert engine.scheduler.stats.num_preemptions == 2
            assert watch.check(given) == 60
