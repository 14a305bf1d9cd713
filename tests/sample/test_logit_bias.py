"""Allowed ids, bias and min_tokens through whole lives; mrv2.md 35, 36 and 38 literally."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrv2lab.ops import logit_bias as op_file
from mrv2lab.protocol import SamplingParams
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.sample import logit_bias
from mrv2lab.sample.logit_bias import LogitBias
from mrv2lab.sample.penalties import Penalties
from mrv2lab.sampling_params import MAX_STOP_TOKENS, StructuredOutput
from tests.ops.backends import mutant
from tests.runtime.machines import marks
from tests.sample.lives import Life, Lives
from tests.sample.test_penalties import POLICIES
from tests.slow import mostly_slow

INF = float("inf")
EOS = 7


def born(rng: np.random.Generator, lives: Lives) -> Life:
    some = rng.permutation(lives.vocab)
    params = SamplingParams(
        allowed_token_ids=tuple(some[: rng.integers(1, 12)].tolist()) if rng.random() < 0.5 else None,
        logit_bias={int(token): float(rng.normal(0, 20)) for token in some[8 : rng.integers(8, 20)]},
        min_tokens=int(rng.choice([0, 0, 2, 5, 20])),
        stop_token_ids=tuple(rng.integers(0, lives.vocab, 2).tolist()),
        structured_output=StructuredOutput(regex="a") if rng.random() < 0.5 else None,
    )
    if params.allowed_token_ids and rng.random() < 0.5:  # nothing but the end is allowed
        stops = params.allowed_token_ids
    else:
        stops = params.stop_token_ids + ((EOS,) if rng.random() < 0.7 else ())
    stops = tuple(sorted({*stops, *params.stop_token_ids}))
    return Life("", params, rng.integers(0, lives.vocab, rng.integers(1, 12)).tolist(), stops)


def make(lives: Lives) -> LogitBias:
    return LogitBias(lives.rt, lives.transfers, max_num_reqs=lives.rows)


def lives_of(rt, seed=0, **options) -> Lives:
    return Lives(rt, make, born, seed=seed, **options)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", mostly_slow(range(3), 1))
def test_lives(rt, policy, seed):
    lives_of(rt, seed, policy=policy).run(25)


def test_lives_on_the_interpreter():
    lives_of(CpuRuntime(backend="interpret"), 4, rows=2).run(6)


def test_35_allowed_ids(rt):
    lives = lives_of(rt, vocab=50_000)
    lives.add(Life("a", SamplingParams(allowed_token_ids=(3,)), [1]))
    values = np.random.default_rng(0).normal(size=(1, 50_000))
    logits = lives.logits(values)
    lives.stage.apply(logits, lives.begin({"a": 1}))
    got = rt.read(logits)
    assert got[0, 3] == np.float32(values[0, 3])
    assert torch.nonzero(got[0] > -INF).tolist() == [[3]]


def test_36_min_tokens_holds_back_eos(rt):
    """min_tokens 5 and a huge EOS: none among the first five outputs, the sixth is one. The user named no stop."""
    lives = lives_of(rt, drafts=1)
    life = Life("a", SamplingParams(min_tokens=5), [1, 2, 3], (EOS,))
    lives.add(life)
    values = np.zeros((1, lives.vocab))
    values[0, EOS], values[0, 2] = 1e9, 1
    for step in range(6):
        context = lives.begin({"a": 3 if step == 0 else 1})
        logits = lives.logits(values)
        assert lives.stage.used(context.rows)
        lives.stage.apply(logits, context)
        token = int(rt.read(logits)[0].argmax())
        life.outputs.append(token)
        lives.finish(context, {"a": [token]})
    assert life.outputs == [2, 2, 2, 2, 2, EOS]


def test_38_bias_before_penalties(rt):
    """Bias +5 and repetition 1.5 on the same token: (x + 5) / 1.5."""
    lives = lives_of(rt)
    bias = lives.stage
    lives.stage = Penalties(rt, lives.transfers, lives.states, max_num_reqs=lives.rows, vocab_size=lives.vocab)
    life = Life("a", SamplingParams(logit_bias={1: 5.0}, repetition_penalty=1.5), [1])
    bias.add_request(lives.add(life), life.data())
    bias.apply_staged_writes()
    context = lives.begin({"a": 1})
    logits = lives.logits(np.full((1, lives.vocab), 2.5))
    bias.apply(logits, context)
    lives.stage.apply(logits, context)
    assert rt.read(logits)[0, :3].tolist() == [2.5, 5.0, 2.5]


def test_a_grammar_that_allows_only_the_end_may_end(rt):
    lives = lives_of(rt)
    for req_id, structured in (("a", StructuredOutput(regex="a")), ("b", None)):
        lives.add(Life(req_id, SamplingParams(min_tokens=3, structured_output=structured), [1], (EOS,)))
    values = np.full((2, lives.vocab), -INF)
    values[:, EOS] = 4
    logits = lives.logits(values)
    context = lives.begin({"a": 1, "b": 1})
    lives.stage.apply(logits, context)
    kept = dict(zip(context.batch.host.req_ids, rt.read(logits)[:, EOS].tolist(), strict=True))
    assert kept == {"a": 4, "b": -INF}


def test_nothing_is_launched_without_users(cpu):
    lives = lives_of(cpu)
    lives.add(Life("a", SamplingParams(stop_token_ids=(3,)), [1], (3, EOS)))
    context = lives.begin({"a": 1})
    before = len(marks(cpu, "publish", "kernel"))
    assert not lives.stage.used(context.rows)
    lives.add(Life("b", SamplingParams(), [1]))
    lives.stage.apply_staged_writes()
    assert len(marks(cpu, "publish", "kernel")) == before


def test_too_many_stop_ids(cpu):
    lives = lives_of(cpu)
    life = Life("a", SamplingParams(min_tokens=1), [1], tuple(range(MAX_STOP_TOKENS + 1)))
    with pytest.raises(ValueError, match="request 'a': min_tokens can hold back 128 stop tokens at most, it has 129"):
        lives.stage.add_request(0, life.data())


def test_a_row_that_changes_hands_before_it_is_applied(cpu):
    """Nothing overlaps, and only the last owner counts; a reset forgets both."""
    lives = lives_of(cpu)
    for allowed in ((3, 4), (5,)):
        lives.stage.add_request(2, Life("a", SamplingParams(allowed_token_ids=allowed), [1]).data())
    lives.stage.apply_staged_writes()
    assert cpu.read(lives.stage.edits.gpu)[2].tolist() == [1, 0, 0, 0, 0]
    assert cpu.read(lives.stage.allowed_ids.gpu)[2, 0] == 5
    lives.stage.add_request(2, Life("a", SamplingParams(allowed_token_ids=(6,)), [1]).data())
    lives.stage.reset()
    lives.stage.apply_staged_writes()
    assert cpu.read(lives.stage.allowed_ids.gpu)[2, 0] == 5


BUGS = {
    "one position late": (")]) + 1 < min_len", ")]) < min_len"),
    "stops before bias": ("x[ids[known].long()] += bias", "x[ids[known].long()] = bias"),
    "first request's position": ("positions[int(logits_indices[row])]", "positions[row]"),
    "row instead of request": ("edits[index].tolist()", "edits[min(row, len(edits) - 1)].tolist()"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_mutants(cpu, bug, tmp_path, monkeypatch):
    monkeypatch.setattr(logit_bias, "logit_bias", mutant(op_file.logit_bias, *BUGS[bug], tmp_path))
    assert lives_of(cpu).fails(0, 1, 2)


@pytest.mark.parametrize("table", ["allowed_ids", "stop_ids"])
def test_a_row_that_keeps_its_previous_owner_is_caught(cpu, table, monkeypatch):
    def lazy(lives: Lives) -> LogitBias:
        stage = make(lives)
        before = getattr(stage, table)
        written = set()

        def once(row, start, values):
            if row not in written:
                written.add(row)
                type(before).stage_write(before, row, start, values)

        monkeypatch.setattr(before, "stage_write", once)
        return stage

    assert Lives(cpu, lazy, born).fails(0, 1, 2)
