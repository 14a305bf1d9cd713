"""The engine as its user sees it."""

from __future__ import annotations

import dataclasses
import importlib.util
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mrv2lab.config import ModelConfig
from mrv2lab.engine.engine import Engine, UnknownRequest
from mrv2lab.engine.workload import Arrival, Workload, burst, steady
from mrv2lab.observer import EventLog
from mrv2lab.ops._op import TritonMissing
from mrv2lab.protocol import SamplingParams
from mrv2lab.runtime import DeviceMissing
from tests.engine.small import MODEL, VOCAB, sampled, small_engine

PROMPTS = [[1, 2, 3], [4, 5, 6, 8, 9], [10, 11], [12, 13, 14, 15, 16, 17], [20]]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# -- running -----------------------------------------------------------------------------------------------------------


def test_generate_keeps_the_order_of_the_prompts() -> None:
    with small_engine() as engine:
        together = engine.generate(PROMPTS, [sampled(2 + 3 * (i % 3), seed=i) for i in range(5)])
        assert [output.prompt_token_ids for output in together] == PROMPTS
        assert [len(output.token_ids) for output in together] == [2, 5, 8, 2, 5]
        assert {output.finish_reason for output in together} == {"length"}
        alone = [engine.generate(p, sampled(2 + 3 * (i % 3), seed=i))[0].token_ids for i, p in enumerate(PROMPTS)]
    assert [output.token_ids for output in together] == alone


def test_generate_takes_one_prompt_or_many() -> None:
    with small_engine() as engine:
        assert len(engine.generate([1, 2, 3], sampled(3))) == 1
        assert engine.generate([], sampled()) == []
        assert len(engine.generate([[1], [2]], sampled(3))) == 2
        with pytest.raises(ValueError, match="2 prompts but 1 sampling params"):
            engine.generate([[1], [2]], [sampled()])


def test_a_stop_token_ends_and_is_part_of_the_output() -> None:
    with small_engine() as engine:
        whole = engine.generate([1, 2, 3], sampled(20))[0].token_ids
        stop = whole[4]
        first = whole.index(stop)
        params = dataclasses.replace(sampled(20), stop_token_ids=(stop,))
        stopped = engine.generate([1, 2, 3], params)[0]
    assert stopped.token_ids == whole[: first + 1]
    assert stopped.finish_reason == "stop"


def test_step_returns_what_is_new() -> None:
    with small_engine(async_scheduling=False) as engine:
        name = engine.submit([1, 2, 3], sampled(3))
        seen = []
        while engine.has_work():
            for output in engine.step():
                assert output is engine.output(name)
                seen.append((list(output.new_token_ids), output.finish_reason))
    whole = engine.output(name).token_ids
    assert seen == [([whole[0]], None), ([whole[1]], None), ([whole[2]], "length")]
    assert engine.output(name).steps == 3


def test_the_first_asynchronous_step_is_still_in_flight() -> None:
    with small_engine() as engine:
        engine.submit([1, 2, 3], sampled(3))
        assert engine.step() == []
        assert [len(output.new_token_ids) for output in engine.step()] == [1]


def test_an_engine_without_work_steps_into_nothing() -> None:
    with small_engine() as engine:
        assert not engine.has_work()
        assert engine.step() == []


def test_the_engines_seed_draws_the_requests_seeds() -> None:
    def text(seed: int | None) -> list[int]:
        with small_engine(seed=seed) as engine:
            return [t for o in engine.generate(PROMPTS, sampled(12, seed=None)) for t in o.token_ids]

    assert text(1) == text(1)
    assert text(1) != text(2)
    assert text(None) != text(None)


def test_a_temperature_too_small_for_a_quotient_is_greedy() -> None:
    """1e-39 would overflow float32 and choose the lowest token with a positive logit."""
    with small_engine() as engine:
        greedy = engine.generate([5, 6], SamplingParams(max_tokens=8, ignore_eos=True))[0].token_ids
        tiny = SamplingParams(max_tokens=8, temperature=1e-39, ignore_eos=True)
        assert engine.generate([5, 6], tiny)[0].token_ids == greedy


def test_rows_show_the_live_requests() -> None:
    with small_engine() as engine:
        engine.submit([1, 2, 3], sampled(), request_id="one")
        engine.submit([4, 5], sampled(), request_id="two")
        for _ in range(4):
            engine.step()
        frame = engine.rows()
        assert list(frame.index) == [2, 3]  # the highest row goes first
        assert frame.loc[3].to_dict() | {"text": ""} == {
            "request": "one",
            "prompt_len": 3,
            "prefill_len": 3,
            "total_len": 7,
            "num_computed": 6,
            "blocks": 2,
            "last_sampled": int(str(frame.loc[3, "text"]).split()[-1]),
            "text": "",
        }
        known = [1, 2, 3, *engine.output("one").token_ids]
        assert str(frame.loc[3, "text"]).startswith(" ".join(map(str, known)))


