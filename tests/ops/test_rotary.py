"""rotary against float64: rotate_half convention, q/k norm, views of one qkv buffer."""

from __future__ import annotations

import pytest
import torch

from mrv2lab.ops.rotary import rotary
from tests.ops.backends import BACKENDS, Apply, caught, implementation, mutant
from tests.ops.floats import assert_near, randn, skip_if_unfaithful

EPS = 1e-2


def table(length: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32[L, D/2] cosines and sines."""
    angle = torch.arange(length).double()[:, None] / 100.0 ** (torch.arange(0, head_dim, 2).double() / head_dim)
    return angle.cos().float(), angle.sin().float()


def rotated(x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [t, heads, D] as complex numbers a + ib turned by the angle."""
    half = cos.shape[1]
    turn = torch.complex(cos.double(), sin.double())[positions][:, None]
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn
    return torch.cat((turned.real, turned.imag), -1)


def check(
    apply: Apply,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 16,
    norm: bool = True,
    dtype: torch.dtype = torch.float32,
) -> None:
    hq, hk = heads
    positions = torch.tensor([0, 9, 4])
    cos, sin = table(10, head_dim)
    qkv = randn(3, (hq + 2 * hk) * head_dim, dtype=dtype)
    weights = [1 + 0.5 * randn(head_dim, dtype=dtype, seed=s) if norm else None for s in (1, 2)]
    before = qkv.clone().unflatten(-1, (-1, head_dim)).double()
    want = before.clone()
    for part, weight in zip((slice(0, hq), slice(hq, hq + hk)), weights, strict=True):
        x = before[:, part]
        if weight is not None:
            x = x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
        want[:, part] = rotated(x, positions, cos, sin)
    q, k = qkv[:, : hq * head_dim], qkv[:, hq * head_dim : (hq + hk) * head_dim]
    apply(q, k, positions, cos, sin, *weights, EPS)
    got = qkv.unflatten(-1, (-1, head_dim))
    assert_near(got[:, : hq + hk], want[:, : hq + hk])
    assert torch.equal(got[:, hq + hk :].double(), before[:, hq + hk :])  # v is not touched


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "qk_norm"])
@pytest.mark.parametrize(("heads", "head_dim"), [((8, 4), 32), ((3, 1), 48), ((1, 1), 2), ((9, 3), 64)])
def test_rotary(backend, norm, heads, head_dim):
    check(implementation(rotary, backend), heads, head_dim, norm)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "qk_norm"])
def test_bfloat16(backend, norm):
    skip_if_unfaithful(backend, torch.bfloat16)
    check(implementation(rotary, backend), norm=norm, dtype=torch.bfloat16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens(backend):
    cos, sin = table(4, 8)
    none = torch.empty(0, dtype=torch.int64)
    implementation(rotary, backend)(torch.empty(0, 8), torch.empty(0, 8), none, cos, sin, None, None, EPS)


@pytest.mark.parametrize(
    ("backend", "old", "new"),
    [
        ("spec", "torch.cat((a * c - b", "torch.cat((a * c + b"),
        ("spec", "cos[positions].unsqueeze(1)", "cos[: len(positions)].unsqueeze(1)"),
        ("spec", "(k, k_weight)", "(k, q_weight)"),
        ("interpret", "at + HALF, (b * c + a * s)", "at + HALF, (b * c - a * s)"),
        ("interpret", "/ (2 * HALF) + eps", "/ HALF + eps"),
        ("interpret", "cos + position * HALF", "cos + row * HALF"),
    ],
    ids=["turned back", "row for position", "q's weight on k", "sign", "norm by D/2", "row for position (kernel)"],
)
def test_mutants(backend, old, new, tmp_path):
    pytest.importorskip("triton")
    assert caught(check, implementation(mutant(rotary, old, new, tmp_path), backend))
