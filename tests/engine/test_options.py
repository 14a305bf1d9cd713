"""Options of an engine: what is taken, what is refused, and what a misspelt word was meant to be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mrv2lab.config import CacheConfig, GraphConfig, RunnerConfig, SchedulerConfig, did_you_mean
from mrv2lab.engine.options import split_options
from mrv2lab.model.errors import CheckpointError
from mrv2lab.model.load import load_model


@pytest.mark.parametrize("sizes", [(1, 2, 4), [1, 2, 4], np.array([1, 2, 4]), range(1, 4), iter((1, 2, 4)), {1: "x"}])
def test_capture_sizes_are_any_integers_that_ascend(sizes: Any) -> None:
    found = GraphConfig("full", sizes).cudagraph_capture_sizes
    assert found in ((1, 2, 4), (1, 2, 3), (1,)) and {type(size) for size in found or ()} == {int}


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (np.array([1, 2, 0]), r"must be positive integers, got \[.*0.*\]"),
        (np.array([1.0]), "must be positive integers"),
        (np.array([], int), "is empty"),
        (iter((2, 1)), r"must ascend without repeats, got \[2, 1\]; use \[1, 2\]"),
        (8, "must be positive integers, got 8"),
        ("1,2", "must be positive integers, got '?1,2"),
        ((True,), "must be positive integers"),
    ],
)
def test_other_capture_sizes_are_refused(sizes: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"cudagraph_capture_sizes {words}"):
        GraphConfig("full", sizes)


def test_sizes_without_a_mode_are_refused() -> None:
    with pytest.raises(ValueError, match="the default 'none' captures nothing; give cudagraph_mode='full_and_piece"):
        split_options({"cudagraph_capture_sizes": (1, 2)}, {})
    for mode in ("none", "full"):  # to compare modes with the same sizes
        assert split_options({"cudagraph_capture_sizes": (1, 2), "cudagraph_mode": mode}, {})[3].cudagraph_mode == mode
    assert split_options({"cudagraph_capture_sizes": None}, {})[3] == GraphConfig()


def test_numbers_of_numpy_are_numbers() -> None:
    cache = CacheConfig(num_blocks=np.int64(64), gpu_memory_utilization=np.float32(0.5))  # type: ignore[arg-type]
    assert cache == CacheConfig(64, gpu_memory_utilization=0.5) and type(cache.num_blocks) is int
    assert type(SchedulerConfig(max_num_reqs=np.int32(3)).max_num_reqs) is int  # type: ignore[arg-type]
    for wrong in (np.float64(3), np.bool_(True), True, "3", None):
        with pytest.raises(ValueError, match="max_num_reqs must be a positive integer, got"):
            SchedulerConfig(max_num_reqs=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GraphConfig("ful"), "got 'ful'; did you mean 'full'?"),  # type: ignore[arg-type]
        (lambda: RunnerConfig(attention="tritn"), "got 'tritn'; did you mean 'triton'?"),  # type: ignore[arg-type]
        (lambda: RunnerConfig(attention="x"), "got 'x'"),  # type: ignore[arg-type]
        (lambda: RunnerConfig(attention=["triton"]), "got ['triton']"),  # type: ignore[arg-type]
        (lambda: SchedulerConfig(policy="fcsf"), "got 'fcsf'; did you mean 'fcfs'?"),  # type: ignore[arg-type]
        (lambda: split_options({"atention": "torch"}, {}), "; did you mean 'attention'?"),
        (lambda: load_model("tinny"), "; did you mean 'tiny'?"),
        (lambda: load_model("qwen3-0.6b"), "; did you mean 'qwen3-0.6b-shape'?"),
    ],
)
def test_the_word_that_was_meant(make: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError, CheckpointError)) as caught:
        make()
    assert str(caught.value).endswith(words)
    assert did_you_mean(3, ("3",)) == ""