def test_an_observer_can_come_and_go() -> None:
    with small_engine() as engine:
        log = EventLog()
        engine.observer = log
        engine.generate([1, 2], sampled(3))
        assert {span.name for span in log.spans} >= {"schedule", "forward", "wait_output", "update_from_output"}


# -- streams -----------------------------------------------------------------------------------------------------------


class _Words:
    """A tokenizer whose text is the ids."""

    vocab_size = VOCAB

    def stream(self) -> Any:
        return self

    def add(self, token_ids: list[int]) -> str:
        return "".join(f"{token} " for token in token_ids)

    def flush(self) -> str:
        return "."

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]


@pytest.fixture
def talking() -> Iterator[Engine]:
    with small_engine() as engine:
        engine.tokenizer = _Words()  # type: ignore[assignment]
        yield engine


def test_stream_gives_the_text_in_pieces(talking: Engine) -> None:
    pieces = list(talking.stream("1 2 3", sampled(5)))
    assert len(pieces) == 5
    (whole,) = talking.generate("1 2 3", sampled(5))
    assert "".join(pieces) == whole.text == "".join(f"{token} " for token in whole.token_ids) + "."


def test_leaving_a_stream_early_aborts_it_and_nobody_else(talking: Engine) -> None:
    other = talking.submit([4, 5], sampled(10, seed=3))
    stream = talking.stream("1 2 3", sampled(30))
    next(stream), next(stream)
    stream.close()
    assert talking.output("r1").finish_reason == "abort"
    assert len(talking.output("r1").token_ids) == 2
    while talking.has_work():
        talking.step()
    assert talking.generate([4, 5], sampled(10, seed=3))[0].token_ids == talking.output(other).token_ids
    assert talking.scheduler.kv.pool.num_free == 16


def test_two_streams_share_the_steps(talking: Engine) -> None:
    """Each makes steps in which the other's text comes out too; nothing is lost."""
    streams = [talking.stream("1 2 3", sampled(6, seed=1)), talking.stream("4 5", sampled(6, seed=2))]
    pieces: list[list[str]] = [[], []]
    for one, other in zip(*streams, strict=False):
        pieces[0].append(one)
        pieces[1].append(other)
    pieces[0] += streams[0]
    pieces[1] += streams[1]
    for got, prompt, seed in zip(pieces, ("1 2 3", "4 5"), (1, 2), strict=True):
        assert "".join(got) == talking.generate(prompt, sampled(6, seed=seed))[0].text


# -- workloads ---------------------------------------------------------------------------------------------------------


def test_run_reports() -> None:
    with small_engine() as engine:
        report = engine.run(burst(6, prompt_len=(2, 6), max_tokens=(3, 5), seed=2), progress=False)
        assert report.num_output_tokens == sum(len(output.token_ids) for output in report.outputs.values())
        frame = report.to_frame()
        assert list(frame.columns) == [
            "request", "prompt_tokens", "output_tokens", "steps", "finish_reason", "text",
        ]  # fmt: skip
        assert len(frame) == 6 and set(frame.finish_reason) == {"length"}
        assert repr(report).startswith("burst: 6 requests, ")
        again = engine.run(burst(6, prompt_len=(2, 6), max_tokens=(3, 5), seed=2), progress=False)
        assert [o.token_ids for o in again.outputs.values()] == [o.token_ids for o in report.outputs.values()]
        assert again.outputs.keys().isdisjoint(report.outputs)


def test_run_counts_its_own_preemptions_only() -> None:
    with small_engine(num_blocks=10, enable_prefix_caching=False) as engine:
        storm = burst(4, prompt_len=8, max_tokens=12)
        first = engine.run(storm, progress=False).stats.num_preemptions
        assert first > 0
        assert engine.run(storm, progress=False).stats.num_preemptions == first
        assert engine.run(burst(1, prompt_len=8), progress=False).stats.num_preemptions == 0


def test_run_submits_at_the_arrivals_steps() -> None:
    with small_engine() as engine:
        report = engine.run(steady(3, every=10, prompt_len=2, max_tokens=2), progress=False)
        assert [output.steps for output in report.outputs.values()] == [3, 3, 3]
        assert report.steps >= 23
        assert engine.run(Workload(()), progress=False).steps == 0


def test_run_with_a_bad_arrival_leaves_nothing_behind() -> None:
    with small_engine() as engine:
        other = engine.submit([1, 2], sampled(30))
        bad = Workload((Arrival(0, (1, 2), sampled(20)), Arrival(3, (1, VOCAB), sampled())))
        with pytest.raises(ValueError, match="token id 61 is outside the vocabulary of 61"):
            engine.run(bad, progress=False)
        assert [request.req_id for request in engine.scheduler.running] == [other]


