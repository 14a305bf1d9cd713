"""The bad-words stage through whole lives: outputs and drafts count, prompts do not."""

from __future__ import annotations

import numpy as np
import pytest

from mrv2lab.ops import bad_words as op_file
from mrv2lab.protocol import SamplingParams
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.sample import bad_words
from mrv2lab.sample.bad_words import BadWords
from tests.ops.backends import mutant
from tests.runtime.machines import marks
from tests.sample.lives import Life, Lives
from tests.sample.test_penalties import POLICIES
from tests.slow import mostly_slow


def born(rng: np.random.Generator, lives: Lives) -> Life:
    """Few tokens, so that words match often."""
    words = [tuple(rng.integers(0, 3, rng.integers(1, 4)).tolist()) for _ in range(rng.integers(0, 6))]
    return Life("", SamplingParams(bad_words=words), rng.integers(0, 3, rng.integers(1, 12)).tolist())


def make(lives: Lives) -> BadWords:
    return BadWords(lives.rt, lives.transfers, max_num_reqs=lives.rows)


def lives_of(rt, seed=0, **options) -> Lives:
    return Lives(rt, make, born, vocab=3, seed=seed, **options)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", mostly_slow(range(3), 1))
def test_lives(rt, policy, seed):
    lives_of(rt, seed, policy=policy).run(25)


def test_lives_on_the_interpreter():
    lives_of(CpuRuntime(backend="interpret"), 4, rows=2).run(8)


def test_nothing_is_launched_without_users(cpu):
    lives = lives_of(cpu)
    lives.add(Life("a", SamplingParams(), [1]))
    context = lives.begin({"a": 1})
    assert not lives.stage.used(context.rows)
    assert not [mark for mark in marks(cpu, "kernel") if mark.name == "bad_words"]


def test_a_text_was_not_encoded(cpu):
    life = Life("a", SamplingParams(bad_words=["damn"]), [1])
    with pytest.raises(TypeError, match="request 'a': bad word 'damn' is a text; submit encodes texts"):
        lives_of(cpu).stage.add_request(0, life.data())


def test_too_many_tokens(cpu):
    life = Life("a", SamplingParams(bad_words=[(1,) * 600, (2,) * 600]), [1])
    with pytest.raises(ValueError, match="2 bad words of 1200 tokens; at most 128 words and 1024 tokens"):
        lives_of(cpu).stage.add_request(0, life.data())


def test_the_limits_themselves(rt):
    lives = lives_of(rt)
    words = [(0,)] * 127 + [(2,) * 896 + (1,)]
    lives.add(Life("a", SamplingParams(bad_words=words), [2, 2]))
    logits = lives.logits(np.zeros((1, 3)))
    lives.stage.apply(logits, lives.begin({"a": 2}))
    assert rt.read(logits).tolist() == [[-float("inf"), 0, 0]]


BUGS = {
    "the prompt counts": ("int(prompt_len[index]) : int(total_len[index])", ": int(total_len[index])"),
    "drafts are not seen": ("input_ids[last - int(local_pos[row]) : last]", "input_ids[:0]"),
    "the last sampled token twice": ("last - int(local_pos[row]) : last]", "last - int(local_pos[row]) - 1 : last]"),
    "stale tokens count": (": int(total_len[index])]", ": int(total_len[index]) + 1]"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_mutants(cpu, bug, tmp_path, monkeypatch):
    monkeypatch.setattr(bad_words, "bad_words", mutant(op_file.bad_words, *BUGS[bug], tmp_path))
    assert lives_of(cpu).fails(0, 1, 2)
