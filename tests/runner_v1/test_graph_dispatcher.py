"""V1's dispatcher: capture sizes, keys, and the way FULL -> relaxed, PIECEWISE -> NONE, with a reason each time."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrv2lab.config import GraphConfig, GraphMode, SchedulerConfig
from mrv2lab.runner_v1.graph_dispatcher import GraphDispatcher, GraphKey


def dispatcher(
    mode: GraphMode = "full_and_piecewise",
    sizes: tuple[int, ...] | None = None,
    *,
    reqs: int = 8,
    tokens: int = 64,
    enabled: bool = True,
    **options: Any,
) -> GraphDispatcher:
    """Of R = ``reqs`` and T = ``tokens``; its graphs are there unless ``enabled`` is False."""
    scheduler = SchedulerConfig(max_num_reqs=reqs, max_num_batched_tokens=tokens)
    made = GraphDispatcher(GraphConfig(mode, sizes), scheduler, **options)
    made.enable(enabled)
    return made


# -- sizes and keys ----------------------------------------------------------------------------------------------------


def test_default_sizes() -> None:
    assert dispatcher(reqs=8).sizes == (1, 2, 4, 8, 16)
    assert dispatcher(reqs=100, tokens=40).sizes == (1, 2, 4, 8, 16, 24, 32, 40)
    sizes = dispatcher(reqs=1024, tokens=2048).sizes
    assert sizes[:5] == (1, 2, 4, 8, 16) and sizes[-1] == 512
    assert [size for size in sizes if 240 <= size <= 288] == [240, 248, 256, 272, 288]
    assert dispatcher("none").sizes == ()


def test_sizes_are_rounded_to_whole_decodes() -> None:
    assert dispatcher(sizes=(1, 2, 4, 8), decode_query_len=3).sizes == (3, 6, 9)


def test_sizes_beyond_a_step_are_refused() -> None:
    with pytest.raises(ValueError, match="go up to 128, but a step has at most max_num_batched_tokens = 64"):
        dispatcher(sizes=(8, 128))


def test_the_order_of_capture() -> None:
    """PIECEWISE before FULL, the largest first; uniform keys for R requests at most."""
    assert dispatcher(sizes=(1, 4, 16)).to_capture() == [
        ("PIECEWISE", GraphKey(16, None, False)),
        ("PIECEWISE", GraphKey(4, None, False)),
        ("PIECEWISE", GraphKey(1, None, False)),
        ("FULL", GraphKey(4, 4, True)),
        ("FULL", GraphKey(1, 1, True)),
    ]
    assert dispatcher("full", (1, 4, 16)).to_capture() == [
        ("FULL", GraphKey(16, 8, False)),
        ("FULL", GraphKey(4, 4, False)),
        ("FULL", GraphKey(1, 1, False)),
    ]


# -- dispatch ----------------------------------------------------------------------------------------------------------

DECODES, CHUNK, FEW = (5, 5, 1), (2, 9, 8), (1, 3, 3)
"""Requests, tokens, longest query."""


@pytest.mark.parametrize(
    ("mode", "step", "wanted"),
    [
        ("none", DECODES, ("NONE", None)),
        ("piecewise", DECODES, ("PIECEWISE", (8, None, False))),
        ("piecewise", CHUNK, ("PIECEWISE", (16, None, False))),
        ("full", DECODES, ("FULL", (8, 8, False))),
        ("full", CHUNK, ("FULL", (16, 8, False))),
        ("full", FEW, ("FULL", (4, 4, False))),
        ("full_decode_only", DECODES, ("FULL", (8, 8, True))),
        ("full_decode_only", CHUNK, ("NONE", None)),
        ("full_and_piecewise", DECODES, ("FULL", (8, 8, True))),
        ("full_and_piecewise", CHUNK, ("PIECEWISE", (16, None, False))),
        ("full_and_piecewise", FEW, ("PIECEWISE", (4, None, False))),
        ("full_and_piecewise", (2, 17, 16), ("NONE", None)),
    ],
)
def test_dispatch(mode: GraphMode, step: tuple[int, int, int], wanted: tuple[str, Any]) -> None:
    decision = dispatcher(mode).dispatch(*step)
    assert (decision.mode, decision.key) == wanted
    assert decision.padded_tokens == (wanted[1] and wanted[1][0]) and decision.padded_reqs == (
        wanted[1] and wanted[1][1]
    )


def test_decodes_whose_size_passes_r_lose_the_full_graph() -> None:
    """The hole that MRV2's table does not have: 5 and 6 of 6 requests are padded to 8, and 8 requests have no key."""
    shapes = dispatcher(reqs=6)
    assert [shapes.dispatch(n, n, 1).mode for n in range(1, 7)] == ["FULL"] * 4 + ["PIECEWISE"] * 2
    assert shapes.dispatch(5, 5, 1).reason == (
        "5 tokens padded to 8; FULL has no key (8, 6, uniform), relaxed to (8, None, any lengths)"
    )


@pytest.mark.parametrize(
    ("options", "step", "words"),
    [
        ({"mode": "none"}, DECODES, "cudagraph_mode is 'none'"),
        ({"enabled": False}, DECODES, "graphs are not captured yet"),
        ({}, (1, 1, 1), "1 token need no padding; FULL has the key (1, 1, uniform)"),
        ({}, (3, 17, 15), "17 tokens exceed the largest capture size 16"),
        ({"mode": "full_decode_only"}, CHUNK, "FULL has no key (16, 8, any lengths) under full_decode_only"),
        ({"full_graphs": False, "backend": "flashinfer"}, DECODES, "(the flashinfer backend plans on the host, so no"),
        ({"mode": "full_decode_only", "full_graphs": False}, DECODES, "the attention backend plans on the host"),
    ],
)
def test_reasons(options: dict[str, Any], step: tuple[int, int, int], words: str) -> None:
    assert words in dispatcher(**options).dispatch(*step).reason


def test_a_dropped_key_gives_way_to_the_next() -> None:
    shapes = dispatcher()
    shapes.drop("FULL", GraphKey(8, 8, True), "out of memory")
    assert shapes.dispatch(*DECODES).mode == "PIECEWISE"
    shapes.drop("PIECEWISE", GraphKey(8, None, False), "out of memory too")
    decision = shapes.dispatch(*DECODES)
    assert decision.mode == "NONE" and "FULL lost the key (8, 8, uniform) (out of memory)" in decision.reason
    assert "and PIECEWISE lost the key (8, None, any lengths) (out of memory too)" in decision.reason
    shapes.enable(False)
    shapes.enable()
    assert shapes.dispatch(*DECODES).mode == "FULL" and not shapes.dropped


@given(
    st.sampled_from(get_args(GraphMode)),
    st.integers(1, 12),
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
)
def test_a_key_holds_the_step_and_is_the_nearest(
    mode: GraphMode, reqs: int, sizes: list[int], counts: list[int]
) -> None:
    counts = counts[:reqs]
    shapes = dispatcher(mode, tuple(sorted(set(sizes))), reqs=reqs)
    decision = shapes.dispatch(len(counts), sum(counts), max(counts))
    assert decision.reason
    if decision.key is None:
        return
    assert decision.key in shapes.keys[decision.mode]
    assert decision.key.num_tokens == min(size for size in shapes.sizes if size >= sum(counts))
    assert decision.key.num_reqs is None or decision.key.num_reqs >= len(counts)
    assert not decision.key.uniform or set(counts) == {1}
