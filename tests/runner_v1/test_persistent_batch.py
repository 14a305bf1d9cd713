"""The persistent batch: where rows go, what a move costs, and that no field of a request is left behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mrv2lab.runner_v1.persistent_batch import InputBatch
from mrv2lab.runner_v1.sampling_rows import ALLOWED, PENALTIES
from tests.runner_v1.batches import MAX_LEN, make_batch, request
from tests.runner_v1.oracle import OPERATIONS, Pair
from tests.slow import mostly_slow


def scripts(operations: list[str]) -> Any:
    """Hypothesis draws lists of about five where it may; what is too much shrinks to "nothing"."""
    return st.lists(st.tuples(st.sampled_from(operations), st.integers(0, 2**16)), min_size=20, max_size=60)


SCRIPTS = scripts(OPERATIONS)


def follow(script: list[tuple[str, int]]) -> Pair:
    pair = Pair()
    for operation, seed in script:
        pair.do(operation, seed)
    return pair


# -- literal rows ------------------------------------------------------------------------------------------------------


def filled(*ids: str, **fields: Any) -> InputBatch:
    batch = make_batch()
    for req_id in ids:
        batch.add_request(request(req_id, **fields))
    return batch


def test_a_new_request_takes_the_lowest_hole_or_else_the_next_row() -> None:
    batch = filled(*"abcd")
    assert (batch.remove_request("c"), batch.remove_request("a")) == (2, 0)
    assert batch.req_ids == [None, "b", None, "d"]
    assert [batch.add_request(request(req_id)) for req_id in "xyz"] == [0, 2, 4]
    assert batch.req_ids == ["x", "b", "y", "d", "z"]


def test_a_row_holds_prompt_and_outputs_placeholders_included() -> None:
    batch = make_batch()
    outputs = [7, -1]
    row = batch.add_request(request("a", [5, 6], outputs, num_computed_tokens=3, temperature=0.5))
    assert batch.token_ids_cpu[row, :5].tolist() == [5, 6, 7, -1, -999]
    assert batch.token_ids_cpu_tensor[row, :4].tolist() == [5, 6, 7, -1]
    assert (batch.num_tokens_no_spec[row], batch.num_prompt_tokens[row]) == (4, 2)
    assert (batch.num_computed_tokens.np[row], batch.temperature.np[row]) == (3, 0.5)
    outputs.append(8)
    assert batch.req_output_token_ids[row] is outputs


def test_condense_moves_the_highest_live_row_into_the_lowest_hole() -> None:
    batch = filled(*"abcdef")
    for req_id in "fbd":
        batch.remove_request(req_id)
    batch.moves.reset()
    batch.condense()
    # Row 4 fills row 1; then the highest live row, 2, is below the next hole.
    assert batch.req_ids == ["a", "e", "c"]
    assert batch.req_id_to_index == {"a": 0, "e": 1, "c": 2}
    # One row: 3 tokens, 4 scalars, and in each of 2 groups a block id and their number; 4 bytes each.
    assert (batch.moves.row_moves, batch.moves.bytes_moved) == (1, 4 * (3 + 4 + 2 * 2))
    assert batch.moves.changed
    assert batch.add_request(request("g")) == 3


def test_condense_without_holes_or_with_nobody_left() -> None:
    batch = filled(*"abc")
    batch.moves.reset()
    batch.condense()
    assert not batch.moves.changed
    for req_id in "abc":
        batch.remove_request(req_id)
    batch.condense()
    assert (batch.req_ids, batch.num_reqs, batch.moves.row_moves, batch.moves.removes) == ([], 0, 0, 3)


def test_a_vacated_row_is_null_blocks() -> None:
    batch = filled(*"abc", block_ids=[[4, 5], [6]])
    batch.remove_request("a")
    batch.condense()
    assert batch.block_table[0].np[:3].tolist() == [[4, 5, 0, 0, 0, 0], [4, 5, 0, 0, 0, 0], [0] * 6]
    assert batch.block_table[1].num_blocks_per_row[:3].tolist() == [1, 1, 0]


def test_swap_exchanges_rows_of_different_length() -> None:
    generator = torch.Generator()
    batch = make_batch()
    batch.add_request(request("a", [1, 2, 3], generator=generator, temperature=1.0, block_ids=[[4, 5], [6]]))
    batch.add_request(request("b", [9], num_computed_tokens=1, block_ids=[[7], []]))
    batch.moves.reset()
    batch.swap_states(0, 1)
    assert batch.req_ids == ["b", "a"] and batch.generators == {1: generator}
    assert batch.token_ids_cpu[0, 0] == 9 and batch.token_ids_cpu[1, :3].tolist() == [1, 2, 3]
    assert batch.block_table[0].np[:2, :3].tolist() == [[7, 0, 0], [4, 5, 0]]
    # Tokens 3 + 1, twice 4 scalars, block ids twice (the longer + their number) in each group.
    assert (batch.moves.swaps, batch.moves.bytes_moved) == (1, 4 * (4 + 8 + 2 * (2 + 1) + 2 * (1 + 1)))
    batch.swap_states(1, 1)
    assert batch.moves.swaps == 1


def test_tiny_temperatures_are_greedy() -> None:
    batch = filled("a", temperature=1e-6)
    assert batch.temperature.np[0] == 0 and batch.all_greedy and not batch.all_random
    batch.add_request(request("b", temperature=1e-5))
    assert (batch.greedy_reqs, batch.random_reqs) == ({"a"}, {"b"})


def test_tables_of_sampling_parameters_are_made_for_the_first_who_needs_them() -> None:
    batch = filled("a")
    assert not batch.sampling.tables and not batch.sampling.used
    batch.add_request(request("b", params={"top_k": 50, "top_p": 1.0, "logit_bias": {}}))
    assert not batch.sampling.tables and not batch.sampling.used, "nobody is cut"
    batch.add_request(request("c", params={"top_k": 3, "presence_penalty": 0.5}))
    tables = {name: table.np[:3].tolist() for name, table in batch.sampling.tables.items()}
    ones, zeros = [1, 1, 1], [0, 0, 0]
    penalties = {"repetition_penalty": ones, "frequency_penalty": zeros, "presence_penalty": [0, 0, 0.5]}
    assert tables == {"top_k": [50, 50, 3]} | penalties
    batch.remove_request("c")
    assert batch.sampling.tables and not batch.sampling.used
    batch.add_request(request("d"))
    assert batch.sampling.tables["top_k"].np[:3].tolist() == [50, 50, 50]


def test_token_ids_by_position() -> None:
    one = request("a", [5, 6], [7, -1])
    assert [one.get_token_id(i) for i in range(6)] == [5, 6, 7, -1, -1, -1]
    assert one.num_tokens == 4


def test_reset_forgets_everybody() -> None:
    batch = filled(*"abc", generator=torch.Generator(), temperature=1.0)
    batch.remove_request("b")
    batch.prev_sampled_token_ids, batch.prev_req_id_to_index = torch.zeros(3, 1), {"a": 0}
    batch.reset()
    assert (batch.num_reqs, batch.req_ids, batch.generators, batch.random_reqs) == (0, [], {}, set())
    assert batch.prev_sampled_token_ids is None and batch.prev_req_id_to_index is None
    assert not batch.block_table[0].np.any() and not batch.moves.changed
    assert batch.add_request(request("b")) == 0


def test_observers_find_every_table() -> None:
    batch = make_batch()
    assert sorted(batch.tables()) == ["block_table.0", "block_table.1", "num_computed_tokens", "temperature"]
    host_only = {"token_ids_cpu", "num_tokens_no_spec", "num_prompt_tokens"}
    assert set(batch.host_tables()) == set(batch.tables()) | host_only


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (request("a"), ValueError, r"'a' has row 0 already; remove it first"),
        (request("b", MAX_LEN + 1), ValueError, r"'b' has 25 tokens, but max_model_len is 24"),
        (request("b", block_ids=[[1]]), ValueError, r"for 1 KV-cache groups, but there are 2"),
        (request("b", block_ids=[[1], [2] * 4]), RuntimeError, r"4 blocks in group 1, but max_model_len allows 3"),
    ],
)
def test_a_refused_request_changes_nothing(bad: Any, error: type[Exception], message: str) -> None:
    pair = Pair()
    pair._add(request("a"))
    with pytest.raises(error, match=message):
        pair.batch.add_request(bad)
    pair.check()


def test_a_full_batch_says_so() -> None:
    batch = make_batch(2)
    for req_id in "ab":
        batch.add_request(request(req_id))
    with pytest.raises(RuntimeError, match=r"no free row for 'c': all 2 are taken"):
        batch.add_request(request("c"))
    assert batch.req_ids == ["a", "b"]


# -- any sequence of edits against plain lists -------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(SCRIPTS)
def test_every_field_follows_its_request(script: list[tuple[str, int]]) -> None:
    follow(script)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(SCRIPTS)
def test_every_field_follows_its_request_over_many_edits(script: list[tuple[str, int]]) -> None:
    follow(script)


@settings(max_examples=50, deadline=None)
@given(scripts(["nothing", "add", "add", "remove", "token", "condense"]))
def test_counters_count_what_was_moved(script: list[tuple[str, int]]) -> None:
    pair = follow(script)
    moves = pair.batch.moves
    assert (moves.adds, moves.removes, moves.swaps) == (pair.added, pair.removed, 0)
    assert (moves.row_moves, moves.bytes_moved) == (pair.moved, pair.bytes)


# -- mutants: one field forgotten --------------------------------------------------------------------------------------


def array(path: Callable[[InputBatch], Any]) -> tuple[Callable[..., Any], Callable[..., None]]:
    """How to read and put back a row of an array, or an entry of a list."""

    def read(batch: InputBatch, row: int) -> Any:
        value = path(batch)[row]
        return value.copy() if hasattr(value, "copy") and not isinstance(value, list) else value

    def write(batch: InputBatch, row: int, value: Any) -> None:
        path(batch)[row] = value

    return read, write


def read_generator(batch: InputBatch, row: int) -> Any:
    return batch.generators.get(row)


def write_generator(batch: InputBatch, row: int, generator: Any) -> None:
    batch.generators.pop(row, None)
    if generator is not None:
        batch.generators[row] = generator


def sampling_map(name: str) -> tuple[Callable[..., Any], Callable[..., None]]:
    """The same for a dictionary by row of the sampling parameters."""

    def write(batch: InputBatch, row: int, value: Any) -> None:
        by_row = getattr(batch.sampling, name)
        by_row.pop(row, None)
        if value is not None:
            by_row[row] = value

    return (lambda batch, row: getattr(batch.sampling, name).get(row)), write


def sampling_table(name: str) -> tuple[Callable[..., Any], Callable[..., None]]:
    """The same for a table of the sampling parameters, which is made when the first request needs it."""

    def read(batch: InputBatch, row: int) -> Any:
        return batch.sampling.tables[name].np[row].copy() if name in batch.sampling.tables else None

    def write(batch: InputBatch, row: int, value: Any) -> None:
        if value is not None:
            batch.sampling.tables[name].np[row] = value

    return read, write


SAMPLING_MAPS = ["logit_bias", "min_tokens", "bad_words", "processors", "num_logprobs"]
FIELDS = {
    "req_ids": array(lambda batch: batch._req_ids),
    "req_output_token_ids": array(lambda batch: batch.req_output_token_ids),
    "token_ids_cpu": array(lambda batch: batch.token_ids_cpu),
    "num_tokens_no_spec": array(lambda batch: batch.num_tokens_no_spec),
    "num_prompt_tokens": array(lambda batch: batch.num_prompt_tokens),
    "num_computed_tokens": array(lambda batch: batch.num_computed_tokens.np),
    "temperature": array(lambda batch: batch.temperature.np),
    "generators": (read_generator, write_generator),
    "block_ids.0": array(lambda batch: batch.block_table[0].np),
    "block_ids.1": array(lambda batch: batch.block_table[1].np),
    "num_blocks_per_row.0": array(lambda batch: batch.block_table[0].num_blocks_per_row),
    "num_blocks_per_row.1": array(lambda batch: batch.block_table[1].num_blocks_per_row),
    **{name: sampling_map(name) for name in SAMPLING_MAPS},
    **{name: sampling_table(name) for name in (ALLOWED, "top_k", "top_p", "min_p", *PENALTIES)},
}
"""Per-row fields; those by request id follow below."""

MAPS = {
    "req_id_to_index": lambda batch: batch.req_id_to_index,
    "greedy_reqs": lambda batch: batch.greedy_reqs,
    "random_reqs": lambda batch: batch.random_reqs,
}

ROWS_OF = {"_fill_row": lambda args: args[:1], "_move_row": lambda args: args, "swap_states": lambda args: args}
"""add, condense and swap: which of the method's arguments are rows."""


