"""The rotary table, computed in float32 step for step like Hugging Face's default rope, so that its bits agree."""

from __future__ import annotations

import torch


def rope_table(length: int, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32[length, head_dim / 2]: entry (p, i) is of the angle p / theta^(2i / head_dim)."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    angle = torch.arange(length).float()[:, None] * (1.0 / theta**exponent)[None, :]
    return angle.cos(), angle.sin()
