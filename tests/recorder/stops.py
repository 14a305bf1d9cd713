"""The stop button, pressed from a paused step's thread while its reader waits."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import mrv2lab.recorder.paused as module

FAR_TOO_LONG = 30.0


@pytest.fixture(autouse=True)
def a_stop_interrupts() -> Iterator[None]:
    """Also where the tests run in the background of a shell, which ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press_stop() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def readers_wait(but: Any = None, seconds: float = FAR_TOO_LONG) -> Any:
    """In a paused step's thread: the reader's wait for the step, once there is one that is not ``but``; None if there
    is none in time."""
    thread = threading.current_thread()
    assert isinstance(thread, module._StepThread)
    for _ in range(int(seconds * 1000)):
        with thread._changed:  # free, hence the reader has laid himself down
            waits = [one for one in thread._changed._waiters if one is not but]  # type: ignore[attr-defined]
        if waits:
            return waits[0]
        time.sleep(0.001)
    return None


def press_stop_and_let_the_reader_wait_again() -> None:
    """In a paused step's thread: interrupt the reader's wait, and go on when he is in another one.

    A signal that comes between Python's last look and the lock's own wait is seen by nobody until the next signal:
    hence a second press where the first had no effect.
    """
    first = readers_wait()
    assert first is not None, "nobody waits for the step"
    for _ in range(10):
        time.sleep(0.02)  # let him lie down for good
        press_stop()
        if readers_wait(but=first, seconds=FAR_TOO_LONG / 10) is not None:
            return
    raise AssertionError("the reader does not wake up")
