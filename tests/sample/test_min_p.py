"""The min-p stage: A10, rows that do not use it, drafts' rows, the cut in place of the mask."""

from __future__ import annotations

import numpy as np
import pytest

from mrv2lab.protocol import SamplingParams
from mrv2lab.runtime.base import Runtime
from mrv2lab.sample.min_p import MinP
from mrv2lab.sample.sampling_state import SamplingState
from mrv2lab.sample.stage import SampleContext
from tests.runtime.machines import marks
from tests.sample import oracle
from tests.sample.lives import Life, Lives

INF = float("inf")


class Stage(MinP):
    """With its state's tables behind it, as the runner drives them."""

    def __init__(self, lives: Lives) -> None:
        state = SamplingState(lives.transfers, max_num_reqs=lives.rows, vocab_size=lives.vocab)
        super().__init__(lives.rt, state, max_num_logits=3 * lives.rows, vocab_size=lives.vocab)
        self.add_request = state.add_request
        self.apply_staged_writes = state.apply_staged_writes


def lives_of(rt: Runtime, *min_p: float, vocab: int = 40) -> tuple[Lives, SampleContext]:
    """Requests a, b, ... with two drafts each, prepared."""
    lives = Lives(rt, Stage, lambda *_: Life("", SamplingParams(), [1]), vocab=vocab)
    names = "abcde"[: len(min_p)]
    for name, p in zip(names, min_p, strict=True):
        lives.add(Life(name, SamplingParams(min_p=p, temperature=1.0), [1]))
    return lives, lives.begin(dict.fromkeys(names, 3), {name: [5, 6] for name in names})


def test_a10(rt):
    lives, context = lives_of(rt, 0.1, vocab=4)
    logits = lives.logits([[2.0, 1, 0, -3]] * 3)
    lives.stage.apply(logits, context)
    assert rt.read(logits).tolist() == [[2, 1, 0, -INF]] * 3


@pytest.mark.parametrize("vocab", [7, 5000])
def test_rows_by_request(rt, vocab):
    lives, context = lives_of(rt, 0.2, 0.0, 1.0, 0.01, vocab=vocab)
    rng = np.random.default_rng(vocab)
    values = (rng.normal(0, 3, (12, vocab))).astype(np.float32)
    values[rng.random(values.shape) < 0.2] = -INF
    logits = lives.logits(values)
    cut, none, group_max = lives.stage.cut(logits, context)
    assert none is None
    best = rt.read(group_max)[0, 0].item()
    assert best == values[0, :128].max()
    lives.stage.apply(logits, context)
    got, cuts = rt.read(logits).numpy(), rt.read(cut).numpy()
    by_cut = np.where(values >= cuts[:, None], values, -INF)
    assert np.array_equal(got, by_cut)
    p = {"a": 0.2, "b": 0.0, "c": 1.0, "d": 0.01}
    for row in range(12):
        x = values[row].astype(np.float64)
        own = p[context.batch.host.req_ids[row // 3]]
        differ = (got[row] > -INF) != (oracle.min_p(x, own) > -INF)
        assert not (differ & ~oracle.excused(x, min_p_value=own)).any()


def test_nothing_is_launched_without_users(cpu):
    lives, context = lives_of(cpu, 0.0, 0.0)
    assert not lives.stage.used(context.rows)
    assert not [mark for mark in marks(cpu, "kernel") if mark.name.startswith("min_p")]
    lives, context = lives_of(cpu, 0.0, 0.3)
    assert lives.stage.used(context.rows)
