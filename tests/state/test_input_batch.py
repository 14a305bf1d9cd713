"""The batch order and what the host knows of a step, with Appendix A1's layout."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.runtime.transfer import POLICIES
from mrv2lab.state import InputBuffers, RequestState, gather_host_batch, input_batch
from mrv2lab.state.prefix import MAX_KEPT, Prefix
from tests.runner_v1.test_mutants import mutate
from tests.state.requests import make_state, request, scheduled


def test_appendix_a1_layout(cpu: CpuRuntime) -> None:
    """K = 2. Row 2 (B) decodes with two drafts, row 5 (A) prefills four tokens: the batch is [B, A]."""
    state = make_state(cpu, rows=8, drafts=2)
    for name in "76":
        state.add_request(request(name, [1]))
    assert state.add_request(request("A", [10, 11, 12, 13])) == 5
    for name in "43":
        state.add_request(request(name, [1]))
    assert state.add_request(request("B", [1, 2, 3])) == 2
    state.num_computed_tokens_np[2] = 4
    state.num_computed_prefill_tokens[2] = 3
    batch = gather_host_batch(state, scheduled({"A": 4, "B": 3}, {"B": [80, 81]}), decode_query_len=3)
    assert batch.req_ids == ["B", "A"]
    assert batch.rows.tolist() == [2, 5]
    assert batch.num_scheduled_tokens.tolist() == [3, 4]
    assert batch.num_draft_tokens.tolist() == [2, 0]
    assert batch.query_start_loc.tolist() == [0, 3, 7, 7, 7, 7, 7, 7, 7]
    assert batch.seq_lens_upper_bound.tolist() == [7, 4]
    assert (batch.num_tokens, batch.num_logits, batch.has_prefill) == (7, 4, True)
    assert batch.rows.dtype == batch.query_start_loc.dtype == batch.seq_lens_upper_bound.dtype == np.int32


def add_all(state: RequestState, names: list[str]) -> None:
    for name in names:
        state.add_request(request(name, [1] * 10))


def test_verify_rows_then_decodes_then_short_extends_then_prefills(cpu: CpuRuntime) -> None:
    state = make_state(cpu)
    add_all(state, ["prefill", "extend", "decode1", "verify", "decode2"])
    tokens = {"prefill": 9, "extend": 2, "decode1": 1, "verify": 3, "decode2": 1}
    batch = gather_host_batch(state, scheduled(tokens, {"verify": [1, 2]}), decode_query_len=1)
    assert batch.req_ids == ["verify", "decode1", "decode2", "extend", "prefill"]
    assert batch.rows.tolist() == [state.req_id_to_index[name] for name in batch.req_ids]
    assert batch.query_start_loc.tolist() == [0, 3, 4, 5, 7, 16, 16, 16, 16]


def test_the_order_is_the_sort_key_and_stable(cpu: CpuRuntime) -> None:
    choose, state = random.Random(1), make_state(cpu, rows=40, length=64)
    names = [f"r{i}" for i in range(40)]
    add_all(state, names)
    for length, share in ((1, 0.3), (2, 0.3), (3, 0.3), (1, 0), (2, 0)):
        for count in (0, 1, 2, 7, 40):
            tokens = {name: choose.choice([1, 1, 2, 3, 8, 9]) for name in choose.sample(names, count)}
            drafts = {name: [0] * choose.randrange(3) for name in tokens if choose.random() < share}
            batch = gather_host_batch(state, scheduled(tokens, drafts), decode_query_len=length)
            key = lambda name: (not drafts.get(name), tokens[name] != length, tokens[name])  # noqa: E731, B023
            assert batch.req_ids == sorted(tokens, key=key)
            assert batch.num_scheduled_tokens.tolist() == [tokens[name] for name in batch.req_ids]
            assert batch.num_draft_tokens.tolist() == [len(drafts.get(name, ())) for name in batch.req_ids]
            assert batch.num_logits == count + sum(map(len, drafts.values()))
            assert batch.num_tokens == sum(tokens.values())
            assert (np.diff(batch.query_start_loc) >= 0).all()
            assert batch.query_start_loc[-1] == batch.num_tokens


def test_a_prefill_is_a_row_with_known_tokens_to_compute(cpu: CpuRuntime) -> None:
    state = make_state(cpu)
    row = state.add_request(request("a", [1] * 10, prompt_len=4))  # resumed: six outputs are known tokens too
    for computed, prefill in ((0, True), (4, True), (9, True), (10, False)):
        state.num_computed_tokens_np[row] = state.num_computed_prefill_tokens[row] = computed
        assert gather_host_batch(state, scheduled({"a": 1})).has_prefill is prefill


def test_an_unknown_request_is_an_error(cpu: CpuRuntime) -> None:
    with pytest.raises(KeyError, match="ghost"):
        gather_host_batch(make_state(cpu), scheduled({"ghost": 1}))


def test_buffers_are_fixed_and_sized_for_the_largest_step(rt: Runtime) -> None:
    buffers = InputBuffers(
        rt, POLICIES["pinned_copy"](rt), max_num_reqs=4, max_num_batched_tokens=10, num_speculative_tokens=3
    )
    shapes = {name: tuple(value.shape) for name, value in vars(buffers).items() if isinstance(value, torch.Tensor)}
    assert shapes == {
        "input_ids": (10,),
        "positions": (10,),
        "seq_lens": (4,),
        "logits_indices": (10,),  # 4 * (3 + 1) logits rows would need as many tokens
        "expanded_idx_mapping": (10,),
        "expanded_local_pos": (10,),
        "first_pos": (10,),
        "arange": (5,),
    }
    assert rt.read(buffers.arange).tolist() == [0, 1, 2, 3, 4]
    sent = buffers.query_start_loc.send(np.arange(5, dtype=np.int32))
    assert buffers.query_start_loc.send(np.arange(3, dtype=np.int32)).data_ptr() == sent.data_ptr()


def test_mutant_an_unstable_order(cpu: CpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reversed:
        def __getattr__(self, name: str) -> object:
            return getattr(np, name)

        @staticmethod
        def lexsort(keys: tuple[np.ndarray, ...]) -> np.ndarray:
            return len(keys[0]) - 1 - np.lexsort(tuple(key[::-1] for key in keys))

    monkeypatch.setattr(input_batch, "np", Reversed())
    with pytest.raises(AssertionError):
        test_verify_rows_then_decodes_then_short_extends_then_prefills(cpu)


def test_mutant_what_does_not_ascend_is_not_sorted(cpu: CpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, input_batch, "gather_host_batch", "not (tokens[1:] < tokens[:-1]).any()", "True")
    monkeypatch.setitem(globals(), "gather_host_batch", input_batch.gather_host_batch)
    with pytest.raises(AssertionError):
        test_the_order_is_the_sort_key_and_stable(cpu)


def test_who_samples_is_known(cpu: CpuRuntime) -> None:
    state = make_state(cpu)
    row = state.add_request(request("a", [1] * 10))
    state.num_computed_tokens_np[row] = state.num_computed_prefill_tokens[row] = 4
    for tokens, ends in ((5, False), (6, True)):
        batch = gather_host_batch(state, scheduled({"a": tokens}))
        assert batch.has_prefill
        assert batch.all_sample is ends


def test_views_are_kept_and_few() -> None:
    first = Prefix(torch.arange(1000))
    views = [first(n) for n in (3, 5, 3, 1000)]
    assert [len(view) for view in views] == [3, 5, 3, 1000]
    assert views[0] is views[2]
    assert views[3] is first.tensor
    assert all(first(n).data_ptr() == first.tensor.data_ptr() for n in range(1, 1000))
    assert len(first._views) <= MAX_KEPT


def test_mutant_a_tail_that_is_not_filled(cpu: CpuRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    gather = input_batch.gather_host_batch

    def short(*args: object, **kwargs: object) -> object:
        batch = gather(*args, **kwargs)  # type: ignore[arg-type]
        starts = batch.query_start_loc.copy()
        starts[len(batch.req_ids) + 1 :] = 0
        return replace(batch, query_start_loc=starts)

    monkeypatch.setitem(globals(), "gather_host_batch", short)
    with pytest.raises(AssertionError):
        test_the_order_is_the_sort_key_and_stable(cpu)
