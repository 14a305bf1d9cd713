"""What an engine keeps, gives back and refuses over its life: request ids, threads, its own end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mrv2lab.config import RunnerConfig
from mrv2lab.engine.engine import Engine
from mrv2lab.engine.options import SMALL_MODEL, threads_for
from tests.engine.small import sampled, small_engine


def test_the_id_of_a_finished_request_may_be_used_again() -> None:
    """Re-running a notebook's cell submits the same ids: the new request replaces the finished one's output."""
    with small_engine(keep_finished=2) as engine:
        want = engine.generate([[1, 2, 3]], sampled(4, seed=5))[0].token_ids
        for _ in range(5):
            engine.submit([1, 2, 3], sampled(4, seed=5), request_id="again")
            while not engine.output("again").finished:
                engine.step()
            assert engine.output("again").token_ids == want
        assert list(engine.output_processor._finished).count("again") == 1
        engine.generate([[4], [5]], sampled(2))
        assert "again" not in engine.requests


def test_an_aborted_id_used_again_while_its_step_is_in_flight() -> None:
    """Tokens of the first life that come back later belong to nobody."""
    with small_engine() as engine:
        want = engine.generate([[9, 8, 7]], sampled(6, seed=3))[0].token_ids
        engine.submit([1, 2, 3], sampled(20, seed=1), request_id="x")
        for _ in range(3):
            engine.step()
        engine.abort("x")
        engine.submit([9, 8, 7], sampled(6, seed=3), request_id="x")
        while not engine.output("x").finished:
            engine.step()
        assert engine.output("x").token_ids == want


def test_an_unfinished_id_is_refused() -> None:
    with small_engine() as engine:
        engine.submit([1], sampled(), request_id="a")
        with pytest.raises(ValueError, match="'a' is in use; give another one, or none, or abort it first"):
            engine.submit([2], sampled(), request_id="a")


@pytest.mark.parametrize("call", ["submit", "step", "generate", "rows", "reset", "abort"])
def test_a_closed_engine_says_so(call: str) -> None:
    with small_engine() as engine:
        engine.submit([1], sampled(), request_id="a")
    arguments: dict[str, list[Any]] = {"submit": [[1]], "generate": [[[1]]], "abort": ["a"]}
    with pytest.raises(RuntimeError, match="closed; make a new one"):
        getattr(engine, call)(*arguments.get(call, []))
    engine.close()


def test_closing_inside_a_stream_is_quiet() -> None:
    with Engine("tiny", device="cpu", num_blocks=16) as engine:
        pieces = engine.stream("Once upon a time", sampled(8))
        next(pieces)
        engine.close()
        pieces.close()


@pytest.mark.parametrize(("asked", "size", "want"), [(None, 10, 1), (None, SMALL_MODEL, None), (3, 10, 3)])
def test_threads(asked: int | None, size: int, want: int | None) -> None:
    assert threads_for(RunnerConfig(threads=asked), {"w": torch.empty(size, device="meta")}) == want


@pytest.mark.parametrize("stream", ["deferred", "threaded"])
def test_queued_work_has_its_own_number_of_threads(stream: str) -> None:
    """And the caller's stays what it was."""
    before = torch.get_num_threads()
    seen: list[int] = []
    try:
        torch.set_num_threads(2)
        for threads in (None, 3):
            with small_engine(stream=stream, threads=threads) as engine:
                engine.rt.register("look", lambda: seen.append(torch.get_num_threads()))
                engine.rt.run("look")
                engine.rt.synchronize()
            assert torch.get_num_threads() == 2
        assert seen == [1, 3]
    finally:
        torch.set_num_threads(before)


def test_bad_threads() -> None:
    with pytest.raises(ValueError, match=r"RunnerConfig.threads must be a positive integer, got 0"):
        small_engine(threads=0)
