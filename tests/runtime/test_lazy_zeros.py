"""A large buffer of zeros takes memory where it is written, not where it is made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from mrv2lab.runtime.cpu import ALIGNMENT, LAZY_BYTES, CpuRuntime
from mrv2lab.runtime.places import Place

STATM = Path("/proc/self/statm")


def resident() -> int:
    """Bytes of this process in memory."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not STATM.exists(), reason="resident memory is read from Linux's /proc")
def test_a_gibibyte_that_nobody_writes_is_not_resident() -> None:
    rt, before = CpuRuntime(), resident()
    made = rt.zeros((1 << 14, 1 << 15), torch.bfloat16, name="cache")
    assert resident() - before < 64 << 20, "and with torch.zeros it would be 1 GiB"
    rt.raw(made)[:2048].fill_(1)
    assert resident() - before > 64 << 20
    assert rt.registry.nbytes(Place.DEVICE) == 1 << 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("place", ["device", "uva", "pinned"])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_it_is_a_buffer_like_any_other(dtype: torch.dtype, place: str, more: int) -> None:
    rt, size = CpuRuntime(), LAZY_BYTES // dtype.itemsize + more
    made = rt.zeros((1, size), dtype, name="zeros", place=place)
    found = rt.registry.find(made)
    assert found is not None and (found.name, found.place.value) == ("zeros", place)
    assert found.nbytes == size * dtype.itemsize
    raw = rt.raw(made)
    assert raw.shape == (1, size) and raw.dtype == dtype and raw.is_contiguous() and not raw.any()
    assert raw.data_ptr() % ALIGNMENT == 0
    raw.fill_(1)
    assert raw.all() and type(made) is type(rt.empty(1, dtype, name="like", place=place))
    address = rt.registry.address(made)
    del made, raw
    assert rt.registry.at(address) is None


def test_an_integer_is_a_shape() -> None:
    assert CpuRuntime().zeros(LAZY_BYTES, torch.uint8, name="flat").shape == (LAZY_BYTES,)
