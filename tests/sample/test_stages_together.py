"""The stages that edit logits, one behind the other in their order, on requests that use several of them at once."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mrv2lab.protocol import SamplingParams
from tests.sample import test_bad_words, test_custom, test_logit_bias, test_penalties
from tests.sample.lives import Life, Lives
from tests.slow import mostly_slow

FILES = (test_logit_bias, test_penalties, test_bad_words, test_custom)


class Chain:
    """Several stages as one."""

    def __init__(self, *stages) -> None:
        self.stages = stages

    def add_request(self, row, request):
        for stage in self.stages:
            stage.add_request(row, request)

    def apply_staged_writes(self):
        for stage in self.stages:
            stage.apply_staged_writes()

    def used(self, rows):
        return any(stage.used(rows) for stage in self.stages)

    def apply(self, logits, context):
        for stage in self.stages:
            if stage.used(context.rows):
                stage.apply(logits, context)

    def count_sampled(self, *args):
        for stage in self.stages:
            if hasattr(stage, "count_sampled"):
                stage.count_sampled(*args)


def born(rng: np.random.Generator, lives: Lives) -> Life:
    """What the stages' own tests give, put together."""
    life = test_custom.born(rng, lives)
    for file in FILES[:3]:
        if rng.random() < 0.6:
            other = file.born(rng, lives)
            changed = {
                field.name: getattr(other.params, field.name)
                for field in dataclasses.fields(SamplingParams)
                if getattr(other.params, field.name) != getattr(SamplingParams(), field.name)
            }
            life.params = dataclasses.replace(life.params, **changed)
            life.stop_ids = other.stop_ids or life.stop_ids
    return life


def in_order(lives: Lives) -> Chain:
    return Chain(*(file.make(lives) for file in FILES))


@pytest.mark.parametrize("policy", test_penalties.POLICIES)
@pytest.mark.parametrize("seed", mostly_slow(range(3), 1))
def test_lives(rt, policy, seed):
    Lives(rt, in_order, born, seed=seed, policy=policy).run(30)


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (3, 0, 1, 2)], ids=["penalties before bias", "custom first"])
def test_another_order_is_caught(cpu, order):
    def shuffled(lives: Lives) -> Chain:
        stages = in_order(lives).stages
        return Chain(*(stages[i] for i in order))

    assert Lives(cpu, shuffled, born).fails(0, 1, 2)
