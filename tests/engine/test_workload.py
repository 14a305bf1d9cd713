"""Workloads as values, and as tables from other people's spreadsheets."""

from __future__ import annotations

from pathlib import Path

import pytest

from mrv2lab.engine.workload import Arrival, Workload, burst, from_csv, steady
from mrv2lab.protocol import SamplingParams


def table(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "load.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_burst_and_steady_are_seeded_values() -> None:
    assert burst(5, seed=3) == burst(5, seed=3) != burst(5, seed=4)
    assert [arrival.step for arrival in burst(3)] == [0, 0, 0]
    assert [arrival.step for arrival in steady(3, every=4)] == [0, 4, 8]
    assert all(3 <= arrival.prompt <= 5 for arrival in burst(40, prompt_len=(3, 5)))  # type: ignore[operator]


def test_resolve_draws_the_same_prompts_every_time() -> None:
    one = burst(4, prompt_len=6).resolve(50)
    assert one == burst(4, prompt_len=6).resolve(50)
    assert one.resolve(50) == one
    assert all(isinstance(a.prompt, tuple) and len(a.prompt) == 6 and max(a.prompt) < 50 for a in one)


@pytest.mark.parametrize(
    "call",
    [
        lambda: burst(0),
        lambda: steady(2, every=-1),
        lambda: burst(2, prompt_len=0),
        lambda: burst(2, prompt_len=(8,)),  # type: ignore[arg-type]
        lambda: burst(2, prompt_len=2.5),  # type: ignore[arg-type]
        lambda: burst(2, max_tokens=(5, 4)),
    ],
)
def test_bad_shapes(call: object) -> None:
    with pytest.raises(ValueError, match=r"must be|got"):
        call()  # type: ignore[operator]


def test_from_csv(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        "step,prompt,prompt_len,max_tokens,temperature,seed,ignore_eos,priority\n"
        '4,"Once, upon a time",,8,0.7,-3,no,1\n'
        "0,,12,,,,yes,\n",
    )
    assert from_csv(path) == Workload(
        (
            Arrival(0, 12, SamplingParams(ignore_eos=True)),
            Arrival(4, "Once, upon a time", SamplingParams(max_tokens=8, temperature=0.7, seed=-3), 1),
        ),
        "load",
    )


def test_from_a_spreadsheets_csv(tmp_path: Path) -> None:
    """With a byte order mark and Windows line ends."""
    assert len(from_csv(table(tmp_path, "\ufeffprompt_len\r\n3\r\n4\r\n"))) == 2


def test_a_csv_that_is_no_utf8(tmp_path: Path) -> None:
    path = tmp_path / "load.csv"
    path.write_bytes("prompt\ncafé\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"load\.csv: not UTF-8 .*; save it as CSV in UTF-8"):
        from_csv(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "needs a column 'prompt' or 'prompt_len'"),
        ("step\n1\n", "needs a column 'prompt' or 'prompt_len'"),
        ("prompt_len\n", "no requests in it"),
        ("prompt_len,colour\n3,red\n", r"unknown columns \['colour'\]; known: \['ignore_eos'"),
        ("step,prompt_len\n0,4\n-1,4\n", "line 3: step must be >= 0, got -1"),
        ("step,prompt_len\nsoon,4\n", "line 2: step must be an integer, got 'soon'"),
        ("prompt\n" + "x" * 200_000, "line 1: field larger than field limit"),
        ("prompt_len\n0\n", "line 2: prompt_len must be >= 1, got 0"),
        ("prompt_len\n2.5\n", "line 2: prompt_len must be an integer, got '2.5'"),
        ("prompt_len,max_tokens\n3,0\n", "line 2: max_tokens must be >= 1, got 0"),
        ("prompt_len,temperature\n3,hot\n", "line 2: temperature must be a number >= 0, got 'hot'"),
        ("prompt_len,temperature\n3,nan\n", "line 2: temperature must be >= 0 and finite, as float32, got nan"),
        ("prompt_len,seed\n3,9223372036854775808\n", "line 2: seed must be None or a 64-bit integer"),
        ("prompt_len,ignore_eos\n3,perhaps\n", "line 2: ignore_eos must be one of 1, true, yes, .* got 'perhaps'"),
        ("prompt_len,priority\n3,high\n", "line 2: priority must be an integer, got 'high'"),
        ("prompt,prompt_len\nhello,\n,\n", "line 3: neither prompt nor prompt_len is given"),
        ("prompt_len\n3,4\n", r"line 2: more cells than columns: \['4'\]"),
        ('prompt,max_tokens\n"two\nlines",0\n', "line 3: max_tokens must be >= 1"),
    ],
)
def test_from_csv_names_file_line_and_column(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"load.csv.*{words}"):
        from_csv(table(tmp_path, text))
