"""The whole MRV2 sampler against the float64 oracle: every parameter, mixed, on every shape and type of logits."""

from __future__ import annotations

import importlib.util
import itertools
from contextlib import ExitStack

import pytest
import torch

from mrv2lab.runtime.cpu import CpuRuntime
from tests.runtime.machines import MACHINES, machine
from tests.sample.pipeline import Pipeline
from tests.slow import mostly_slow

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
VOCABS = [7, 1000, 49152, pytest.param(151936, marks=pytest.mark.slow)]
ON_ONE_STREAM = [one for one in MACHINES if one != "threaded"]
ROWS = [1, 3, pytest.param(256, marks=pytest.mark.slow)]


@pytest.fixture
def make(request):
    """A pipeline on a machine of its own: a runtime binds each name once."""
    with ExitStack() as stack:
        yield lambda **kwargs: Pipeline(stack.enter_context(machine(request.param)), **kwargs)


one_stream = pytest.mark.parametrize("make", ON_ONE_STREAM, indirect=True)


@one_stream
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_shapes(make, vocab, rows, dtype, strided):
    """With 0 to 4 drafts a request; on a GPU the compiled kernels."""
    rounds = max(1, min(8, 12 // rows)) if vocab <= 1000 else 1
    for seed in range(rounds):
        pipeline = make(vocab=vocab, rows=rows, seed=seed + rows, dtype=TYPES[dtype], strided=strided)
        assert pipeline.check() >= rows


@one_stream
@pytest.mark.parametrize("drafts", range(5))
def test_drafts(make, drafts):
    for seed in range(3):
        make(vocab=97, rows=6, drafts=drafts, seed=seed).check()


@pytest.mark.parametrize("make", MACHINES, indirect=True)
@pytest.mark.parametrize(
    ("mode", "policy"),
    mostly_slow(
        sorted(
            itertools.product(
                ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"],
                ["barrier", "pinned_copy", "uva_pool"],
            ),
            key=lambda both: both[0] != "raw_logprobs" and both[1] != "uva_pool",
        ),
        6,
    ),
)
def test_modes_and_policies(make, mode, policy):
    """By default each mode with one policy and each policy with one mode."""
    for seed in range(3):
        make(vocab=1000, rows=6, seed=10 + seed, mode=mode, policy=policy).check()


@one_stream
@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("vocab", [7, 200, 5000])
def test_ties(make, vocab, levels):
    """Few different values: exactly k survive, ties go to the lowest ids."""
    for seed in range(4):
        make(vocab=vocab, rows=8, seed=20 + seed, levels=levels).check()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("seed", range(3))
def test_in_the_interpreter(seed):
    """The kernels themselves, on one request or two of seven tokens."""
    rt = CpuRuntime(backend="interpret")
    assert Pipeline(rt, vocab=(7, 40)[seed % 2], rows=2, drafts=1, seed=seed, mode="processed_logprobs").check() >= 2


@pytest.mark.slow
@one_stream
@pytest.mark.parametrize("seed", range(100))
def test_many(make, seed):
    vocab = (7, 61, 331, 1000, 5000)[seed % 5]
    levels = (0, 0, 2)[seed % 3]
    dtype = (torch.float32, torch.bfloat16)[seed % 2]
    make(vocab=vocab, rows=24, seed=100 + seed, dtype=dtype, strided=seed % 4 == 0, levels=levels).check()


@pytest.mark.gpu
@pytest.mark.parametrize("make", ["cuda"], indirect=True)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("vocab", [1000, 49152, 151936])
def test_many_rows_on_a_gpu(make, vocab, dtype):
    for seed in range(2):
        make(vocab=vocab, rows=256 if vocab < 100_000 else 32, seed=seed, dtype=TYPES[dtype]).check()
