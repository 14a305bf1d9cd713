"""A turn (``engine/worker.py``): what is entered is left, in the thread that entered it, whatever happens inside."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch

from mrv2lab.engine.worker import Turn
from mrv2lab.runtime.base import Runtime
from tests.engine.small import sampled, small_engine


class Streams:
    """A runtime of which a turn enters the streams; ``raises``: while they are entered or left."""

    def __init__(self, raises: str = "") -> None:
        self.raises = raises
        self.entered = 0
        self.left = 0

    @contextmanager
    def active(self) -> Iterator[None]:
        if self.raises == "enter":
            raise ValueError(self.raises)
        self.entered += 1
        try:
            yield
        finally:
            self.left += 1
            if self.raises == "exit":
                raise ValueError(self.raises)


def make(streams: Streams) -> Turn:
    return Turn(cast(Runtime, streams))


def test_entered_once_and_left_by_the_outermost() -> None:
    turn = make(streams := Streams())
    for number in (1, 2):
        with turn:
            with turn:
                assert torch.is_inference_mode_enabled()
            assert torch.is_inference_mode_enabled()
            assert (streams.entered, streams.left) == (number, number - 1)
        assert not torch.is_inference_mode_enabled()
        assert streams.left == number


@pytest.mark.parametrize("raises", ["enter", "exit", "inside", "nested"])
def test_an_error_leaves_it(raises: str) -> None:
    turn = make(streams := Streams(raises))

    def work() -> None:
        with turn:
            if raises == "inside":
                raise ValueError(raises)
            with turn:
                if raises == "nested":
                    raise ValueError(raises)

    with pytest.raises(ValueError, match=raises):
        work()
    assert not torch.is_inference_mode_enabled()
    assert streams.entered == streams.left
    streams.raises = ""
    with turn:
        assert torch.is_inference_mode_enabled()
    assert not torch.is_inference_mode_enabled()


def test_each_thread_enters_for_itself() -> None:
    """While one stands still inside, as a paused step does."""
    turn, seen = make(Streams()), []

    def other() -> None:
        with turn:
            seen.append(torch.is_inference_mode_enabled())
        seen.append(torch.is_inference_mode_enabled())

    with turn:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert torch.is_inference_mode_enabled()
    assert seen == [True, False]
    assert not torch.is_inference_mode_enabled()


def test_a_reset_leaves_what_an_interrupt_has_left_entered() -> None:
    def trace(frame: Any, event: str, _: object) -> None:
        if frame.f_code is Turn.__exit__.__code__ and frame.f_back.f_code.co_name == "step":
            sys.settrace(None)
            raise KeyboardInterrupt

    with small_engine() as engine:
        want = engine.generate([[1, 2, 3]], sampled(4, seed=1))[0].token_ids
        engine.submit([1, 2], sampled(4))
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        finally:
            sys.settrace(before)
        assert torch.is_inference_mode_enabled(), "what this is about"
        engine.reset()
        assert not torch.is_inference_mode_enabled()
        assert engine.generate([[1, 2, 3]], sampled(4, seed=1))[0].token_ids == want
