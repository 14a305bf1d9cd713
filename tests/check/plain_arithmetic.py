"""Arithmetic that two machines, and two runs, do alike."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def plain_arithmetic() -> Iterator[None]:
    """One thread, so that rows do not depend on the core count, and float32 products in float32 on a GPU."""
    threads, tf32 = torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = tf32
