"""The oracle itself, by hand: mrv2.md A9, A10, its tie rules and its order."""

from __future__ import annotations

import numpy as np
import pytest

from mrv2lab.sampling_params import SamplingParams, StructuredOutput
from tests.sample import oracle

INF = float("inf")


def row(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


def test_penalties_a9():
    both = oracle.penalties(row(2, -2, 7), [0], [1], 1.25, 0, 0)
    assert both.tolist() == pytest.approx([1.6, -2.5, 7])
    assert oracle.penalties(row(2, 7), [], [0, 0, 0], 1.25, 0.1, 0.5)[0] == pytest.approx(1.6 - 0.8)
    assert oracle.penalties(row(-2, 7), [], [0, 0, 0], 1.25, 0.1, 0.5)[0] == pytest.approx(-2.5 - 0.8)


def test_min_p_a10():
    assert oracle.min_p(row(2, 1, 0, -3), 0.1).tolist() == [2, 1, 0, -INF]


def test_top_k_ties_go_to_the_lowest_ids():
    assert oracle.top_k(row(1, 1, 1, 0), 2).tolist() == [1, 1, -INF, -INF]  # mrv2.md 42
    assert oracle.top_k(row(-INF, 1, -INF, 0), 2).tolist() == [-INF, 1, -INF, 0]


@pytest.mark.parametrize(
    ("p", "kept"), [(0.2, [0]), (0.25, [0]), (0.26, [0, 1]), (0.75, [0, 1, 2]), (1.0, [0, 1, 2, 3])]
)
def test_top_p_takes_ties_from_the_lowest_id(p, kept):
    assert np.flatnonzero(oracle.top_p(row(1, 1, 1, 1), p) > -INF).tolist() == kept


def test_bias_comes_before_penalties():
    params = SamplingParams(logit_bias={1: 5.0}, repetition_penalty=1.5)
    x = oracle.process(row(0, 2.5, 0), oracle.Row(params, prompt=[1]))
    assert x.tolist() == [0, 5.0, 0]  # (2.5 + 5) / 1.5, mrv2.md 38


def test_min_tokens_counts_outputs():
    params = SamplingParams(min_tokens=2)
    masked = [
        oracle.process(row(0, 9), oracle.Row(params, [5, 5], outputs, stop_ids=[1]))[1] == -INF
        for outputs in ([], [0], [0, 0])
    ]
    assert masked == [True, True, False]


def test_a_grammar_that_allows_only_the_end_ends():
    params = SamplingParams(min_tokens=2, structured_output=StructuredOutput(regex="a"))
    x = oracle.process(row(0, 9), oracle.Row(params, [5], stop_ids=[1], mask=[0b10]))
    assert x.tolist() == [-INF, 9]


def test_bad_words_see_outputs_and_drafts_only():
    words = [(3,), (1, 2), (0, 1, 0)]
    x = oracle.bad_words(row(0, 0, 0, 0), [0, 1], words)
    assert x.tolist() == [-INF, 0, -INF, -INF]
    params = SamplingParams(bad_words=[(1, 2)])
    assert oracle.process(row(0, 0, 0), oracle.Row(params, prompt=[1]))[2] == 0
    assert oracle.process(row(0, 0, 0), oracle.Row(params, prompt=[0], drafts=[1]))[2] == -INF


def test_nan_is_minus_infinity():
    assert oracle.nan_count(row(np.nan, 1, np.nan)) == 2
    assert oracle.choose(oracle.process(row(np.nan, 1, 1), oracle.Row(SamplingParams())), 0, 0, 0) == 1


def test_logprobs():
    x = np.log(row(0.5, 0.25, 0.25))
    ids, values = oracle.top_logprobs(x, 2, 2)
    assert ids == [2, 0, 1]
    assert np.exp(values).tolist() == pytest.approx([0.25, 0.5, 0.25])
    assert [oracle.rank(x, token) for token in range(3)] == [1, 3, 3]
