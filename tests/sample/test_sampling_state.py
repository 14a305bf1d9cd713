"""What the tables hold: off values, overwritten rows, one publish a table."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mrv2lab.protocol import SamplingParams
from mrv2lab.runtime.transfer import POLICIES
from mrv2lab.sample.sampling_state import SamplingState
from tests.runtime.machines import marks
from tests.sample.lives import Life

ROWS = np.arange(3, dtype=np.int32)


def state_of(rt, *params: SamplingParams) -> SamplingState:
    state = SamplingState(POLICIES["uva_pool"](rt), max_num_reqs=3, vocab_size=100)
    for row, one in enumerate(params):
        state.add_request(row, Life("a", one, [1]).data())
    state.apply_staged_writes()
    return state


def test_values(rt):
    state = state_of(
        rt,
        SamplingParams(top_k=5, top_p=0.9, min_p=0.1),
        SamplingParams(top_k=1000),
        SamplingParams(top_p=1e-60),
    )
    assert rt.read(state.top_k.gpu).tolist() == [5, 100, 100]
    assert rt.read(state.top_p.gpu).tolist() == pytest.approx([0.9, 1, 1e-38], abs=1e-7)
    assert rt.read(state.top_p.gpu)[2] > 0
    assert rt.read(state.log_min_p.gpu).tolist() == [pytest.approx(math.log(0.1)), -math.inf, -math.inf]


def test_off_is_off(rt):
    state = state_of(rt)
    for uses in (state.uses_temperature, state.uses_top_k, state.uses_top_p, state.uses_min_p):
        assert not uses(ROWS)
    assert rt.read(state.top_k.gpu).tolist() in ([100] * 3, [0] * 3)  # nothing was published yet: no row lives


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("uses_temperature", SamplingParams(temperature=0.7)),
        ("uses_top_k", SamplingParams(top_k=99)),
        ("uses_top_p", SamplingParams(top_p=0.999)),
        ("uses_min_p", SamplingParams(min_p=1e-6)),
    ],
)
def test_uses(cpu, name, params):
    state = state_of(cpu, SamplingParams(), params)
    flags = {flag: getattr(state, flag) for flag in ("uses_temperature", "uses_top_k", "uses_top_p", "uses_min_p")}
    assert {flag: uses(ROWS) for flag, uses in flags.items()} == {flag: flag == name for flag in flags}
    assert not flags[name](ROWS[:1])
    state.add_request(1, Life("b", SamplingParams(temperature=1.0, top_k=100), [1]).data())
    assert not any(uses(ROWS) for uses in flags.values())  # the row has a new owner


def test_cuts_are_published_only_when_they_change(cpu):
    state = state_of(cpu, SamplingParams(top_k=3))

    def published(params: SamplingParams) -> set[str]:
        cpu.observer.marks.clear()
        state.add_request(0, Life("b", params, [1]).data())
        state.apply_staged_writes()
        return {mark.name.split(".")[0] for mark in marks(cpu, "publish")}

    assert published(SamplingParams(top_k=3)) == {"temperature", "seeds"}
    assert published(SamplingParams()) == {"temperature", "seeds", "top_k", "top_p", "log_min_p"}
    assert published(SamplingParams()) == {"temperature", "seeds"}
    state.reset()
    assert published(SamplingParams()) == {"temperature", "seeds", "top_k", "top_p", "log_min_p"}
