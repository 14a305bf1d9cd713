"""Permanent rows: who owns which, and that nothing of a row's last owner reaches the next."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from mrv2lab.memory import StagedWriteTensor, UvaBackedTensor
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.runtime.transfer import POLICIES
from mrv2lab.state import RequestState
from tests.runtime.machines import Steps, log, marks, seen
from tests.state.requests import make_state, request

POISON = -4321
SAFE = ["barrier", "pinned_copy", "uva_pool"]


def check_rows(state: RequestState) -> None:
    """Master invariant 4: each request owns one row, and free and active rows are all rows, disjoint."""
    active = list(state.req_id_to_index.values())
    assert sorted(state.free_indices + active) == list(range(state.max_num_reqs))
    assert {row: req_id for req_id, row in state.req_id_to_index.items()} == state.index_to_req_id


def of_row(rt: Runtime, state: RequestState, row: int) -> dict[str, Any]:
    """Everything of ``row`` that may be read before the device writes it."""
    prefill_len = int(state.prefill_len.np[row])
    return {
        "prompt_len": seen(rt, state.prompt_len.gpu)[row],
        "prefill_len": seen(rt, state.prefill_len.gpu)[row],
        "total_len": seen(rt, state.total_len.gpu)[row],
        "num_computed_tokens": seen(rt, state.num_computed_tokens.gpu)[row],
        "all_token_ids": rt.read(state.all_token_ids.gpu)[row, :prefill_len].tolist(),
        "draft_tokens": rt.read(state.draft_tokens.gpu)[row].tolist(),
        "num_computed_tokens_np": int(state.num_computed_tokens_np[row]),
        "num_computed_prefill_tokens": int(state.num_computed_prefill_tokens[row]),
    }


WRITTEN_BY_THE_DEVICE_FIRST = {"last_sampled_tokens", "next_prefill_tokens"}
"""post_update and prefill_inputs write a row's entry before combine_tokens (or a drafter) reads it."""


def tables(state: RequestState) -> dict[str, Any]:
    """Every per-row table, found by its type."""
    kinds = (StagedWriteTensor, UvaBackedTensor, torch.Tensor, np.ndarray)
    return {name: value for name, value in vars(state).items() if isinstance(value, kinds) and name != "_no_drafts"}


def poison(rt: Runtime, state: RequestState) -> None:
    """Overwrite every table, as the longest life of an earlier owner might have left it."""
    for table in tables(state).values():
        if isinstance(table, StagedWriteTensor):
            rt.raw(table.gpu).fill_(POISON)
        elif isinstance(table, torch.Tensor):
            rt.raw(table).fill_(POISON)
        else:
            (table.np if isinstance(table, UvaBackedTensor) else table)[:] = POISON


# -- rows --------------------------------------------------------------------------------------------------------------


def test_rows_are_handed_out_from_the_top_and_reused_last_in_first_out(cpu: CpuRuntime) -> None:
    state = make_state(cpu, rows=4)
    assert [state.add_request(request(name, [1])) for name in "abc"] == [3, 2, 1]
    assert state.remove_request("a") == 3
    assert state.remove_request("c") == 1
    assert state.free_indices == [0, 3, 1]
    assert [state.add_request(request(name, [1])) for name in "de"] == [1, 3]
    assert state.req_id_to_index == {"b": 2, "d": 1, "e": 3}
    assert state.num_reqs == 3
    check_rows(state)


