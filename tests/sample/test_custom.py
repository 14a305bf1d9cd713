"""Custom processors: what they are given, what they may return, and that a bad one fails its own request alone."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from mrv2lab.protocol import SamplingParams
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.sample.custom import CustomProcessors
from tests.runtime.machines import marks
from tests.sample.lives import Life, Lives
from tests.sample.test_penalties import POLICIES
from tests.slow import mostly_slow

INF = float("inf")


def count_up(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """In place: each token by how often it was generated."""
    return logits.index_add_(0, ids.long(), torch.ones_like(ids, dtype=torch.float32))


def count_up_np(ids, logits):
    for token in ids:
        logits[token] += 1
    return logits


def double(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """A new tensor."""
    return logits * 2 + len(ids)


def double_np(ids, logits):
    return logits * 2 + len(ids)


def born(rng: np.random.Generator, lives: Lives) -> Life:
    which = [(), (0,), (1,), (0, 1), (1, 0)][rng.integers(5)]
    life = Life("", SamplingParams(), rng.integers(0, lives.vocab, rng.integers(1, 12)).tolist())
    life.processors = tuple((count_up, double)[i] for i in which)
    life.seen_by_oracle = tuple((count_up_np, double_np)[i] for i in which)
    return life


def make(lives: Lives) -> CustomProcessors:
    return CustomProcessors(lives.rt, lives.transfers, max_num_reqs=lives.rows, vocab_size=lives.vocab)


def lives_of(rt: Runtime, seed: int = 0, **options) -> Lives:
    return Lives(rt, make, born, seed=seed, **options)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", mostly_slow(range(3), 1))
def test_lives(rt, policy, seed):
    lives_of(rt, seed, policy=policy).run(25)


def test_lives_on_the_interpreter():
    lives_of(CpuRuntime(backend="interpret"), 4, rows=2).run(8)


def raises(ids, logits):
    logits.fill_(9)
    raise ArithmeticError("no")


def raises_silently(ids, logits):
    raise KeyError


BAD = {
    "raises": (raises, "custom processor raises failed: ArithmeticError: no"),
    "raises silently": (raises_silently, "custom processor raises_silently failed: KeyError"),
    "nothing": (lambda ids, logits: None, r"it returned NoneType, not a tensor float32\[40\]"),
    "a list": (lambda ids, logits: logits.tolist(), r"it returned list, not a tensor float32\[40\]"),
    "short": (lambda ids, logits: logits[1:], r"torch.float32\[39\] on .*, not torch.float32\[40\]"),
    "a batch": (lambda ids, logits: logits[None], r"torch.float32\[1, 40\] on"),
    "half": (lambda ids, logits: logits.half(), r"torch.float16\[40\] on"),
    "double": (lambda ids, logits: logits.double(), r"torch.float64\[40\] on"),
    "integers": (lambda ids, logits: logits.int(), r"torch.int32\[40\] on"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_one_fails_alone(rt, case):
    """Its own row stays as it was, even behind a function that worked; the others are served."""
    bad, message = BAD[case]
    lives = lives_of(rt)
    for name, functions in (("a", (double,)), ("b", (double, bad, count_up)), ("c", ()), ("d", (count_up,))):
        lives.add(Life(name, SamplingParams(), [1], processors=functions))
    values = np.random.default_rng(0).normal(size=(4, 40)).astype(np.float32)
    for step in range(2):
        context = lives.begin(dict.fromkeys("abcd", 1), step=step)
        logits = lives.logits(values)
        lives.stage.apply(logits, context)
        got = rt.read(logits).numpy()
        by_name = dict(zip(context.batch.host.req_ids, got, strict=True))
        mine = dict(zip(context.batch.host.req_ids, values, strict=True))
        np.testing.assert_array_equal(by_name["a"], mine["a"] * 2 + step)
        np.testing.assert_array_equal(by_name["b"], mine["b"])
        np.testing.assert_array_equal(by_name["c"], mine["c"])
        assert (by_name["d"] != mine["d"]).sum() == step
        errors = lives.stage.take_errors(context.batch.host.req_ids)
        assert list(errors) == ([] if step else ["b"])  # told once, and not called again
        if not step:
            assert re.search(message, errors["b"])
        lives.finish(context, {name: [2] for name in "abcd"})


def test_errors_are_asked_for_by_request(cpu):
    lives = lives_of(cpu)
    for name in "ab":
        lives.add(Life(name, SamplingParams(), [1], processors=(raises,)))
    lives.stage.apply(lives.logits(np.zeros((2, 40))), lives.begin({"a": 1, "b": 1}))
    assert lives.stage.take_errors(["a", "b"]) == {}  # not run yet
    cpu.synchronize()
    assert list(lives.stage.take_errors(["b", "c"])) == ["b"]
    assert list(lives.stage.take_errors(["a", "b"])) == ["a"]


def test_a_device_that_is_ahead_tells_a_failure_with_its_own_step(cpu):
    lives = lives_of(cpu)
    lives.add(Life("a", SamplingParams(), [1], processors=(raises,)))
    lives.stage.apply(lives.logits(np.zeros((1, 40))), lives.begin({"a": 1}, step=5))
    cpu.synchronize()
    assert lives.stage.take_errors(["a"], 4) == {}
    assert list(lives.stage.take_errors(["a"], 5)) == ["a"]


def test_an_unfinished_prefill_is_not_asked(cpu):
    asked = []

    def spy(ids, logits):
        asked.append(ids.tolist())
        return logits

    lives = lives_of(cpu)
    lives.add(Life("a", SamplingParams(), [1, 2, 3], processors=(spy,)))
    for tokens, said in ((2, []), (1, [7]), (1, [8])):
        context = lives.begin({"a": tokens})
        lives.stage.apply(lives.logits(np.zeros((1, 40))), context)
        lives.finish(context, {"a": said} if said else {})
        cpu.synchronize()
    assert asked == [[], [7]]


def test_queued_work_of_a_row_that_changed_hands_still_runs(cpu):
    """The step in flight belongs to the old owner; the new one's functions come behind it."""
    lives = lives_of(cpu, rows=1)
    lives.add(Life("a", SamplingParams(), [1], processors=(double,)))
    first = lives.logits(np.ones((1, 40)))
    context = lives.begin({"a": 1})
    lives.stage.apply(first, context)
    lives.finish(context, {"a": [3]})
    lives.states.remove_request("a")
    lives.add(Life("b", SamplingParams(), [1], processors=(count_up, double)))
    second = lives.logits(np.ones((1, 40)))
    lives.stage.apply(second, lives.begin({"b": 1}))
    assert cpu.read(first)[0, 0] == 2
    assert cpu.read(second)[0, 0] == 2
    assert len(lives.stage._owners) == 1  # the old one is forgotten


