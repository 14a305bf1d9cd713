"""The lesson's exercises judge right and wrong answers with a reason, and its pictures draw what they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mrv2lab.ops.noise import noise_spec
from mrv2lab.teach import sampling_pictures as pictures
from mrv2lab.teach.noise_lab import OURS, grid
from mrv2lab.teach.sampling_exercises import (
    LAW,
    check_draw,
    check_key,
    check_min_p,
    check_top_p,
    kept_tokens,
)
from mrv2lab.teach.sampling_lab import softmax
from tests.sample import oracle


# -- exercises -----------------------------------------------------------------------------------------------------
def right_top_p(logits: Any, p: float) -> Any:
    order = np.argsort(-logits, kind="stable")
    before = np.cumsum(softmax(logits)[order]) - softmax(logits)[order]
    keep = np.zeros(len(logits), bool)
    keep[order[before < p - 1e-12]] = True
    return keep


def right_draw(logits: Any, temperature: float, seed: int, position: int) -> int:
    if temperature == 0:
        return int(logits.argmax())
    return int((logits / np.float32(temperature) + noise_spec(seed, position, len(logits))).argmax())


ANSWERS: list[tuple[Callable[..., Any], Callable[..., Any], str]] = [
    (check_min_p, lambda x, p: x >= x.max() + np.float32(np.log(p)), "right."),
    (check_min_p, lambda x, p: softmax(x) >= p, "not yet: .* you drop token 2, the sampler keeps it"),
    (check_min_p, lambda x, p: True, "not yet: .* a bool for each token is wanted, got True"),
    (check_top_p, right_top_p, "right."),
    (check_top_p, lambda x, p: softmax(x) > 1 - p, "not yet: .* drop"),
    (check_top_p, lambda x, p: x >= x[right_top_p(x, p)].min(), "not yet: .* you keep token 2"),
    (check_draw, right_draw, "right."),
    (check_draw, lambda x, t, s, p: right_draw(x, 1.0, s, p), "not yet: temperature 0.0, .* greedy"),
    (check_draw, lambda x, t, s, p: right_draw(x, t and 1.0, s, p), "not yet: .* behind the temperature"),
    (check_key, lambda seed, position, place: (seed, position), "right."),
    (check_key, lambda seed, position, place: (place, position), "not yet: a request that moves"),
    (check_key, lambda seed, position, place: (seed, 0), "not yet: .* same token at every position"),
    (check_key, lambda seed, position, place: (0, position), "not yet: all requests"),
    (check_key, lambda seed, position, place: (seed & 1, position), "not yet: .* do not follow the law"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "answer", "said"), ANSWERS)
def test_verdicts(check: Callable[..., Any], answer: Callable[..., Any], said: str) -> None:
    import re

    verdict = check(answer)
    assert re.search(said, repr(verdict)), verdict
    assert verdict.right == (said == "right.")


@pytest.mark.parametrize("k", [0, 1, 3, 8, 20])
@pytest.mark.parametrize("p", [1.0, 0.9, 0.5, 0.05])
@pytest.mark.parametrize("least", [0.0, 0.3])
def test_kept_tokens_are_the_oracles(k: int, p: float, least: float) -> None:
    want = oracle.top_p(oracle.top_k(oracle.min_p(LAW.astype(np.float64), least), k), p)
    np.testing.assert_array_equal(kept_tokens(LAW, k, p, least), want > -oracle.INF)


# -- pictures ------------------------------------------------------------------------------------------------------
def titled(figure: Any) -> None:
    """Axes have titles, traces have names, and nothing relies on colour alone."""
    assert figure.layout.title.text
    assert any(axis.title.text for axis in figure.select_xaxes())
    assert any(axis.title.text for axis in figure.select_yaxes())
    assert any(trace.name for trace in figure.data)


def test_noise_and_tail() -> None:
    figure = pictures.noise_picture(grid(OURS, 0, 20, 500).noise)
    titled(figure)
    bars, density = figure.data
    assert np.abs(np.array(bars.y) - np.array(density.y)).max() < 0.05
    ours, mutant = pictures.tail_picture(600).data
    assert len(set(ours.y)) == 600
    assert len(set(mutant.y)) == 3, "600 values of r in steps of 256"


def test_race() -> None:
    noise = np.array([0.0, 3.0, 0.0])
    figure = pictures.race_picture(np.array([2.0, 1.0, 0.0]), [noise, np.zeros(3)], "abc")
    titled(figure)
    stars = [trace for trace in figure.data if trace.name == "the winner"]
    assert [(list(star.x), list(star.y)) for star in stars] == [(["b"], [4.0]), (["a"], [2.0])]


def test_kept() -> None:
    figure = pictures.kept_picture(LAW, {"k = 2": kept_tokens(LAW, 2), "all": kept_tokens(LAW)}, list("abcdefgh"))
    titled(figure)
    kept, dropped = figure.data[:2]
    assert (np.array(kept.y) > 0).tolist() == [True, True] + [False] * 6
    assert sum(kept.y) + sum(dropped.y) == pytest.approx(100)
    assert list(kept.x)[:2] == ["a", "f"]


def test_memory_and_penalties() -> None:
    figure = pictures.memory_picture({"top-p": {"V1": 2**30, "MRV2": 2**20}, "greedy": {"MRV2": 2**19}}, "memory")
    titled(figure)
    assert [list(bars.y) for bars in figure.data] == [[1024.0, None], [1.0, 0.5]]
    rows = [
        {"output_len": length, "impl": impl, "median_us": length, "q1_us": length - 1, "q3_us": length + 2}
        for length in (8, 64)
        for impl in ("mrv2lab", "mrv2lab v1")
    ]
    figure = pictures.penalty_picture(rows, "penalties")
    titled(figure)
    assert [list(line.x) for line in figure.data] == [[8, 64], [8, 64]]
