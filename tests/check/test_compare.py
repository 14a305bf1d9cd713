"""The comparison of one step, on views written by hand: each tensor, both classes, rows in another order."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from mrv2lab.check.compare import Captured, Difference, Judgement, NearReport, Rules, compare_step, judge
from mrv2lab.protocol import SamplingParams

GREEDY = SamplingParams()
PARAMS = {"d": (GREEDY, 1), "p": (GREEDY, 2)}
EXACT, NEAR = Rules("exact", (4,)), Rules("near", (4,))


def view(**changes: Any) -> Captured:
    """A decode ``d`` at position 4 and a prefill chunk ``p`` of three tokens that does not reach its end."""
    fields: dict[str, Any] = {
        "step": 7,
        "req_ids": ["d", "p"],
        "sampled": [[2], []],
        "chosen": [2, -1],
        "input_ids": np.array([9, 5, 6, 7], np.int32),
        "positions": np.array([4, 0, 1, 2]),
        "query_start_loc": np.array([0, 1, 4], np.int32),
        "seq_lens": np.array([5, 3], np.int32),
        # The second block of p and the third of d are nobody's.
        "block_tables": (np.array([[3, 8, 0], [6, 0, 0]], np.int32),),
        "slot_mappings": (np.array([32, 24, 25, 26]),),
        "logits": np.array([[0.0, 1.0, 4.0], [2.0, 0.0, 1.0]], np.float32),
        "logits_indices": np.array([0, 3]),
    }
    return Captured(**fields | changes)


def turned(made: Captured) -> Captured:
    """The same step with p in front."""
    return dataclasses.replace(
        made,
        req_ids=["p", "d"],
        sampled=made.sampled[::-1],
        chosen=made.chosen[::-1],
        input_ids=np.roll(made.input_ids, -1),
        positions=np.roll(made.positions, -1),
        query_start_loc=np.array([0, 3, 4], np.int32),
        seq_lens=made.seq_lens[::-1].copy(),
        block_tables=(made.block_tables[0][::-1].copy(),),
        slot_mappings=(np.roll(made.slot_mappings[0], -1),),
        logits=made.logits[::-1].copy(),
        logits_indices=np.array([2, 3]),
    )


def compare(a: Captured, b: Captured, rules: Rules = EXACT) -> Difference | None:
    return compare_step(a, b, rules, PARAMS, NearReport())


@pytest.mark.parametrize("rules", [EXACT, NEAR], ids=["exact", "near"])
def test_equal(rules: Rules) -> None:
    report = NearReport()
    assert compare_step(view(), view(), rules, PARAMS, report) is None
    assert (report.rows, report.excused) == (2, 0)


def test_near_finds_each_request_in_another_order() -> None:
    assert compare(view(), turned(view()), NEAR) is None
    found = compare(view(), turned(view()), EXACT)
    assert found == Difference(7, "batch_order", "d", "batch index", 0, "d", "p")


def changed(name: str, index: Any, value: Any) -> Captured:
    made = view()
    array = getattr(made, name)
    array = array[0].copy() if isinstance(array, tuple) else array.copy()
    array[index] = value
    return dataclasses.replace(made, **{name: (array,) if isinstance(getattr(made, name), tuple) else array})


CHANGES = [
    ("input_ids", 2, 1, Difference(7, "input_ids", "p", "position", 1, 6, 1)),
    ("positions", 0, 5, Difference(7, "positions", "d", "position", 4, 4, 5)),
    ("seq_lens", 1, 4, Difference(7, "seq_lens", "p", "batch index", 1, 3, 4)),
    ("query_start_loc", 1, 2, Difference(7, "query_start_loc", "d", "batch index", 0, 1, 2)),
    ("slot_mappings", 3, -1, Difference(7, "slot_mapping", "p", "position", 2, 26, -1)),
    ("block_tables", (0, 1), 7, Difference(7, "block_table", "d", "column", 1, 8, 7)),
    ("logits", (1, 0), 2.5, Difference(7, "logits", "p", "token id", 0, 2.0, 2.5)),
]


@pytest.mark.parametrize("other_order", [False, True])
@pytest.mark.parametrize(("name", "index", "value", "wanted"), CHANGES, ids=[change[0] for change in CHANGES])
def test_each_tensor_in_both_classes(name: str, index: Any, value: Any, wanted: Difference, other_order: bool) -> None:
    b = changed(name, index, value)
    if not other_order:
        assert compare(view(), b) == wanted
    elif name not in ("query_start_loc", "seq_lens"):  # turned() writes them itself, or they change the order
        found = compare(view(), turned(b), NEAR)
        assert found is not None and dataclasses.replace(found, note="") == wanted


def test_what_is_behind_a_requests_blocks_is_nobodys() -> None:
    assert compare(view(), changed("block_tables", (0, 2), 99)) is None
    assert compare(view(), changed("block_tables", (1, 1), 99)) is None


def test_one_bit_of_a_logit() -> None:
    off = float(np.nextafter(np.float32(4), np.float32(5)))
    found = compare(view(), changed("logits", (0, 2), off))
    assert found is not None and (found.tensor, found.request, found.at) == ("logits", "d", 2)
    assert compare(view(), changed("logits", (0, 2), off), NEAR) is None
    assert compare(view(), changed("logits", (0, 0), -0.0)) is not None, "bits, not values"


@pytest.mark.parametrize("value", [4.005, float("nan"), float("inf")])
def test_near_has_a_bound(value: float) -> None:
    found = compare(view(), changed("logits", (0, 2), value), NEAR)
    assert found is not None and (found.tensor, found.request, found.at) == ("logits", "d", 2)
    assert "0.001 is allowed" in found.note


def test_nan_on_both_sides_has_one_bit_pattern_but_is_never_near() -> None:
    nan = changed("logits", (0, 2), float("nan"))
    assert compare(nan, nan) is None
    assert compare(nan, nan, NEAR) is not None


def test_tokens() -> None:
    wrong = dataclasses.replace(view(), chosen=[1, -1])
    for rules in (EXACT, NEAR):
        found = compare(view(), wrong, rules)
        assert found is not None
        assert (found.tensor, found.request, found.at, found.a, found.b) == ("tokens", "d", 5, 2, 1)
    assert compare(view(), wrong, dataclasses.replace(NEAR, tokens=False)) is None


def test_a_chunk_that_samples() -> None:
    found = compare(view(), dataclasses.replace(view(), sampled=[[2], [0]]))
    assert found is not None and (found.tensor, found.request, found.note) == ("tokens", "p", "not as many")


def test_draws_of_other_generators_are_not_compared() -> None:
    wrong = dataclasses.replace(view(), chosen=[1, -1])
    params = {"d": (SamplingParams(temperature=1.0), 1), "p": (GREEDY, 2)}
    rules = dataclasses.replace(EXACT, draws=False)
    assert compare_step(view(), wrong, rules, params, NearReport()) is None
    assert compare(view(), wrong, rules) is not None, "greedy requests still are"


def test_a_margin_too_small_is_excused_and_counted() -> None:
    """Row d: best 4.0, second 3.999, off by 0.0005."""
    a = changed("logits", (0, 1), 3.999)
    b = dataclasses.replace(changed("logits", (0, 1), 3.9995), chosen=[1, -1])
    report = NearReport()
    assert compare_step(a, b, NEAR, PARAMS, report) is None
    assert (report.rows, report.tokens, report.excused) == (2, 1, 1)  # p has none
    assert report.excuses == ["step 7, 'd' at position 5: margin 0.001 <= 4 x 0.0005"]
    with pytest.raises(AssertionError, match="1 of 1 excused"):
        report.check()


def test_rows_without_a_comparable_token_excuse_nothing() -> None:
    """One excuse in 100 compared tokens is too many, whatever else was in the batches."""
    assert NearReport(rows=1000, tokens=100, excused=1).too_many_excused
    assert not NearReport(rows=1000, tokens=200, excused=1).too_many_excused
    drawn = {req_id: (SamplingParams(temperature=1.0), 1) for req_id in "dp"}
    report = NearReport()
    assert compare_step(view(), view(), dataclasses.replace(NEAR, draws=False), drawn, report) is None
    assert (report.rows, report.tokens) == (2, 0)


def test_nothing_compared_is_no_agreement() -> None:
    with pytest.raises(AssertionError, match="no row"):
        NearReport().check()


def test_judge() -> None:
    logits = np.array([0.0, 3.0, 5.0], np.float32)
    assert judge(logits, 0.1, 2, GREEDY, 0, 0) == Judgement("same", "")
    assert judge(logits, 0.1, 1, GREEDY, 0, 0).kind == "wrong"
    assert judge(logits, 0.5, 1, GREEDY, 0, 0).kind == "excused"


def test_it_reads_as_a_sentence() -> None:
    made = Difference(12, "input_ids", "w3", "position", 17, 5, 9, ("v1", "mrv2"))
    assert str(made) == "step 12: input_ids of request 'w3' at position 17: 5 in v1, 9 in mrv2"
    assert str(dataclasses.replace(made, note="why")).endswith("9 in mrv2 (why)")
