"""NaN logits a row; a NaN row leaves the other rows' tokens alone (mrv2.md 49)."""

from __future__ import annotations

import pytest
import torch

from mrv2lab.ops.nan_count import nan_count
from tests.ops.backends import BACKENDS, CPU_BACKENDS, Apply, caught, implementation, mutant, poisoned
from tests.ops.floats import randn
from tests.ops.test_argmax import greedy

NAN, INF = float("nan"), float("inf")


def check(apply: Apply, vocab: int = 5000, dtype: torch.dtype = torch.float32) -> None:
    """Rows: none, one, padding, all; NaN around the view does not count, infinities neither."""
    raw = randn(4, vocab + 2, dtype=dtype)
    raw[:, 0] = raw[:, -1] = NAN
    raw[0, 1] = INF
    raw[1, vocab] = NAN
    raw[2:] = NAN
    out = poisoned(4)
    apply(out, raw[:, 1 : vocab + 1], torch.tensor([0, 3, -1, 1], dtype=torch.int32))
    assert out.tolist() == [0, 1, 0, vocab]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("vocab", [1, 7, 4096, 5000])
def test_nan_count(backend, dtype, vocab):
    check(implementation(nan_count, backend), vocab, dtype)


@pytest.mark.parametrize("backend", [BACKENDS[0], BACKENDS[2]])
def test_full_size(backend):
    check(implementation(nan_count, backend), 151_936, torch.bfloat16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_nan_row_is_nobody_elses_affair(backend):
    logits = randn(3, 1000)
    before = greedy(backend, logits)
    logits[1, 17] = NAN
    out = poisoned(3)
    implementation(nan_count, backend)(out, logits, torch.arange(3, dtype=torch.int32))
    assert out.tolist() == [0, 1, 0]
    after = greedy(backend, logits)
    assert (after[0], after[2]) == (before[0], before[2])


MUTANTS = {
    "spec": [("if index >= 0 else 0", ""), ("isnan().sum()", "isnan().any()"), ("isnan()", "isfinite().logical_not()")],
    "interpret": [
        ("if tl.load(expanded_idx_mapping + row) >= 0:", "if tl.load(expanded_idx_mapping + row) >= -1:"),
        ("count += ", "count = "),
        ("other=0.0", 'other=float("nan")'),
    ],
}


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("bug", range(3))
def test_mutants(backend, bug, tmp_path):
    assert caught(check, implementation(mutant(nan_count, *MUTANTS[backend][bug], tmp_path), backend))
