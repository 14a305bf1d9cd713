"""silu_mul against float64."""

from __future__ import annotations

import pytest
import torch

from mrv2lab.ops.silu_mul import silu_mul
from tests.ops.backends import BACKENDS, Apply, caught, implementation, mutant, poisoned
from tests.ops.floats import assert_near, randn, skip_if_unfaithful


def check(apply: Apply, t: int = 2, width: int = 48, dtype: torch.dtype = torch.float32) -> None:
    gate_up = 3 * randn(t, 2 * width, dtype=dtype)
    out = poisoned(t, width, dtype=dtype)
    apply(out, gate_up)
    gate, up = gate_up[:, :width].double(), gate_up[:, width:].double()
    assert_near(out, gate / (1 + (-gate).exp()) * up)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("t", "width"), [(1, 1), (3, 704), (2, 1500), (0, 8)])
def test_silu_mul(backend, t, width):
    check(implementation(silu_mul, backend), t, width)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_half_precision(backend, dtype):
    skip_if_unfaithful(backend, dtype)
    check(implementation(silu_mul, backend), dtype=dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore:overflow")
def test_large_negative_gate_is_zero(backend):
    out = poisoned(1, 1, dtype=torch.float32)
    implementation(silu_mul, backend)(out, torch.tensor([[-200.0, 3.0]]))
    assert out.item() == 0.0


@pytest.mark.parametrize(
    ("backend", "old", "new"),
    [
        ("spec", "gate, up = gate_up", "up, gate = gate_up"),
        ("interpret", "gate / (1.0 + tl.exp(-gate))", "1.0 / (1.0 + tl.exp(-gate))"),
        ("interpret", "gate_up_stride + I + col", "gate_up_stride + col"),
    ],
    ids=["halves swapped", "sigmoid", "up is gate"],
)
def test_mutants(backend, old, new, tmp_path):
    pytest.importorskip("triton")
    assert caught(check, implementation(mutant(silu_mul, old, new, tmp_path), backend))
