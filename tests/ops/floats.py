"""Floating-point comparisons and the cases that the float ops share."""

from __future__ import annotations

import pytest
import torch

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest error as a part of the largest reference value of a row: a few roundings of the type."""


def assert_near(got: torch.Tensor, want: torch.Tensor, times: float = 1.0) -> None:
    """Every row of ``got`` within ``times`` the tolerance of its type of the float64 ``want``; NaN fails."""
    assert got.shape == want.shape
    error = (got.double() - want).abs().amax(-1)
    bound = TOLERANCE[got.dtype] * times * want.abs().amax(-1).clamp_min(1e-30)
    assert bool((error <= bound).all()), f"worst error {(error / bound).max().item():.3g} of the bound"


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Standard normal numbers, the same in every run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def skip_if_unfaithful(backend: str, dtype: torch.dtype) -> None:
    """Triton's interpreter truncates to bfloat16 instead of rounding, and its bfloat16 tl.dot multiplies the bits."""
    if backend == "interpret" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter cannot do bfloat16")