def test_no_row_leaks_over_10_000_random_operations(cpu: CpuRuntime) -> None:
    """mrv2.md 4.2 #14: add, finish, preempt and resume, abort; contents are compared with a model now and then."""
    choose, transfers = random.Random(14), POLICIES["uva_pool"](cpu)
    state, steps = make_state(cpu, rows=16, policy=transfers), Steps(cpu, transfers)
    live: dict[str, list[int]] = {}
    preempted: list[tuple[str, list[int]]] = []
    for number in range(10_000):
        what = choose.random()
        if what < 0.5 and len(live) < 16:
            name, tokens = preempted.pop() if preempted and what < 0.2 else (f"r{number}", [])
            tokens = tokens + [choose.randrange(100) for _ in range(choose.randrange(1, 4))]
            state.add_request(request(name, tokens[:16], prompt_len=1))
            live[name] = tokens[:16]
        elif what < 0.9 and live:
            name = choose.choice(list(live))
            state.remove_request(name)
            tokens = live.pop(name)
            if what < 0.7:
                preempted.append((name, tokens))
        elif what >= 0.9:
            with steps.step():
                state.apply_staged_writes()
        check_rows(state)
        if number % 500 == 499:
            with steps.step():
                state.apply_staged_writes()
            for name, tokens in live.items():
                got = of_row(cpu, state, state.req_id_to_index[name])
                assert (got["all_token_ids"], got["total_len"], got["prompt_len"]) == (tokens, len(tokens), 1)


def test_a_full_table_and_a_known_id_are_refused_unharmed(cpu: CpuRuntime) -> None:
    state = make_state(cpu, rows=2)
    state.add_request(request("a", [1]))
    with pytest.raises(ValueError, match="request 'a' has row 1 already"):
        state.add_request(request("a", [1]))
    state.add_request(request("b", [1]))
    with pytest.raises(RuntimeError, match="no free row for 'c': all 2 are taken"):
        state.add_request(request("c", [1]))
    state.remove_request("a")
    with pytest.raises(ValueError, match="'c' has 17 tokens, but max_model_len is 16"):
        state.add_request(request("c", [1] * 17))
    with pytest.raises(KeyError):
        state.remove_request("c")
    check_rows(state)
    assert state.staged().keys() == {"all_token_ids", "total_len", "num_computed_tokens", "draft_tokens"}
    assert all(diff.row == 0 for diffs in state.staged().values() for diff in diffs)


def test_reset_frees_every_row(cpu: CpuRuntime) -> None:
    state = make_state(cpu, rows=4)
    for name in "abc":
        state.add_request(request(name, [1, 2]))
    state.reset()
    check_rows(state)
    assert (state.num_reqs, state.staged()) == (0, {})
    log(cpu).clear()
    state.apply_staged_writes()  # a dropped queue may have held copies of what is published
    assert [mark.name for mark in log(cpu).marks] == ["prompt_len.uva0", "prefill_len.uva0"]
    row = state.add_request(request("d", [7, 8]))
    state.apply_staged_writes()
    assert of_row(cpu, state, row)["all_token_ids"] == [7, 8]


def test_reset_finds_a_row_that_an_interrupt_lost(cpu: CpuRuntime) -> None:
    """Between the free list and the maps it is in neither."""
    state = make_state(cpu, rows=4)
    state.free_indices.pop()
    state.reset()
    check_rows(state)


# -- contents ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", SAFE)
def test_a_new_request_overwrites_every_table(rt: Runtime, policy: str) -> None:
    """A resumed one too: prompt 3, two outputs, two tokens of KV found in the prefix cache."""
    new = request("new", [5, 6, 7, 8, 9], prompt_len=3, num_computed=2)
    transfers = POLICIES[policy](rt)
    used, fresh = make_state(rt, policy=transfers), make_state(rt, policy=POLICIES[policy](rt))
    with transfers.prepare():
        used.add_request(request("old", list(range(16)), num_computed=15))
        used.apply_staged_writes()
    rt.synchronize()
    used.remove_request("old")
    poison(rt, used)
    rows = []
    with transfers.prepare():
        for state in (used, fresh):
            rows.append(state.add_request(new))
            state.apply_staged_writes()
    assert rows == [7, 7]
    right = {
        "prompt_len": 3,
        "prefill_len": 5,
        "total_len": 5,
        "num_computed_tokens": 2,
        "all_token_ids": [5, 6, 7, 8, 9],
        "draft_tokens": [0, 0],
        "num_computed_tokens_np": 2,
        "num_computed_prefill_tokens": 2,
    }
    assert of_row(rt, used, 7) == of_row(rt, fresh, 7) == right
    assert rt.read(used.all_token_ids.gpu)[7, 5:].tolist() == [POISON] * 11  # stale, and never read


