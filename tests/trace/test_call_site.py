"""Frames are read from their names; a call's chain is what encloses it, innermost first."""

from __future__ import annotations

import numpy as np
import pytest

from mrv2lab.trace.call_site import Frame, enclosing, frame, site_and_caller, user_frames
from mrv2lab.trace.trace import Trace
from tests.trace.hand_made import OTHER, HandMade


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vllm/v1/worker/a.py(27): run", Frame("vllm/v1/worker/a.py", 27, "run")),
        ("<string>(1): <module>", Frame("<string>", 1, "<module>")),
        (
            "<built-in method synchronize of torch.Event object at 0x7f3ab849d0f0>",
            Frame("", -1, "synchronize", "torch.Event"),
        ),
        ("<built-in function _cuda_synchronize>", Frame("", -1, "_cuda_synchronize")),
        ("<built-in function next>", Frame("", -1, "next")),
        ("nn.Module: Qwen2Model_0", None),
        ("aten::item", None),
        ("a.py(x): f", None),
        (f"a.py({'9' * 5000}): f", None),
        ("", None),
    ],
)
def test_a_frame_is_read_from_its_name(name: str, expected: Frame | None) -> None:
    assert frame(name) == expected


@pytest.mark.parametrize(
    ("name", "of_user"),
    [
        ("moca/profile.py(34): run", True),
        ("/srv/me/notorch/x.py(1): f", True),
        ("torch/cuda/__init__.py(975): synchronize", False),
        ("/usr/lib/python3/site-packages/torch/cuda/streams.py(9): wait", False),
        ("contextlib.py(132): __enter__", False),
        ("/usr/lib/python3.12/contextlib.py(132): __enter__", False),
        ("<frozen os>(709): __getitem__", False),
        ("<built-in function next>", False),
    ],
)
def test_frames_of_the_user(name: str, of_user: bool) -> None:
    found = frame(name)
    assert found is not None and found.of_user is of_user


def chain_of(trace: Trace, name: str) -> list[str]:
    event = next(event for event in range(len(trace)) if trace.name_of(event) == name)
    return [trace.name_of(one) for one in enclosing(trace, [event])[0]]


def test_the_chain_is_innermost_first_and_of_one_thread() -> None:
    made = HandMade().frame(1, 100, "a.py(1): outer").frame(2, 50, "b.py(2): inner").op(3, 20, "aten::to")
    made.frame(1, 100, "c.py(1): elsewhere", OTHER).call(4, 5, "cudaStreamSynchronize")
    assert chain_of(made.build(), "cudaStreamSynchronize") == ["aten::to", "b.py(2): inner", "a.py(1): outer"]


def test_a_range_that_crosses_the_end_does_not_enclose_and_hides_nothing() -> None:
    made = HandMade().frame(1, 100, "a.py(1): outer").op(10, 10, "crossing").call(15, 30, "cudaFree")
    assert chain_of(made.build(), "cudaFree") == ["a.py(1): outer"]


def test_equal_stretches() -> None:
    made = HandMade().call(10, 5, "cudaFree").op(10, 5, "aten::outer").op(10, 5, "aten::inner")
    trace = made.build()
    assert chain_of(trace, "cudaFree") == ["aten::inner", "aten::outer"], "a range encloses a call of equal length"
    assert chain_of(trace, "aten::inner") == ["aten::outer"]
    assert chain_of(trace, "aten::outer") == []


def test_ended_ranges_do_not_enclose() -> None:
    made = HandMade().op(1, 4, "before").op(10, 4, "after").call(5, 2, "touching")
    assert chain_of(made.build(), "touching") == []


def test_several_events_at_once_in_any_order() -> None:
    trace = HandMade().op(1, 9, "a").call(2, 1, "x").call(5, 1, "y").call(20, 1, "z").build()
    at = {trace.name_of(event): event for event in range(len(trace))}
    assert enclosing(trace, [at["z"], at["y"], at["x"], at["y"]]) == [[], [at["a"]], [at["a"]], [at["a"]]]
    assert enclosing(trace, []) == []


def test_site_and_caller() -> None:
    made = HandMade().frame(1, 90, "me/main.py(3): main").frame(2, 80, "me/step.py(7): step")
    made.frame(3, 70, "torch/cuda/__init__.py(9): synchronize").frame(4, 60, "<built-in function _cuda_synchronize>")
    trace = made.call(5, 50, "cudaDeviceSynchronize").build()
    chain = enclosing(trace, [len(trace) - 1])[0]
    assert site_and_caller(trace, chain) == ("me/step.py:7", "main > step")
    assert site_and_caller(trace, chain, depth=1) == ("me/step.py:7", "step")
    assert [one.function for one in user_frames(trace, chain)] == ["step", "main"]


def test_without_frames_named_ranges_are_the_caller() -> None:
    trace = HandMade().op(1, 9, "aten::mm").call(2, 1, "cudaMalloc").build()
    assert site_and_caller(trace, enclosing(trace, [len(trace) - 1])[0]) == ("", "aten::mm")
    assert site_and_caller(trace, []) == ("", "")


def test_many_ranges_that_cross() -> None:
    # Each range ends while the next one runs, so ended ones lie below running ones; each fourth has a call inside.
    made = HandMade().frame(0, 2000, "a.py(1): whole")
    for number in range(300):
        made.frame(5 * number, 8, f"a.py({number}): crossing")
        if not number % 4:
            made.call(5 * number + 6, 1, "cudaMalloc")
    trace = made.build()
    chains = enclosing(trace, np.flatnonzero(trace.mask("runtime")))
    expected = [[f"a.py({n + 1}): crossing", f"a.py({n}): crossing", "a.py(1): whole"] for n in range(0, 300, 4)]
    assert [[trace.name_of(event) for event in chain] for chain in chains] == expected
