import importlib.util

import pytest
import torch

from mrv2lab.ops.spin import spin
from tests.ops.backends import BACKENDS, CPU_BACKENDS, Apply, caught, compile_for_gpu, expect, implementation, mutant


def check(apply: Apply) -> None:
    # Marsaglia's paper starts xorshift32 from 2463534242; these are its first values.
    seed = 2463534242 - 2**32
    for rounds, value in ((0, 2463534242), (1, 723471715), (2, 2497366906), (3, 2064144800)):
        want = value - 2**32 if value >= 2**31 else value
        expect(spin, apply, {"state": [want]}, state=torch.tensor([seed], dtype=torch.int32), rounds=rounds)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_xorshift32(backend: str) -> None:
    check(implementation(spin, backend))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_mutants_are_caught(backend: str, tmp_path) -> None:
    bug = ("(x << 5) &", "(x << 6) &") if backend == "spec" else ("x ^= x << 13", "x ^= x << 12")
    assert caught(check, implementation(mutant(spin, *bug, tmp_path), backend))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_compiler_keeps_the_loop(tmp_path) -> None:
    """Rounds are data, and every round's shifts are there: no closed form was found."""
    ptx = compile_for_gpu(spin, (torch.ones(1, dtype=torch.int32), 1000), tmp_path)
    assert "bra" in ptx
    assert ptx.count("xor.b32") >= 3