def test_every_table_is_accounted_for(cpu: CpuRuntime) -> None:
    """A table somebody adds to the state must be overwritten on add, or be written by the device first."""
    state = make_state(cpu)
    state.add_request(request("a", [1]))
    state.apply_staged_writes()
    assert set(tables(state)) == set(of_row(cpu, state, 7)) | WRITTEN_BY_THE_DEVICE_FIRST


def check_rows_of_a_batch(cpu: CpuRuntime) -> None:
    """The rows of a batch are remembered while nobody leaves: an id may come back on another row."""
    state = make_state(cpu, rows=8)
    for req_id in "abc":
        state.add_request(request(req_id, [1]))
    ids = ["a", "c"]
    rows = state.rows(ids)
    assert rows.tolist() == [7, 5]
    assert state.rows(list(ids)) is rows
    assert state.rows(["c", "a"]).tolist() == [5, 7]
    assert state.rows(ids).tolist() == [7, 5]
    state.remove_request("b")
    state.remove_request("a")
    state.add_request(request("d", [1]))
    state.add_request(request("a", [1]))
    assert state.rows(ids).tolist() == [6, 5]
    state.reset()
    with pytest.raises(KeyError):
        state.rows(ids)


def test_rows_of_a_batch(cpu: CpuRuntime) -> None:
    check_rows_of_a_batch(cpu)


