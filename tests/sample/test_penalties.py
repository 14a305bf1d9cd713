"""The penalties stage through whole lives: resumption, drafts, rows with new owners, no launch without users."""

from __future__ import annotations

import numpy as np
import pytest

from mrv2lab.ops import count_tokens
from mrv2lab.ops import penalties as penalties_op
from mrv2lab.protocol import SamplingParams
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.sample import penalties
from mrv2lab.sample.penalties import Penalties
from tests.ops.backends import mutant
from tests.runtime.machines import marks
from tests.sample.lives import Life, Lives
from tests.slow import mostly_slow

POLICIES = ["uva_pool", "pinned_copy", "barrier"]


def born(rng: np.random.Generator, lives: Lives) -> Life:
    if rng.random() < 0.3:
        params = SamplingParams()
    else:
        params = SamplingParams(
            repetition_penalty=float(rng.choice([1, 0.5, 1.3])),
            frequency_penalty=float(rng.choice([0, -1.5, 0.7])),
            presence_penalty=float(rng.choice([0, 0.25, -2])),
        )
    return Life("", params, rng.integers(0, lives.vocab, rng.integers(1, 12)).tolist())


def make(lives: Lives) -> Penalties:
    return Penalties(lives.rt, lives.transfers, lives.states, max_num_reqs=lives.rows, vocab_size=lives.vocab)


def lives_of(rt, seed=0, **options) -> Lives:
    return Lives(rt, make, born, seed=seed, **options)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", mostly_slow(range(3), 1))
def test_lives(rt, policy, seed):
    lives_of(rt, seed, policy=policy).run(25)


def test_lives_on_the_interpreter():
    lives_of(CpuRuntime(backend="interpret"), 4, rows=2).run(8)


def test_a9_and_nothing_without_users(cpu):
    lives = lives_of(cpu)
    a = Life("a", SamplingParams(repetition_penalty=1.25), [0, 1])
    b = Life("b", SamplingParams(), [0, 1])
    lives.add(b)
    context = lives.begin({"b": 2})
    assert not lives.stage.used(context.rows)
    lives.finish(context, {"b": [5]})
    launched = [mark.name for mark in marks(cpu, "kernel")]
    assert {"zero_counts", "count_history", "count_sampled", "apply_penalties"} & set(launched) == set()

    lives.add(a)
    context = lives.begin({"a": 2, "b": 1})
    assert lives.stage.used(context.rows)
    logits = lives.logits(np.array([[2.0, -2.0, 7.0] + [0.0] * 37] * 2))
    lives.stage.apply(logits, context)
    lives.finish(context, {"a": [2], "b": [5]})
    row = context.batch.host.req_ids.index("a")
    got = cpu.read(logits)
    assert got[row, :3].tolist() == pytest.approx([1.6, -2.5, 7])
    assert got[1 - row, :3].tolist() == [2, -2, 7]
    counts = cpu.read(lives.stage.counts[1])
    assert counts[lives.states.req_id_to_index["a"], 2] == 1
    assert counts[lives.states.req_id_to_index["b"]].sum() == 0  # no user, not counted


def test_the_tables_are_published_only_when_they_change(cpu):
    lives = lives_of(cpu)

    def published() -> int:
        return sum("penalty" in mark.name for mark in marks(cpu, "publish"))

    lives.add(Life("a", SamplingParams(), [1]))
    lives.begin({"a": 1})
    first = published()
    lives.add(Life("b", SamplingParams(), [1]))
    lives.begin({"b": 1})
    assert published() == first
    lives.add(Life("c", SamplingParams(presence_penalty=1.0), [1]))
    lives.begin({"c": 1})
    assert published() == first + 3


def test_reset_forgets_what_was_to_be_counted(cpu):
    lives = lives_of(cpu)
    lives.add(Life("a", SamplingParams(presence_penalty=1.0), [1]))
    lives.states.reset()
    lives.stage.reset()
    lives.live.clear()
    lives.add(Life("b", SamplingParams(), [1]))
    lives.begin({"b": 1})
    assert not [mark for mark in marks(cpu, "kernel") if mark.name == "count_history"]


BUGS = {
    "resumed outputs are forgotten": (count_tokens.count_history, "tokens[prompt_len[row] :])", "tokens[:0])"),
    "rows keep their previous owner's counts": (count_tokens.zero_counts, "output_bin_counts[rows] = 0", "pass"),
    "rows keep their previous owner's prompt": (count_tokens.zero_counts, "prompt_bin_mask[rows] = 0", "pass"),
    "rejected drafts are counted": (count_tokens.count_sampled, ", : num_sampled[i]]", "]"),
    "drafts in front are not seen": (penalties_op.apply_penalties, "ids[last - int(local_pos[row]) : last]", "ids[:0]"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_mutants(cpu, bug, tmp_path, monkeypatch):
    op, old, new = BUGS[bug]
    monkeypatch.setattr(penalties, op.name, mutant(op, old, new, tmp_path))
    assert lives_of(cpu).fails(0, 1, 2)


def test_a_stage_that_counts_before_the_tokens_are_there_is_caught(cpu, monkeypatch):
    """The stage's writes go behind those of the request state."""
    lives = lives_of(cpu)
    apply_states, apply_stage = lives.states.apply_staged_writes, lives.stage.apply_staged_writes
    monkeypatch.setattr(lives.states, "apply_staged_writes", lambda: None)
    monkeypatch.setattr(lives.stage, "apply_staged_writes", lambda: (apply_stage(), apply_states()))
    with pytest.raises(AssertionError):
        lives.run(25)
