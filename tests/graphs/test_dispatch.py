"""The table of shapes: candidates, decisions and their reasons, literally."""

from __future__ import annotations

from typing import get_args

import pytest

from mrv2lab.config import GraphConfig, GraphMode, SchedulerConfig
from mrv2lab.graphs import BatchDescriptor, DispatchTable, capture_sizes


def full(tokens: int, reqs: int, query_len: int | None = 1) -> BatchDescriptor:
    return BatchDescriptor("full", tokens, reqs, query_len)


def piecewise(tokens: int) -> BatchDescriptor:
    return BatchDescriptor("piecewise", tokens, None, None)


def make(
    mode: GraphMode, sizes: tuple[int, ...] | None = (1, 2, 4, 8), reqs: int = 8, **options: object
) -> DispatchTable:
    scheduler = SchedulerConfig(max_num_reqs=reqs, max_num_batched_tokens=64)
    return DispatchTable(GraphConfig(mode, sizes), scheduler, **options)  # type: ignore[arg-type]


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_default_sizes_are_dense_where_a_step_is_short() -> None:
    sizes = capture_sizes(GraphConfig("full"), SchedulerConfig(max_num_reqs=1024, max_num_batched_tokens=2048))
    assert sizes[:6] == (1, 2, 4, 8, 16, 24)
    assert sizes[32:36] == (240, 248, 256, 272)
    assert sizes[-1] == 512
    assert len(sizes) == 51


@pytest.mark.parametrize(
    ("reqs", "tokens", "query_len", "sizes"),
    [
        (1, 64, 1, (1, 2)),
        (3, 64, 1, (1, 2, 4)),
        (5, 64, 1, (1, 2, 4, 8)),
        (8, 64, 1, (1, 2, 4, 8, 16)),
        (8, 10, 1, (1, 2, 4, 8)),
        (2, 64, 3, (1, 2, 4, 8)),
        (140, 4096, 1, (1, 2, 4, *range(8, 256, 8), 256, 272)),
    ],
)
def test_default_sizes_end_at_twice_the_requests(
    reqs: int, tokens: int, query_len: int, sizes: tuple[int, ...]
) -> None:
    scheduler = SchedulerConfig(max_num_reqs=reqs, max_num_batched_tokens=tokens)
    assert capture_sizes(GraphConfig("full"), scheduler, query_len) == sizes


def test_a_size_that_no_step_reaches_is_refused() -> None:
    with pytest.raises(ValueError, match=r"up to 65, but a step has at most max_num_batched_tokens = 64"):
        make("full", (1, 65))


# -- candidates --------------------------------------------------------------------------------------------------------


def test_the_golden_vector_of_three_token_decodes() -> None:
    table = make("full_and_piecewise", decode_query_len=3)
    assert table.candidates() == (
        piecewise(8), piecewise(4), piecewise(2), piecewise(1), full(6, 2, 3), full(3, 1, 3),
    )  # fmt: skip
    assert table.dispatch(2, 6, 3).descriptor == full(6, 2, 3)
    assert table.dispatch(1, 3, 3).descriptor == full(3, 1, 3)
    assert table.dispatch(2, 5, 4).descriptor == piecewise(8)
    assert table.dispatch(3, 9, 3).descriptor is None
    assert table.dispatch(2, 6, 4).descriptor == piecewise(8)  # not uniform
    assert table.dispatch(1, 2, 2).descriptor == piecewise(2)  # uniform, but no plain decode


@pytest.mark.parametrize(
    ("mode", "candidates"),
    [
        ("none", ()),
        ("piecewise", (piecewise(4), piecewise(1))),
        ("full_decode_only", (full(4, 4), full(1, 1))),
        ("full_and_piecewise", (piecewise(4), piecewise(1), full(4, 4), full(1, 1))),
        ("full", (full(4, 4, None), full(1, 1, None), full(4, 4), full(1, 1))),
    ],
)
def test_candidates_of_each_mode_are_in_capture_order(mode: GraphMode, candidates: tuple[BatchDescriptor, ...]) -> None:
    assert make(mode, (1, 4)).candidates() == candidates


def test_a_full_batch_of_decodes_has_a_graph_though_no_size_is_its_own() -> None:
    table = make("full_decode_only", (1, 2, 4, 8), reqs=3)
    assert table.candidates() == (full(3, 3), full(2, 2), full(1, 1))
    assert table.dispatch(3, 3, 1).descriptor == full(3, 3)


def test_full_graphs_of_any_lengths_hold_no_more_than_r_requests() -> None:
    assert make("full", (1, 16), reqs=8).candidates()[0] == full(16, 8, None)


# -- dispatch ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "batch", "descriptor"),
    [
        ("full", (5, 5, 1), full(8, 8)),
        ("full", (2, 5, 4), full(8, 8, None)),
        ("full_decode_only", (5, 5, 1), full(8, 8)),
        ("full_decode_only", (2, 5, 4), None),
        ("full_and_piecewise", (5, 5, 1), full(8, 8)),
        ("full_and_piecewise", (2, 5, 4), piecewise(8)),
        ("piecewise", (5, 5, 1), piecewise(8)),
        ("piecewise", (2, 5, 4), piecewise(8)),
        ("none", (5, 5, 1), None),
    ],
)
def test_modes_say_which_steps_replay(
    mode: GraphMode, batch: tuple[int, int, int], descriptor: BatchDescriptor | None
) -> None:
    assert make(mode).dispatch(*batch).descriptor == descriptor