@pytest.mark.parametrize("name", ["remove_request", "reset"])
def test_mutant_rows_that_are_remembered_too_long(cpu: CpuRuntime, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = getattr(RequestState, name)

    def stale(self: RequestState, *args: Any) -> Any:
        before = self._batch_rows
        made = honest(self, *args)
        self._batch_rows = before
        return made

    monkeypatch.setattr(RequestState, name, stale)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check_rows_of_a_batch(cpu)


def test_shapes(cpu: CpuRuntime) -> None:
    state = make_state(cpu, rows=8, length=16, drafts=2)
    assert (state.all_token_ids.gpu.shape, state.all_token_ids.gpu.dtype) == ((8, 16), torch.int32)
    assert (state.draft_tokens.gpu.shape, state.draft_tokens.gpu.dtype) == ((8, 2), torch.int64)
    assert (state.last_sampled_tokens.shape, state.last_sampled_tokens.dtype) == ((8,), torch.int64)
    assert (state.next_prefill_tokens.shape, state.next_prefill_tokens.dtype) == ((2, 8), torch.int32)
    assert make_state(cpu, drafts=0).draft_tokens.gpu.shape == (8, 1)


def test_a_step_without_new_requests_sends_nothing(rt: Runtime) -> None:
    state = make_state(rt)
    log(rt).clear()
    state.apply_staged_writes()
    assert log(rt).marks == []
    state.add_request(request("a", [1]))
    state.apply_staged_writes()
    assert [(mark.name, mark.writes) for mark in marks(rt, "kernel")] == [
        ("fused_apply_write", ("all_token_ids", "total_len", "num_computed_tokens")),
        ("apply_write", ("draft_tokens",)),
    ]
    log(rt).clear()
    state.remove_request("a")
    state.apply_staged_writes()
    assert log(rt).marks == []


def test_without_speculation_no_drafts_are_staged(rt: Runtime) -> None:
    """Nobody writes drafts then, so the table is still the zeros it began with; and nobody reads it."""
    state = make_state(rt, drafts=0)
    row = state.add_request(request("a", [4, 5]))
    assert state.staged().keys() == {"all_token_ids", "total_len", "num_computed_tokens"}
    log(rt).clear()
    state.apply_staged_writes()
    assert [mark.name for mark in marks(rt, "kernel")] == ["fused_apply_write"]
    assert of_row(rt, state, row)["draft_tokens"] == [0]
    assert of_row(rt, state, row)["all_token_ids"] == [4, 5]


def test_a_row_given_back_before_the_apply_leaves_nothing_staged(cpu: CpuRuntime) -> None:
    state = make_state(cpu)
    state.add_request(request("a", [1, 2, 3]))
    state.remove_request("a")
    assert state.staged() == {}
    row = state.add_request(request("b", [9]))
    state.apply_staged_writes()
    assert of_row(cpu, state, row)["all_token_ids"] == [9]


# -- mutants -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forgotten", ["draft_tokens", "all_token_ids", "total_len", "num_computed_tokens"])
def test_mutant_an_add_that_forgets_a_table(cpu: CpuRuntime, monkeypatch: pytest.MonkeyPatch, forgotten: str) -> None:
    stage = StagedWriteTensor.stage_write

    def forgetful(self: StagedWriteTensor, row: int, start: int, values: Any) -> None:
        if self.name != forgotten:
            stage(self, row, start, values)

    monkeypatch.setattr(StagedWriteTensor, "stage_write", forgetful)
    with pytest.raises(AssertionError):
        test_a_new_request_overwrites_every_table(cpu, "uva_pool")


def test_mutant_tables_that_are_not_published(cpu: CpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UvaBackedTensor, "publish", lambda self: None)
    with pytest.raises(AssertionError):
        test_a_new_request_overwrites_every_table(cpu, "uva_pool")


def _leak(self: RequestState, req_id: str) -> int:
    row = self.req_id_to_index.pop(req_id)
    del self.index_to_req_id[row]
    return row


def _free_twice(self: RequestState, req_id: str) -> int:
    row = _leak(self, req_id)
    self.free_indices += [row, row]
    return row


def _keep_staged(self: RequestState, req_id: str) -> int:
    row = _leak(self, req_id)
    self.free_indices.append(row)
    return row


@pytest.mark.parametrize("mutant", [_leak, _free_twice, _keep_staged])
def test_mutant_a_removal_that_gets_rows_wrong(cpu: CpuRuntime, monkeypatch: pytest.MonkeyPatch, mutant: Any) -> None:
    monkeypatch.setattr(RequestState, "remove_request", mutant)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        test_no_row_leaks_over_10_000_random_operations(cpu)


def test_mutant_a_row_that_is_reused_while_it_lives(cpu: CpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    add = RequestState.add_request

    def peek(self: RequestState, new: Any) -> int:
        row = add(self, new)
        self.free_indices.append(row)
        return row

    monkeypatch.setattr(RequestState, "add_request", peek)
    with pytest.raises(AssertionError):
        test_rows_are_handed_out_from_the_top_and_reused_last_in_first_out(cpu)


# -- who is past the prefill -------------------------------------------------------------------------------------------


def check_prefilling(state: RequestState) -> None:
    """Asked of the same array again and again, and of that of a request that came back with a longer prefill."""

    def step(tokens: int) -> bool:
        rows = state.rows(ids)
        state.num_computed_tokens_np[rows] += tokens
        np.minimum(state.num_computed_tokens_np, state.prefill_len.np, out=state.num_computed_prefill_tokens)
        return state.any_prefilling(rows)

    ids = ["a", "b"]
    for req_id in ids:
        state.add_request(request(req_id, [1] * 6))
    assert [step(2) for _ in range(5)] == [True, True, False, False, False]
    state.remove_request("b")
    state.add_request(request("b", [1] * 9))
    assert [step(3) for _ in range(5)] == [True, True, False, False, False]
    assert state.any_prefilling(state.rows(["a"])) is False
    ids = ["a", "b", "c"]
    state.add_request(request("c", [1] * 2))
    assert [step(1) for _ in range(3)] == [True, False, False]


def test_who_is_past_the_prefill(cpu: CpuRuntime) -> None:
    check_prefilling(make_state(cpu))


def test_mutant_a_batch_that_is_kept_though_its_row_has_a_new_owner(
    cpu: CpuRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = RequestState.remove_request

    def keep(self: RequestState, req_id: str) -> int:
        before = self._batch_rows
        row = honest(self, req_id)
        self._batch_rows = before
        return row

    monkeypatch.setattr(RequestState, "remove_request", keep)
    with pytest.raises(AssertionError):
        check_prefilling(make_state(cpu))
