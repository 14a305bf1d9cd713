"""What a screen of 80 columns shows, and what it keeps of names that are too long."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from mrv2lab.trace.report import report
from mrv2lab.trace.screen import changes_table, comparison_table, shorter_site, shorter_step, tables, untold
from mrv2lab.trace.trace import Trace
from tests.trace.hand_made import HandMade

SITE = "vllm/v1/worker/some_long_folder/gpu_model_runner.py"


def shown(*parts: Any, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    for part in parts:
        console.print(part)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in text.splitlines())
    return str(text)


def waits(count: int = 2, overhead: bool = False) -> Trace:
    made = HandMade().frame(0, 90_000, f"{SITE}(2711): execute_model")
    for number in range(count):
        at = 30_000 * number
        made.step(at, 29_000, 12_345 + number)
        made.call(at + 10, 14_000 + number, "cudaDeviceSynchronize", number)
        if overhead:
            made.overhead(at + 20, 5)
    return made.build()


@pytest.mark.parametrize("width", [80, 100, 200])
def test_sites_and_numbers_of_steps_survive(width: int) -> None:
    text = shown(*tables(report(waits()), width), width=width)
    assert "gpu_model_runner.py:2711" in text
    assert "#12345" in text and "#12346" in text
    assert "14,001.0" in text


def test_a_column_of_nothing_is_left_out() -> None:
    assert "overhead" not in shown(*tables(report(waits())))
    assert "overhead" in shown(*tables(report(waits(overhead=True)), 120), width=120)


def test_the_longest_wait_comes_first_and_each_kind_has_a_sum() -> None:
    text = shown(*tables(report(waits())))
    assert "waits by kind" in text and "28,001.0" in text
    single = text[text.index("syncs, waits") :]
    assert single.index("14,001.0") < single.index("14,000.0")


@pytest.mark.parametrize(
    ("site", "width", "expected"),
    [
        ("a/b.py:3", 20, "a/b.py:3"),
        ("folder/of/many/parts/file.py:123", 20, "…y/parts/file.py:123"),
        ("x/a_very_long_name_of_a_file.py:123", 20, "…a_very_long_name_of_a_file.py:123"),
    ],
)
def test_a_site_is_cut_on_the_left(site: str, width: int, expected: str) -> None:
    assert shorter_site(site, width) == expected


def test_a_step_keeps_its_number() -> None:
    assert shorter_step("ProfilerStep#6") == "ProfilerStep#6"
    assert shorter_step("some.long.name.of.a.step#1234567", 19) == "some.long.…#1234567"
    assert shorter_step("execute_context_1(888_788544)_generation_0(0)", 19) == "execute_context_1(…"


def row(phase: str, verdict: str, reason: str, group: str = "phase") -> dict[str, Any]:
    figures = dict.fromkeys(("median_a_ns", "median_b_ns", "difference_ns"), 1_500)
    return {"group": group, "phase": phase, "n_a": 9, "n_b": 9, "verdict": verdict, "reason": reason} | figures


def test_what_cannot_be_told_is_one_line() -> None:
    rows = [row("host", "cannot tell", "noise", "step"), row("gather", "a faster", "p")]
    rows += [row(f"phase {number}", "cannot tell", "too few" if number else "only in b") for number in range(4)]
    text = shown(comparison_table(rows, "a: x   b: y"))
    assert "host" in text and "gather" in text and "phase 1" not in text
    assert untold(rows) == [
        "cannot tell: 4 phases more (phase 0, phase 1, phase 2, ...): too few; 1 for other reasons; "
        "--json has the figures"
    ]
    assert untold(rows[:2]) == []


def test_names_of_one_side_are_shown() -> None:
    rows = [
        {"kind": "op", "name": "CatBackward0", "change": "added", "count_a": 0, "count_b": 1, "difference_ns": 11_000},
        {"kind": "kernel", "name": "gemm", "change": "count", "count_a": 3, "count_b": 2, "difference_ns": -4_000},
        {"kind": "kernel", "name": "same", "change": "time", "count_a": 3, "count_b": 3, "difference_ns": 9},
    ]
    table = changes_table(rows)
    text = shown(table)
    assert "CatBackward0" in text and "only in b" in text and "in both" in text and "-4.0" in text
    assert "same" not in text
    assert changes_table(rows[2:]) is None