def forget(monkeypatch: pytest.MonkeyPatch, method: str, field: str) -> None:
    """Make ``method`` leave ``field`` as it was."""
    original = getattr(InputBatch, method)

    def forgetful(batch: InputBatch, *args: Any) -> None:
        if field in MAPS:
            before = MAPS[field](batch).copy()
            original(batch, *args)
            MAPS[field](batch).clear()
            MAPS[field](batch).update(before)
            return
        read, write = FIELDS[field]
        rows = ROWS_OF[method](args)
        old = [read(batch, row) for row in rows]
        original(batch, *args)
        for row, value in zip(rows, old, strict=True):
            write(batch, row, value)

    monkeypatch.setattr(InputBatch, method, forgetful)


def assert_caught() -> None:
    """The property fails; a crash on the way is a failure too."""

    @settings(
        max_examples=300,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(SCRIPTS)
    def prop(script: list[tuple[str, int]]) -> None:
        follow(script)

    with pytest.raises((AssertionError, IndexError, KeyError, RuntimeError, TypeError)):
        prop()


@pytest.mark.slow
@pytest.mark.parametrize("method", ROWS_OF)
def test_a_mutant_that_forgets_nothing_is_not_caught(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setitem(FIELDS, "nothing", (lambda batch, row: None, lambda batch, row, value: None))
    forget(monkeypatch, method, "nothing")
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        assert_caught()


@pytest.mark.parametrize("field", mostly_slow(["req_id_to_index", *FIELDS], 16))
@pytest.mark.parametrize("method", mostly_slow(["_move_row", "swap_states"], 1))
def test_a_field_forgotten_in_a_move_is_caught(monkeypatch: pytest.MonkeyPatch, method: str, field: str) -> None:
    forget(monkeypatch, method, field)
    assert_caught()


@pytest.mark.parametrize("field", [*FIELDS, "greedy_reqs", "random_reqs"])
def test_a_field_forgotten_in_add_is_caught(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    forget(monkeypatch, "_fill_row", field)
    assert_caught()


LEFT = ["generators", "greedy_reqs", "random_reqs", "block_ids.0", "req_output_token_ids", *SAMPLING_MAPS]


@pytest.mark.parametrize("field", LEFT)
def test_a_field_left_by_remove_is_caught(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    original = InputBatch.remove_request

    def forgetful(batch: InputBatch, req_id: str) -> int | None:
        row = batch.req_id_to_index.get(req_id)
        if row is None or field in MAPS:
            before = MAPS[field](batch).copy() if field in MAPS else None
            original(batch, req_id)
            if before is not None:
                MAPS[field](batch).update(before)
            return row
        read, write = FIELDS[field]
        before = read(batch, row)
        original(batch, req_id)
        write(batch, row, before)
        return row

    monkeypatch.setattr(InputBatch, "remove_request", forgetful)
    assert_caught()
