"""Columns as .npy: what NumPy reads, and nothing else than what was written."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import pytest

from mrv2lab.recording.npy import from_npy, narrow, to_npy
from mrv2lab.recording.schema import RecordingError


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([], "uint8"),
        ([0, 255], "uint8"),
        ([-128, 127], "int8"),
        ([-1, 255], "int16"),
        ([0, 65_535], "uint16"),
        ([0, 151_935], "uint32"),
        ([-1, 2**31 - 1], "int32"),
        ([0, 2**32], "int64"),
        ([-(2**63), 2**63 - 1], "int64"),
    ],
)
def test_the_narrowest_type_that_holds_them(values: list[int], dtype: str) -> None:
    column = narrow(np.array(values, np.int64))
    assert (column.dtype, column.tolist()) == (dtype, values)


@pytest.mark.parametrize("dtype", ["u1", "i1", "<u2", "<i2", "<u4", "<i4", "<i8", "<f4"])
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_numpy_reads_it_and_so_do_we(dtype: str, count: int) -> None:
    values = np.arange(count).astype(dtype)
    data = to_npy(values)
    for read in (np.load(io.BytesIO(data), allow_pickle=False), from_npy(data, "x")):
        assert read.dtype == values.dtype
        assert read.tolist() == values.tolist()
    plain = io.BytesIO()
    np.save(plain, values)
    assert from_npy(plain.getvalue(), "x").tolist() == values.tolist(), "what np.save writes is read too"


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, value, allow_pickle=True)
    return file.getvalue()


GOOD = to_npy(np.arange(5, dtype=np.int32))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        GOOD[:5],
        GOOD[:20],
        GOOD[:-1],
        GOOD + b"\0",
        pickle.dumps([1, 2]),
        saved(np.array([{"a": 1}], object)),
        saved(np.zeros((2, 2), np.int32)),
        saved(np.int32(3)),
        saved(np.zeros(3, ">i4")),
        saved(np.zeros(3, np.float64)),
        saved(np.zeros(3, [("a", "i4"), ("b", "i4")])),
        saved(np.array(["text"])),
        GOOD.replace(b"(5,)", b"(999999999999,)"),
        GOOD.replace(b"(5,)", b"(-5,)"),
        GOOD.replace(b"(5,)", b"(05,)"),
        GOOD.replace(b"<i4", b"|O8"),
        GOOD.replace(b"{'descr'", b"[[[[[[[["),
        GOOD.replace(b"\x93NUMPY\x01", b"\x93NUMPY\x02"),
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(RecordingError, match=r"^marks\.nbytes "):
        from_npy(data, "marks.nbytes")