def test_every_batch_gets_the_smallest_graph_that_holds_it() -> None:
    """Against a search through the candidates, as vLLM's dispatcher goes."""
    for mode in get_args(GraphMode):
        for query_len in (1, 2, 3):
            table = make(mode, (1, 2, 3, 5, 8, 13), reqs=6, decode_query_len=query_len)
            for tokens in range(1, 16):
                for reqs in range(1, min(tokens, 6) + 1):
                    for longest in {-(-tokens // reqs), tokens - reqs + 1}:
                        found = table.dispatch(reqs, tokens, longest).descriptor
                        assert found == _search(table, reqs, tokens, longest), (mode, query_len, reqs, tokens, longest)


def _search(table: DispatchTable, reqs: int, tokens: int, longest: int) -> BatchDescriptor | None:
    def fits(one: BatchDescriptor) -> bool:
        uniform = longest == one.query_len and tokens == longest * reqs
        return (
            one.num_tokens >= tokens
            and (one.num_reqs is None or one.num_reqs >= reqs)
            and (one.query_len is None or uniform)
        )

    fitting = [one for one in table.candidates() if fits(one)]
    key = {"full": 0, "piecewise": 1}
    return min(fitting, key=lambda one: (one.query_len is None, key[one.mode], one.num_tokens), default=None)


def test_a_decision_is_made_once() -> None:
    table = make("full_and_piecewise")
    for batch in ((5, 5, 1), (2, 5, 4), (1, 33, 33)):
        assert table.dispatch(*batch) is table.dispatch(*batch)
    assert table.dispatch(5, 5, 1) is not table.dispatch(6, 6, 1)  # padding differs, and so does what is said


# -- reasons -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "batch", "reason"),
    [
        ("full", (5, 5, 1), "5 tokens padded to 8; plain decodes in one graph"),
        ("full", (8, 8, 1), "8 tokens as they are; plain decodes in one graph"),
        ("full", (2, 5, 4), "5 tokens padded to 8; one graph for any lengths"),
        ("full", (2, 9, 5), "9 tokens exceed the largest capture size 8"),
        (
            "piecewise",
            (1, 1, 1),
            "1 token as it is; piecewise: attention runs outside the graphs, over the 1 token there is",
        ),
        (
            "full_and_piecewise",
            (2, 5, 4),
            "5 tokens padded to 8; piecewise: attention runs outside the graphs, over the 5 tokens there are",
        ),
        ("full_decode_only", (2, 5, 4), "a prefill chunk: only plain decodes have full graphs under full_decode_only"),
        ("none", (2, 5, 4), "cudagraph_mode is 'none'"),
    ],
)
def test_reasons_are_sentences(mode: GraphMode, batch: tuple[int, int, int], reason: str) -> None:
    assert make(mode).dispatch(*batch).reason == reason


def test_a_backend_that_plans_on_the_host_leaves_no_full_graphs() -> None:
    why = "the flashinfer backend plans on the host, so no full graphs"
    cases: dict[GraphMode, BatchDescriptor | None] = {
        "full": piecewise(2),
        "full_and_piecewise": piecewise(2),
        "full_decode_only": None,
    }
    for mode, descriptor in cases.items():
        decision = make(mode, full_graphs=False, backend="flashinfer").dispatch(2, 2, 1)
        assert decision.descriptor == descriptor
        assert why in decision.reason
    assert make("piecewise", full_graphs=False, backend="flashinfer").downgrade == ""


def test_what_is_dropped_gives_way_to_the_next_graph_and_says_why() -> None:
    table = make("full_and_piecewise")
    table.drop(full(8, 8), "out of memory")
    decision = table.dispatch(5, 5, 1)
    assert decision.descriptor == piecewise(8)
    assert decision.reason.endswith("(the full graph of 8 tokens, 8 requests could not be captured: out of memory)")
    assert table.dispatch(4, 4, 1).descriptor == full(4, 4)
    table.drop(piecewise(8), "out of memory too")
    assert table.dispatch(5, 5, 1).reason == (
        "the full graph of 8 tokens, 8 requests could not be captured: out of memory"
    )
    assert table.dispatch(2, 5, 4).reason == "the piecewise graphs of 8 tokens could not be captured: out of memory too"
    table.restore()
    assert table.dispatch(5, 5, 1).descriptor == full(8, 8)


def test_a_smaller_shape_that_is_dropped_gives_way_to_a_larger_one() -> None:
    table = make("full_decode_only")
    table.drop(full(4, 4), "out of memory")
    assert table.dispatch(3, 3, 1).descriptor == full(8, 8)


def test_rows_say_which_steps_a_graph_takes() -> None:
    rows = {str(row["graph"]): row for row in make("full_and_piecewise", (1, 4)).rows()}
    assert [(name, row["from_tokens"], row["to_tokens"]) for name, row in rows.items()] == [
        ("piecewise graphs of 4 tokens", 2, 4),
        ("piecewise graphs of 1 token", 1, 1),
        ("full graph of 4 tokens, 4 requests", 2, 4),
        ("full graph of 1 token, 1 request", 1, 1),
    ]


def test_a_decode_has_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="decode_query_len must be at least 1, got 0"):
        make("full", decode_query_len=0)
