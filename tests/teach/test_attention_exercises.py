"""Exercises of the lesson on the worker and attention, with wrong answers; and the pictures of a window's tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mrv2lab.engine.engine import Engine
from mrv2lab.protocol import SamplingParams
from mrv2lab.teach import attention_exercises as exercises
from mrv2lab.teach.attention_lesson import StepMetadata, metadata_of_next_step
from mrv2lab.teach.window_pictures import Growth, grow, held, held_picture, tables_picture
from tests.teach.test_attention_lesson import MODEL

SIZES: dict[str, Any] = {"device": "cpu", "max_num_reqs": 4, "num_blocks": 32, "block_size": 4, "max_model_len": 48}


@pytest.fixture(scope="module")
def steps() -> Iterator[tuple[StepMetadata, ...]]:
    """Request 0 decodes its 22nd token, request 1 prefills 5; a group that sees all, and one with a window of 6."""
    with Engine(MODEL, **SIZES) as engine:
        engine.submit(list(range(1, 21)), SamplingParams(max_tokens=8, ignore_eos=True))
        engine.step()
        engine.step()
        engine.submit(list(range(30, 35)), SamplingParams(max_tokens=8, ignore_eos=True))
        yield metadata_of_next_step(engine)


def _pages(seq_lens: Any, query_lens: Any, table: Any, size: int, window: int | None) -> tuple[Any, Any]:
    first = np.zeros_like(seq_lens) if window is None else np.maximum(seq_lens - query_lens - window + 1, 0) // size
    last = -(-seq_lens // size)
    starts = np.concatenate([[0], np.cumsum(last - first)])
    return starts, np.concatenate([row[a:b] for row, a, b in zip(table, first, last, strict=True)])


def test_pages(steps: tuple[StepMetadata, ...]) -> None:
    assert exercises.check_pages(_pages, steps).right
    wrongs: tuple[tuple[Any, str], ...] = (
        (lambda n, q, t, s, w: _pages(n // s * s, q, t, s, w), "the last block need not be full"),
        (lambda n, q, t, s, w: _pages(n, q, t, s, None), "blocks behind the window are not read"),
        (lambda n, q, t, s, w: _pages(n, q, t, s, w and w - 4), "it sees itself too"),
        (lambda n, q, t, s, w: _pages(n + 8, q, t, s, w), "request 0 with 22 tokens has 6 pages, you have 8"),
        (lambda n, q, t, s, w: (_pages(n, q, t, s, w)[0][:-1], []), "2 requests have 3 starts"),
        (lambda n, q, t, s, w: (_pages(n, q, t, s, w)[0], []), "page 0 is block 1, you have nothing"),
        (lambda n, q, t, s, w: _pages(n, q, t + 1, s, w), "page 0 is block 1, you have 2"),
        (lambda n, q, t, s, w: 1 // 0, "raised ZeroDivisionError"),
    )
    for wrong, hint in wrongs:
        verdict = exercises.check_pages(wrong, steps)
        assert not verdict.right and hint in verdict.reason


def test_an_answer_cannot_spoil_the_step(steps: tuple[StepMetadata, ...]) -> None:
    def spoil(seq_lens: Any, query_lens: Any, table: Any, size: int, window: int | None) -> tuple[Any, Any]:
        made = _pages(seq_lens, query_lens, table, size, window)
        seq_lens[:] = query_lens[:] = table[:] = 0
        return made

    assert exercises.check_pages(spoil, steps).right and exercises.check_pages(_pages, steps).right


def test_let_go() -> None:
    check = exercises.check_let_go
    assert check(lambda position, window, size: max(position - window + 1, 0) // size).right
    wrongs: tuple[tuple[Any, str], ...] = (
        (lambda p, w, s: max(p - w, 0) // s, "whose tokens nobody sees any more"),
        (lambda p, w, s: max(p - w + s, 0) // s, "and that is seen"),
        (lambda p, w, s: (p - w + 1) // s, "a table begins at entry 0"),
        (lambda p, w, s: max(p - w + 1, 0) / s, "is no index"),
        (lambda p, w, s: 0, "nobody sees"),
    )
    for wrong, hint in wrongs:
        verdict = check(wrong)
        assert not verdict.right and hint in verdict.reason


def test_frozen(steps: tuple[StepMetadata, ...]) -> None:
    step = steps[0]
    host = ["kind", "indptr_np", "first_page_np", "last_page_len_np", "query_start_loc_np", "plan"]
    assert exercises.check_frozen(step, "triton", ["max_query_len", "split"]).right
    assert exercises.check_frozen(step, "flashinfer", host).right
    for backend, wrong, hint in (
        ("triton", None, "in place of None"),
        ("triton", ["max_query_len"], "1 more of triton's"),
        ("triton", ["seq_lens", "max_query_len"], "seq_lens is on the device"),
        ("triton", ["plan"], "triton has no field 'plan'"),
        ("flashinfer", host[1:], "1 more of flashinfer's"),
        ("flashinfer", ["page_indices"], "page_indices is on the device"),
    ):
        verdict = exercises.check_frozen(step, backend, wrong)
        assert not verdict.right and hint in verdict.reason


def test_tensors() -> None:
    six = dataclasses.replace(
        MODEL, num_hidden_layers=6, layer_types=("full_attention", *("sliding_attention",) * 2) * 2
    )
    assert exercises.check_tensors(six, [0, 0, 1, 1, 2, 3]).right
    for wrong, hint in (
        (None, "in place of None"),
        ([0, 0, 1, 1, 2], "6 layers have 6 entries; you have 5"),
        (range(6), "a tensor of its own"),
        ([0, 0, 0, 1, 1, 1], "two sliding layers in one tensor"),
        ([0, 0, 1, 0, 2, 3], "two full layers in one tensor"),
        ([1, 0, 1, 0, 2, 3], "layer 0: the i-th layer"),
    ):
        verdict = exercises.check_tensors(six, wrong)
        assert not verdict.right and hint in verdict.reason


# -- a request's tables as it grows ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def life() -> list[Growth]:
    with Engine(MODEL, **SIZES) as engine:
        return list(grow(engine, range(1, 9), max_tokens=24))


def test_a_window_holds_no_more_while_the_other_group_grows(life: list[Growth]) -> None:
    frame = held(life)
    assert all(len(one.tables[0]) == len(one.tables[1]) for one in life), "tables stay equally long"
    assert frame[0].is_monotonic_increasing and frame[0].iloc[-1] == -(-frame.index[-1] // 4)
    assert frame[1].max() <= 3 and life[-1].tables[1][:4] == [0, 0, 0, 0]


def test_pictures_show_each_entry_once(life: list[Growth]) -> None:
    figure = tables_picture(life, ["all", "six"], every=len(life))  # the first moment and the last
    shown = life[0], life[-1]
    entries = sum(len(table) for one in shown for table in one.tables)
    nulls = sum(block == 0 for one in shown for table in one.tables for block in table)
    cells = {trace.name: len(trace.x) for trace in figure.data}
    assert sorted(cells.values()) == sorted([nulls, entries - nulls]) and nulls
    assert {trace.marker.symbol for trace in figure.data} == {"square", "square-x"}, "colour is not the only cue"
    lines = held_picture(held(life), ["all", "six"]).data
    assert [line.name for line in lines] == ["all", "six"]
    assert lines[0].line.dash != lines[1].line.dash
