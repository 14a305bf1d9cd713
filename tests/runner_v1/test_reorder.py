"""Batch order on demand: decodes in front in four regions, or MRV2's own order; and how few swaps it takes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import mrv2lab.runner_v1.reorder as module
from mrv2lab.protocol import ContinuedData, MRV2SchedulerOutput
from mrv2lab.runner_v1.persistent_batch import InputBatch
from mrv2lab.runner_v1.reorder import (
    DECODE,
    LONG_EXTEND,
    PREFILL,
    SHORT_EXTEND,
    permute,
    regions,
    reorder_batch,
)
from mrv2lab.state.input_batch import gather_host_batch
from tests.runner_v1.batches import ints, make_batch, request

Row = tuple[int, int, int]
"""(scheduled, computed, prompt) of a request."""


def batch_of(rows: list[Row]) -> tuple[InputBatch, dict[str, int]]:
    """A batch of requests "0", "1", ... in row order, and how many tokens each gets."""
    batch = make_batch(max(len(rows), 1))
    for i, (_, computed, prompt) in enumerate(rows):
        outputs = [1] * max(computed + 1 - prompt, 0)
        batch.add_request(request(str(i), prompt, outputs, num_computed_tokens=computed))
    return batch, {str(i): scheduled for i, (scheduled, _, _) in enumerate(rows)}


# -- literal rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheduled", "computed", "prompt", "region"),
    [
        (1, 6, 6, DECODE),
        (2, 9, 6, DECODE),
        (2, 4, 6, SHORT_EXTEND),
        (1, 5, 6, SHORT_EXTEND),
        (3, 3, 6, LONG_EXTEND),
        (3, 6, 6, LONG_EXTEND),  # verifies more drafts than the threshold allows
        (6, 0, 6, PREFILL),
        (1, 0, 1, PREFILL),  # a prompt of one token: short, but nothing is computed
    ],
)
def test_regions_at_threshold_2(scheduled: int, computed: int, prompt: int, region: int) -> None:
    assert regions(ints(scheduled), ints(computed), ints(prompt), 2).tolist() == [region]


def test_decodes_come_first_and_whoever_stands_right_stays() -> None:
    #             prefill    decode     long       decode     short
    rows: list[Row] = [(4, 0, 4), (1, 5, 4), (3, 2, 8), (1, 4, 4), (1, 2, 4)]
    batch, tokens = batch_of(rows)
    assert reorder_batch(batch, 1, tokens, {}) == 3
    # Row 1 was a decode among the decodes. 3 -> 0, 4 -> 2, 2 -> 3, 0 -> 4 is one cycle of four.
    assert batch.req_ids == ["3", "1", "4", "2", "0"]
    assert batch.moves.swaps == 3
    assert reorder_batch(batch, 1, tokens, {}) == 0


def test_flash_and_triton_backends_do_not_ask() -> None:
    batch, tokens = batch_of([(4, 0, 4), (1, 5, 4)])
    assert reorder_batch(batch, None, tokens, {}) == 0
    assert batch.req_ids == ["0", "1"]


def test_mrv2_order_is_drafts_then_decodes_then_by_length_with_ties_in_schedule_order() -> None:
    rows: list[Row] = [(4, 0, 4), (1, 5, 4), (3, 4, 4), (2, 2, 4), (1, 4, 4), (4, 0, 4)]
    batch, tokens = batch_of(rows)
    schedule = {req_id: tokens[req_id] for req_id in "540213"}
    assert reorder_batch(batch, "mrv2", schedule, {"2": [7, 7]}) == 4
    assert batch.req_ids == ["2", "4", "1", "3", "5", "0"]


def test_permute_a_cycle_of_three_takes_two_swaps() -> None:
    batch, _ = batch_of([(1, 1, 1)] * 4)
    assert permute(batch, ints(1, 2, 0, 3)) == 2
    assert batch.req_ids == ["1", "2", "0", "3"]


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("demand", [1, "mrv2"])
def test_a_batch_that_is_not_the_schedule_is_refused(demand: Any) -> None:
    batch, tokens = batch_of([(1, 4, 4)] * 3)
    with pytest.raises(RuntimeError, match=r"3 requests but 2 are scheduled: remove the unscheduled"):
        reorder_batch(batch, demand, {"0": 1, "1": 1}, {})
    batch.remove_request("1")
    with pytest.raises(RuntimeError, match=r"1 holes: condense before reordering"):
        reorder_batch(batch, demand, tokens, {})


@pytest.mark.parametrize("demand", [0, -1, True, "mrv1", 1.5])
def test_a_demand_is_a_positive_threshold_or_mrv2(demand: Any) -> None:
    batch, tokens = batch_of([(1, 4, 4)])
    with pytest.raises(ValueError, match=rf"reorder demand .* got {demand!r}"):
        reorder_batch(batch, demand, tokens, {})


# -- laws --------------------------------------------------------------------------------------------------------------

ROWS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 12), st.integers(1, 12)), min_size=1, max_size=9)


def fewest_swaps(order: list[int]) -> int:
    """Rows less cycles: what any permutation takes at least."""
    seen: set[int] = set()
    cycles = 0
    for first in range(len(order)):
        cycles += first not in seen
        row = first
        while row not in seen:
            seen.add(row)
            row = order[row]
    return len(order) - cycles


def split_law(rows: list[Row], threshold: int) -> None:
    batch, tokens = batch_of(rows)

    def region(one: Row) -> int:
        scheduled, computed, prompt = one
        if computed == 0:
            return 3
        if scheduled > threshold:
            return 2
        return 0 if computed >= prompt else 1

    before = list(map(region, rows))
    swaps = reorder_batch(batch, threshold, tokens, {})
    order = list(map(int, batch.req_ids))
    after = [before[i] for i in order]
    assert after == sorted(before)
    assert [i for i, (was, now) in enumerate(zip(before, after, strict=True)) if was == now and order[i] != i] == []
    assert swaps == fewest_swaps(order) == batch.moves.swaps


def mrv2_law(rows: list[Row], drafted: list[int], schedule: list[int]) -> None:
    """The order is the one that the MRV2 runner gathers from the same schedule."""
    batch, tokens = batch_of(rows)
    scheduled = {str(i): tokens[str(i)] for i in schedule}
    drafts = {str(i): [-1] * (tokens[str(i)] - 1) for i in drafted if i < len(rows) and tokens[str(i)] > 1}
    swaps = reorder_batch(batch, "mrv2", scheduled, drafts)
    output = MRV2SchedulerOutput(0, [], ContinuedData(), set(), set(), scheduled, drafts, sum(scheduled.values()))
    count = len(rows)
    state: Any = SimpleNamespace(
        rows=lambda ids: np.array([count - 1 - int(i) for i in ids], np.int32),
        max_num_reqs=count,
        num_computed_tokens_np=np.zeros(count, np.int32),
        any_prefilling=lambda rows: False,
    )
    assert batch.req_ids == gather_host_batch(state, output).req_ids
    assert swaps == fewest_swaps(list(map(int, batch.req_ids))) == batch.moves.swaps


@settings(max_examples=150, deadline=None)
@given(ROWS, st.integers(1, 4))
def test_regions_in_order_and_nobody_moves_in_vain(rows: list[Row], threshold: int) -> None:
    split_law(rows, threshold)


@settings(max_examples=150, deadline=None)
@given(ROWS, st.lists(st.integers(0, 8), max_size=4), st.randoms(use_true_random=False))
def test_both_runners_form_the_same_batch(rows: list[Row], drafted: list[int], draw: Any) -> None:
    schedule = list(range(len(rows)))
    draw.shuffle(schedule)
    mrv2_law(rows, drafted, schedule)


def test_permute_every_permutation_of_five() -> None:
    for order in itertools.permutations(range(5)):
        batch, _ = batch_of([(1, 1, 1)] * 5)
        assert permute(batch, np.array(order)) == fewest_swaps(list(order))
        assert batch.req_ids == list(map(str, order))


# -- mutants -----------------------------------------------------------------------------------------------------------


def without_short_extends(scheduled: Any, computed: Any, prompt: Any, threshold: int) -> Any:
    return np.where(computed == 0, PREFILL, np.where(scheduled <= threshold, DECODE, LONG_EXTEND))


def threshold_exclusive(scheduled: Any, computed: Any, prompt: Any, threshold: int) -> Any:
    return regions(scheduled, computed, prompt, threshold - 1)


def one_token_prompts_are_decodes(scheduled: Any, computed: Any, prompt: Any, threshold: int) -> Any:
    region = regions(scheduled, computed, prompt, threshold)
    return np.where((region == PREFILL) & (scheduled <= threshold), DECODE, region)


def the_inverse_permutation(batch: InputBatch, order: Any) -> int:
    return permute(batch, np.argsort(order))


def one_swap_too_many(batch: InputBatch, order: Any) -> int:
    batch.swap_states(0, len(order) - 1)
    batch.swap_states(0, len(order) - 1)
    return permute(batch, order)


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("regions", without_short_extends),
        ("regions", threshold_exclusive),
        ("regions", one_token_prompts_are_decodes),
        ("permute", the_inverse_permutation),
        ("permute", one_swap_too_many),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_mutants_of_the_split_are_caught(
    monkeypatch: pytest.MonkeyPatch, name: str, mutant: Callable[..., Any]
) -> None:
    monkeypatch.setattr(module, name, mutant)

    @quick
    @given(ROWS, st.integers(1, 4))
    def prop(rows: list[Row], threshold: int) -> None:
        split_law(rows, threshold)

    with pytest.raises(AssertionError):
        prop()


def ties_in_row_order(batch: InputBatch, rows: Any, tokens: Any, drafts: Any, query_len: int) -> int:
    return permute(batch, rows[np.lexsort((rows, tokens, tokens != query_len, drafts == 0))])


def drafts_ignored(batch: InputBatch, rows: Any, tokens: Any, drafts: Any, query_len: int) -> int:
    return permute(batch, rows[np.lexsort((tokens, tokens != query_len))])


def by_position_in_the_schedule(batch: InputBatch, rows: Any, tokens: Any, drafts: Any, query_len: int) -> int:
    return permute(batch, np.lexsort((tokens, tokens != query_len, drafts == 0)))


@pytest.mark.parametrize("mutant", [ties_in_row_order, drafts_ignored, by_position_in_the_schedule])
def test_mutants_of_the_mrv2_order_are_caught(monkeypatch: pytest.MonkeyPatch, mutant: Callable[..., Any]) -> None:
    monkeypatch.setattr(module, "reorder_as_mrv2", mutant)

    @quick
    @given(ROWS, st.lists(st.integers(0, 8), max_size=4), st.randoms(use_true_random=False))
    def prop(rows: list[Row], drafted: list[int], draw: Any) -> None:
        schedule = list(range(len(rows)))
        draw.shuffle(schedule)
        mrv2_law(rows, drafted, schedule)

    with pytest.raises(AssertionError):
        prop()


quick = settings(
    max_examples=300,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
