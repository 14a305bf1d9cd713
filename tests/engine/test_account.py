"""An account (``engine/account.py``) under threads that read and under interrupts anywhere."""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest

from mrv2lab.engine import account, steady, steady_outputs
from mrv2lab.engine.account import Account, Accounted
from mrv2lab.engine.outputs import RequestOutput
from mrv2lab.engine.request import Request
from mrv2lab.engine.steady import RequestAccount
from mrv2lab.engine.steady_outputs import SteadyOutputs

COUNT = 5


@pytest.fixture(autouse=True)
def any_batch_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LEAST": 1, "PATIENCE": 1, "LONGEST": 100}.items():
        monkeypatch.setattr(account, name, value)
    lock = threading.RLock()  # a trace function may raise where no signal comes through: on the way to __exit__
    for module in (account, steady, steady_outputs):
        monkeypatch.setattr(module, "LOCK", lock)


def make_batch() -> SteadyOutputs:
    return SteadyOutputs([RequestOutput(f"r{i}", None, [1]) for i in range(COUNT)], [0] * COUNT)


def go_on(batch: SteadyOutputs, step: int) -> None:
    batch.step(np.full(COUNT, step), step)


def read_while_another_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A reader is in the middle of catching up when the next step comes; r4's tokens behind that."""
    batch = make_batch()
    for step in (1, 2):
        go_on(batch, step)
    reading, stepped = threading.Event(), threading.Event()
    whole = Account.tokens_since

    def tokens_since(self: Account[Any], i: int, column: int) -> list[int]:
        found = whole(self, i, column)
        if threading.current_thread() is reader:
            reading.set()
            stepped.wait(0.05)  # in vain: the step waits for the reader
        return found

    monkeypatch.setattr(Account, "tokens_since", tokens_since)
    reader = threading.Thread(target=lambda: batch.members[4].token_ids)
    reader.start()
    reading.wait()
    try:
        go_on(batch, 3)
        stepped.set()
    finally:
        reader.join()
    go_on(batch, 4)
    batch.close()
    return batch.members[4].token_ids


def test_whoever_reads_while_another_thread_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_while_another_steps(monkeypatch) == [1, 2, 3, 4]


def test_without_the_lock_it_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (account, steady_outputs):
        monkeypatch.setattr(module, "LOCK", nullcontext())
    with suppress(AttributeError):
        assert read_while_another_steps(monkeypatch) != [1, 2, 3, 4]


def interrupt_at(line: int, call: Callable[[], object]) -> bool:
    """Call, with a KeyboardInterrupt in front of the ``line``-th line of an account; whether there are so many."""
    left = line

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(("account.py", "steady_outputs.py", "steady.py")):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def interrupts_lose_outputs() -> bool:
    """Whether a step, or a read, that breaks off somewhere leaves an output that is not whole."""
    for what in (lambda batch: go_on(batch, 4), lambda batch: batch.members[3].token_ids, SteadyOutputs.close):
        line = 1
        while True:
            batch = make_batch()
            for step in (1, 2, 3):
                go_on(batch, step)
            assert batch.members[2].steps == 3
            if not interrupt_at(line, lambda batch=batch, what=what: what(batch)):  # type: ignore[misc]
                break
            batch.close()  # as engine.reset() does
            for output in batch.members:
                if not hasattr(output, "token_ids") or output.token_ids not in ([1, 2, 3], [1, 2, 3, 4]):
                    return True
                if output.new_token_ids != output.token_ids[-1:] or output.steps not in (3, 4):
                    return True
            line += 1
        assert line > 5, "somewhere"
    return False


def test_an_interrupt_anywhere_leaves_whole_outputs() -> None:
    assert not interrupts_lose_outputs()


def test_arrears_that_are_dropped_too_early_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def catch_up(self: Accounted) -> None:
        if self.arrears is not None:
            give_back, args = self.arrears
            self.arrears = None
            give_back(*args)

    monkeypatch.setattr(Accounted, "catch_up", catch_up)
    assert interrupts_lose_outputs()


def test_an_interrupt_anywhere_leaves_whole_requests() -> None:
    line = 1
    while True:
        requests = [Request(f"r{i}", [7]) for i in range(COUNT)]
        batch = RequestAccount(requests, is_behind=True)
        batch.open(1)
        batch.count()
        with account.LOCK:
            batch.begin_change()
            batch.add(np.full(COUNT, 8))
        if not interrupt_at(line, lambda batch=batch: batch.members[3].num_tokens):  # type: ignore[misc]
            break
        batch.close()
        for request in requests:
            assert (request.all_token_ids, request.num_tokens, request.num_computed_tokens) == ([7, 8], 2, 1)
            assert (request.num_in_flight_tokens, request.num_output_placeholders) == (0, 0)
        line += 1
    assert line > 5, "somewhere"


def test_a_pickle_is_up_to_date() -> None:
    batch = make_batch()
    for step in (1, 2, 3):
        go_on(batch, step)
    assert batch.is_open and batch.members[3].arrears is not None
    copy = pickle.loads(pickle.dumps(batch.members[3]))
    assert copy == RequestOutput("r3", None, [1], token_ids=[1, 2, 3], new_token_ids=[3], steps=3)
    assert copy.arrears is None


@pytest.mark.parametrize(("read", "every", "lasts"), [(5, 1, False), (1, 1, True), (5, 2, True)])
def test_requests_that_somebody_reads_in_every_step_have_no_account(read: int, every: int, lasts: bool) -> None:
    requests = [Request(f"r{i}", [7]) for i in range(COUNT)]
    batch = RequestAccount(requests, is_behind=False)
    batch.open(1)
    for step in range(20):
        if not batch.is_open_for_step():
            break
        batch.count()
        with account.LOCK:
            batch.begin_change()
            batch.add(np.full(COUNT, 8))
        for request in requests[:read] if step % every == 0 else ():
            assert request.num_tokens == step + 2
    assert batch.is_open == lasts
    assert lasts or step == steady.RequestAccount.closed_behind
    batch.open(99)
    assert batch.is_open == lasts
