"""Steps whose processed logits nobody reads: the draw applies temperature and cut by itself, and chooses what it would
choose from processed logits; twins, mutants."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mrv2lab.protocol import SamplingParams
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.sample import Sampler
from tests.runtime.machines import machine
from tests.sample.pipeline import Pipeline

SETTINGS: list[dict[str, Any]] = [
    {"min_p": 0.1},
    {"top_k": 7},
    {"top_p": 0.8},
    {"top_k": 30, "top_p": 0.9},
    {"min_p": 0.5, "top_p": 0.9},
    {},
]
EDITS: list[dict[str, Any]] = [{}, {"presence_penalty": 0.7}, {"logit_bias": {3: 2.0}}]


class InTheDraw(Sampler):
    """As an engine has it whose log-probabilities are raw."""

    def __init__(self, *args: Any, keep_processed: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class Observed(InTheDraw):
    """As the twin has it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.observed = True


def pipeline(sampler: type[Sampler], kind: int, rt: Any = None, vocab: int = 1000, **options: Any) -> Pipeline:
    """Requests that use one cut, or none, or min-p and top-p together (``kind``); some greedy, some edited."""

    def params(i: int, rng: np.random.Generator) -> SamplingParams:
        own = SETTINGS[kind] if i % 4 else {}
        edits = EDITS[int(rng.integers(3))] if kind % 2 else {}
        temperature = float(rng.choice([0.0, 0.6, 1.0, 1.4]))
        return SamplingParams(max_tokens=20, temperature=temperature, seed=int(rng.integers(1 << 40)), **own, **edits)

    return Pipeline(rt or CpuRuntime(), vocab=vocab, rows=7, seed=kind, params=params, sampler=sampler, **options)


def check(kind: int, sampler: type[Sampler] = InTheDraw, **options: Any) -> None:
    """Tokens as chosen from processed logits, which an observer sees."""
    whole, drawn, seen = (pipeline(one, kind, **options) for one in (Sampler, sampler, Observed))
    want, tokens, _ = whole.run()
    assert drawn.run()[1] == tokens
    assert seen.run()[1] == tokens
    shown = seen.lives.stage.processed
    if seen.lives.stage.scaled:
        np.testing.assert_array_equal(seen.rt.read(shown).double().numpy(), want)
    else:
        assert kind == 5


@pytest.mark.parametrize("kind", range(len(SETTINGS)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_it_chooses_the_same(kind, dtype):
    check(kind, dtype=dtype, strided=kind % 2 == 0)


@pytest.mark.parametrize("kind", range(5))
def test_it_chooses_the_same_in_the_interpreter(kind):
    pytest.importorskip("triton")
    whole = pipeline(Sampler, kind, vocab=40, drafts=0)
    drawn = pipeline(InTheDraw, kind, CpuRuntime(backend="interpret"), vocab=40, drafts=0)
    assert drawn.run()[1] == whole.run()[1]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", range(len(SETTINGS)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_it_chooses_the_same_on_a_gpu(kind, dtype):
    with machine("cuda") as one, machine("cuda") as other:
        whole = pipeline(Sampler, kind, one, vocab=151_936, dtype=dtype)
        drawn = pipeline(InTheDraw, kind, other, vocab=151_936, dtype=dtype)
        assert drawn.run()[1] == whole.run()[1]


class ShareOfAll(InTheDraw):
    """Leaves both of two cuts to the draw: the second alone is applied."""

    def _uses(self, rows: Any) -> Any:
        greedy, edits, cuts, tempered = super()._uses(rows)
        return greedy, edits, cuts[-1:], tempered


class Undivided(InTheDraw):
    """Looks for the cut of logits that nobody divides."""

    def sample(self, out: Any, logits: Any, context: Any) -> Any:
        ones = self.rt.adopt(torch.ones(len(self.state.temperature.np)), "ones")
        self.top_k_top_p.temperature = SimpleNamespace(gpu=ones)  # type: ignore[assignment]
        return super().sample(out, logits, context)


@pytest.mark.parametrize(("kind", "mutant"), [(4, ShareOfAll), (2, Undivided)])
def test_mutants(kind, mutant):
    with pytest.raises(AssertionError):
        check(kind, mutant)