def test_nothing_is_launched_without_users_and_reset_forgets(cpu):
    lives = lives_of(cpu)
    row = lives.add(Life("a", SamplingParams(), [1]))
    context = lives.begin({"a": 1})
    assert not lives.stage.used(context.rows)
    assert marks(cpu, "run") == []
    lives.stage.add_request(row, Life("b", SamplingParams(), [1], processors=(raises,)).data())
    lives.stage.apply(lives.logits(np.zeros((1, 40))), context)
    cpu.synchronize()
    lives.stage.reset()
    assert not lives.stage.used(context.rows)
    assert lives.stage.take_errors(["b"]) == {}


def test_steady_steps_allocate_nothing(cpu):
    lives = lives_of(cpu)
    lives.add(Life("a", SamplingParams(), [1], processors=(double,)))
    addresses = set()
    for step in range(5):
        context = lives.begin({"a": 1}, step=step)
        lives.stage.apply(lives.logits(np.zeros((1, 40))), context)
        addresses.add((lives.stage._row.data_ptr(), lives.stage._tokens.data_ptr()))
        lives.finish(context, {"a": [2]})
        cpu.synchronize()
    assert len(addresses) == 1


def test_mutant_functions_that_change_the_row_in_place(cpu, monkeypatch):
    """Without the copy, a function that fails half-way leaves its mess."""

    def no_copy(self, key, step, generated, logits, row):
        owner = self._owners[key]
        for function in owner.functions:
            try:
                logits.copy_(function(generated, logits))
            except Exception:
                return

    monkeypatch.setattr(CustomProcessors, "_call", no_copy)
    with pytest.raises(AssertionError):
        test_a_bad_one_fails_alone(cpu, "raises")


def test_a_mutant_that_forgets_drafts_is_caught(cpu, monkeypatch):
    plan = CustomProcessors._plan

    def short(self, context):
        keys, rows, starts = plan(self, context)
        return keys, rows, np.maximum.accumulate(np.maximum(starts - np.arange(len(starts), dtype=np.int32), 0))

    monkeypatch.setattr(CustomProcessors, "_plan", short)
    assert lives_of(cpu).fails(0, 1)
