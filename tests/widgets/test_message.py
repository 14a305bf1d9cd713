"""The message: what the page gets of a view, byte for byte."""

from __future__ import annotations

import math

import numpy as np
import orjson

from mrv2lab.recording.view import StepView
from mrv2lab.widgets.step_explorer.message import Shown, encode, pack_columns


def test_columns_lie_one_behind_the_other_on_multiples_of_eight() -> None:
    table, blob = pack_columns({"a": np.array([1, 2, 3], np.int32), "b": np.array([-1], np.int64)})
    assert table == [["a", "int32", 0, 3], ["b", "int64", 16, 1]]
    assert blob.hex() == "01000000020000000300000000000000ffffffffffffffff"


def test_types_without_a_typed_array_become_ones_that_have() -> None:
    table, blob = pack_columns({"a": np.array([True, False]), "b": np.array([1.5], ">f4"), "c": np.empty(0, np.uint64)})
    assert [(name, dtype) for name, dtype, _, _ in table] == [("a", "uint8"), ("b", "float32"), ("c", "float64")]
    assert blob[:2] == b"\x01\x00" and blob[8:12] == np.float32(1.5).tobytes()


def test_a_view_is_a_header_and_two_buffers() -> None:
    view = StepView(
        {"texts": {7: None}, "top_k": [math.nan, np.float32(2)]}, {"rows.request": np.array([-1], np.int32)}
    )
    content, buffers = encode(3, [Shown("t", False, 9, view), Shown("u", True, 2, None, "This source has no step 3.")])
    assert content == {
        "type": "views",
        "index": 3,
        "count": 9,
        "status": "",
        "views": [
            {"title": "t", "live": False, "count": 9, "index": 3, "columns": [["rows.request", "int32", 0, 1]]},
            {"title": "u", "live": True, "count": 2, "index": 3, "error": "This source has no step 3."},
        ],
    }
    assert orjson.loads(buffers[0]) == {"texts": {"7": None}, "top_k": [None, 2.0]}
    assert buffers[1] == b"\xff\xff\xff\xff\0\0\0\0"