# -- aborts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["sync", "async"])
@pytest.mark.parametrize("state", ["waiting", "prefill", "decode", "preempted"])
def test_abort_in_each_state(state: str, loop: str) -> None:
    """The others' text does not change, and nothing leaks."""
    options = {"max_num_reqs": 2, "long_prefill_token_threshold": 3, "async_scheduling": loop == "async"}
    with small_engine(**options) as engine:
        expected = [engine.generate(p, sampled(10, seed=9))[0].token_ids for p in ([1, 2], [3, 4, 5])]
    with small_engine(**options) as engine:
        keep = [engine.submit([1, 2], sampled(10, seed=9))]
        name = engine.submit(list(range(20, 40)), sampled(10))
        keep.append(engine.submit([3, 4, 5], sampled(10, seed=9)))
        if state == "waiting":
            name, keep[1] = keep[1], name
        for _ in range({"waiting": 2, "prefill": 2, "decode": 10, "preempted": 3}[state]):
            engine.step()
        request = engine.scheduler.requests[name]
        if state == "preempted":
            engine.scheduler.preempt(name)
        assert {
            "waiting": request.status.name == "WAITING",
            "prefill": request.status.name == "RUNNING" and 0 < request.num_computed_tokens < 20,
            "decode": request.status.name == "RUNNING" and request.num_output_tokens > 0,
            "preempted": request.status.name == "PREEMPTED",
        }[state]
        before = len(engine.output(name).token_ids)
        assert engine.abort(name).finish_reason == "abort"
        while engine.has_work():
            engine.step()
        assert len(engine.output(name).token_ids) == before
        assert engine.output(keep[0]).token_ids == expected[0]
        if state != "waiting":
            assert engine.output(keep[1]).token_ids == expected[1]
        assert engine.scheduler.kv.pool.num_free == 16
        assert sorted(engine.worker.runner.req_states.free_indices) == [0, 1]
        with pytest.raises(UnknownRequest, match=r"finished already \(abort\)"):
            engine.abort(name)


# -- building ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu() -> None:
    with pytest.raises(DeviceMissing, match=r"device 'cuda' was asked for, but .*; use device='cpu' or 'auto'"):
        small_engine(device="cuda")


def test_unknown_device() -> None:
    with pytest.raises(DeviceMissing, match="device 'abacus' is unknown; use 'auto', 'cpu'"):
        small_engine(device="abacus")


def test_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop does without; a GPU and the interpreter say how to get it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "triton" else find(name, *rest)
    )
    with small_engine() as engine:
        assert len(engine.generate([1, 2], sampled(2))) == 1
    with pytest.raises(TritonMissing, match="pip install triton"):
        small_engine(kernels="interpret")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(TritonMissing, match=r"device 'cuda' needs Triton: .*or use device='cpu'"):
        small_engine(device="cuda")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"num_block": 3}, TypeError, r"unknown option 'num_block'; known: .*num_blocks"),
        ({"num_blocks": 1}, ValueError, "num_blocks must be at least 2 .* got 1"),
        ({"block_size": 12}, ValueError, "block_size must be a power of two, got 12"),
        ({"max_num_reqs": 0}, ValueError, "max_num_reqs must be a positive integer, got 0"),
        ({"max_model_len": 65}, ValueError, "max_model_len 65 exceeds .* 64"),
        ({"transfer": "magic"}, ValueError, "transfer must be one of .* got 'magic'"),
        ({"stream": "lazy"}, ValueError, "stream must be one of .* got 'lazy'"),
        ({"lag": -1}, ValueError, "lag is counted in steps and must be >= 0 or None, got -1"),
        ({"lag": "1"}, ValueError, "lag is counted in steps and must be >= 0 or None, got '1'"),
        ({"long_prefill_token_threshold": 1.5}, ValueError, "threshold must be an integer >= 0 .* got 1.5"),
        ({"dtype": "double"}, ValueError, "dtype must be one of .*'bfloat16'.*, got 'double'"),
        ({"keep_finished": -1}, ValueError, "keep_finished must be an integer >= 0, got -1"),
        ({"device": None}, DeviceMissing, "device None is unknown; use 'auto', 'cpu', 'cuda' or 'cuda:N'"),
        ({"policy": "lottery"}, ValueError, r"policy must be one of \('fcfs', 'priority'\), got 'lottery'"),
        ({"runner": "v0"}, ValueError, "runner must be one of .* got 'v0'"),
        ({"kernels": "triton"}, ValueError, "kernels='triton' needs a GPU"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        small_engine(**options)


def test_a_construction_that_fails_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(ValueError, match="max_model_len 65 exceeds"):
        small_engine(max_model_len=65, stream="threaded")
    assert threading.active_count() == before


def test_the_models_length_is_the_default_limit() -> None:
    with Engine(MODEL, device="cpu", max_num_reqs=2) as engine:
        assert engine.config.scheduler.max_model_len == 64
    with pytest.raises(ValueError, match="no multiple of"):
        ModelConfig(**dataclasses.asdict(MODEL) | {"num_attention_heads": 3, "num_key_value_heads": 2})
