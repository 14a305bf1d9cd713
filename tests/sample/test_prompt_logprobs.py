"""Log-probabilities of prompt tokens: exactly prompt_len - 1 rows, once, whatever the chunks, preemptions and order."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from mrv2lab.protocol import RequestData, SamplingParams
from mrv2lab.runtime.transfer import POLICIES
from mrv2lab.sample import prompt_logprobs
from mrv2lab.sample.prompt_logprobs import PromptLogprobs
from mrv2lab.sample.token_logprobs import LogprobsBuffers, TokenLogprobs
from mrv2lab.state.input_batch import gather_host_batch
from tests.runtime.machines import cpu, rt
from tests.sample import oracle
from tests.state.requests import make_state, scheduled

__all__ = ["cpu", "rt"]
V, T, CHUNK = 300, 16, 4


class Model:
    """Logits of a token are a function of its request and position; "hidden states" are the logits themselves."""

    def __init__(self, rt):
        self.rt = rt
        self.hidden = rt.zeros((T, V), torch.float32, name="hidden")
        self.logits = rt.zeros((CHUNK, V), torch.float32, name="chunk")
        self.calls = []
        rt.register("fake.logits", lambda out, hidden, indices: torch.index_select(hidden, 0, indices, out=out))

    @staticmethod
    def of(req_id, position):
        seed = 1000 * ord(req_id) + position
        return torch.randn(V, generator=torch.Generator().manual_seed(seed)) * 3

    def forward(self, host, first):
        rows = [
            self.of(r, first[r] + j)
            for r, n in zip(host.req_ids, host.num_scheduled_tokens, strict=True)
            for j in range(n)
        ]
        self.rt.h2d(self.hidden[: len(rows)], self.rt_pinned(torch.stack(rows)))

    def rt_pinned(self, values):
        pinned = self.rt.empty(tuple(values.shape), torch.float32, name="hidden.tmp", place="pinned")
        return pinned.copy_(values)

    def compute_logits(self, indices, n):
        self.calls.append(n)
        out, hidden = self.logits[:n], self.hidden
        self.rt.run("fake.logits", out, hidden, indices, reads=(hidden, indices), writes=(out,))
        return out


class Lab:
    """The order of a runner's step, two output slots."""

    def __init__(self, rt, max_top=8):
        self.rt = rt
        self.states = make_state(rt, rows=4, length=40)
        self.model = Model(rt)
        self.transfers = POLICIES["pinned_copy"](rt)
        kernels = TokenLogprobs(rt, max_rows=CHUNK, vocab_size=V, max_top=max_top)
        self.prompts = PromptLogprobs(
            rt, self.transfers, kernels, max_num_reqs=4, max_num_batched_tokens=T, chunk=CHUNK
        )
        self.slots = [LogprobsBuffers(rt, f"prompt.{i}", max_rows=T, max_top=max_top) for i in range(2)]
        self.steps = 0

    def add(self, req_id, tokens, wish=2, prompt_len=None, num_computed=0):
        made = RequestData(
            req_id,
            prompt_len or len(tokens),
            tokens,
            SamplingParams(prompt_logprobs=wish),
            0,
            False,
            ([1],),
            num_computed,
        )
        self.prompts.add_request(self.states.add_request(made), made)

    def remove(self, req_id, finished=True):
        self.prompts.remove_request(self.states.remove_request(req_id), req_id, finished)

    def launch(self, **tokens):
        """One step's launches; returns what collects them, or None where nothing was planned."""
        host = gather_host_batch(self.states, scheduled(tokens))
        first = {r: int(self.states.num_computed_tokens_np[row]) for r, row in self.states.req_id_to_index.items()}
        plan = self.prompts.plan(host, self.states)
        self.model.forward(host, first)
        made = None
        if plan is not None:
            made = self.prompts.launch(plan, self.slots[self.steps % 2], self.model)
            self.steps += 1
        state = self.states
        state.num_computed_tokens_np[host.rows] += host.num_scheduled_tokens
        np.minimum(state.num_computed_tokens_np, state.prefill_len.np, out=state.num_computed_prefill_tokens)
        return made

    def finish(self, made):
        made.copy()
        self.rt.synchronize()
        return made.collect()

    def step(self, **tokens):
        made = self.launch(**tokens)
        return {} if made is None else self.finish(made)


def assert_prompt(got, req_id, tokens, k):
    assert len(got.ranks) == len(got.token_ids) == len(got.values) == len(tokens) - 1
    for i, token in enumerate(tokens[1:]):
        x = Model.of(req_id, i).double().numpy()
        ids, values = oracle.top_logprobs(x, token, k)
        assert got.token_ids[i].tolist() == ids
        np.testing.assert_allclose(got.values[i], values, rtol=1e-5)
        assert got.ranks[i] == oracle.rank(x, token)


def prompt(n, start=10):
    return [(start + 7 * i) % V for i in range(n)]


@pytest.mark.parametrize("chunks", [[11], [3, 5, 3], [10, 1], [1, 10], [4, 4, 3]], ids=str)
@pytest.mark.parametrize("wish", [2, 0, -1, 9])
def test_chunked_prefill(rt, chunks, wish):
    """The last row predicts the first output and is dropped, wherever the chunks fall; whole once, at the end.
    Logits are computed at most CHUNK rows at a time (mrv2.md #56)."""
    lab, tokens = Lab(rt), prompt(11)
    lab.add("A", tokens, wish)
    results = [lab.step(A=n) for n in chunks]
    assert results[:-1] == [{}] * (len(chunks) - 1)
    assert list(results[-1]) == ["A"]
    assert_prompt(results[-1]["A"], "A", tokens, wish)
    assert lab.step(A=1) == {}
    assert max(lab.model.calls) <= CHUNK
    assert sum(lab.model.calls) == 10


def test_several_requests(rt):
    """Two prompts of different wishes beside one that asks for nothing, in one step and over several; the batch order
    is by length, not by row."""
    lab, a, b = Lab(rt), prompt(9), prompt(6, 100)
    lab.add("A", a, 3)
    lab.add("C", prompt(5), None)
    assert lab.step(A=5, C=5) == {}
    lab.add("B", b, -1)
    got = lab.step(A=4, B=6, C=1)
    assert set(got) == {"A", "B"}
    assert_prompt(got["A"], "A", a, 3)
    assert_prompt(got["B"], "B", b, -1)


def test_preempted_in_mid_prompt_starts_again(rt):
    lab, tokens = Lab(rt), prompt(8)
    lab.add("A", tokens)
    for chunk in (3, 7):  # also right before its last token
        assert lab.step(A=chunk) == {}
        lab.remove("A", finished=False)
        lab.add("A", tokens)
    assert_prompt(lab.step(A=8)["A"], "A", tokens, 2)


def test_resumed_with_outputs_is_skipped(cpu):
    lab, tokens = Lab(cpu), prompt(5)
    lab.add("A", tokens)
    assert set(lab.step(A=5)) == {"A"}
    lab.remove("A", finished=False)
    lab.add("A", [*tokens, 3], prompt_len=5)
    assert lab.launch(A=6) is None
    lab.add("B", [*tokens, 3], prompt_len=5)  # its first steps were another runner's
    assert lab.launch(B=6) is None


def test_served_once_even_if_preempted_before_its_first_output_is_known(cpu):
    lab, tokens = Lab(cpu), prompt(5)
    lab.add("A", tokens)
    made = lab.launch(A=5)
    lab.remove("A", finished=False)
    lab.add("A", tokens)
    assert lab.launch(A=5) is None
    assert_prompt(lab.finish(made)["A"], "A", tokens, 2)
    lab.remove("A")
    lab.add("A", tokens)  # another request by the same name
    assert set(lab.step(A=5)) == {"A"}


def test_two_steps_in_flight_collected_late_and_out_of_order(rt):
    lab, tokens = Lab(rt), prompt(8)
    lab.add("A", tokens)
    one, two = lab.launch(A=3), lab.launch(A=5)
    one.copy(), two.copy()
    rt.synchronize()
    assert two.collect() == {}
    assert_prompt(one.collect()["A"], "A", tokens, 2)


def test_rows_of_a_dead_admission_stay_out(cpu):
    """A step of the first admission is collected after the second one began: its rows are nobody's."""
    lab, tokens = Lab(cpu), prompt(8)
    lab.add("A", tokens)
    stale = lab.launch(A=3)
    lab.remove("A", finished=False)
    lab.add("A", tokens)
    fresh = lab.launch(A=8)
    assert lab.finish(stale) == {}
    assert_prompt(lab.finish(fresh)["A"], "A", tokens, 2)


def test_a_prompt_of_one_token(cpu):
    """mrv2.md #55: prompt_len - 1 rows is none; the result is there and empty."""
    lab = Lab(cpu)
    lab.add("A", [7])
    got = lab.step(A=1)["A"]
    assert got.token_ids.shape == (0, 3)
    assert lab.model.calls == []


def test_rows_are_recycled(cpu):
    lab = Lab(cpu)
    lab.add("A", prompt(6))
    lab.step(A=2)
    lab.remove("A")
    lab.add("B", prompt(4), None)  # takes the same row
    assert lab.launch(B=4) is None
    lab.add("C", prompt(4))
    row = lab.states.req_id_to_index["C"]
    nothing = RequestData("C", 4, prompt(4), SamplingParams(), 0, False, ([1],), 0)
    lab.prompts.add_request(row, nothing)  # overwritten, though nobody was removed
    assert lab.launch(C=4) is None
    lab.prompts.reset()
    assert lab.launch(B=1) is None


def test_bad_input(cpu):
    lab = Lab(cpu)
    with pytest.raises(
        ValueError, match="'A' wants prompt logprobs but starts at token 4; such a request must take no"
    ):
        lab.add("A", prompt(6), num_computed=4)
    lab.add("B", prompt(6))
    lab.states.num_computed_prefill_tokens[lab.states.req_id_to_index["B"]] = 2
    with pytest.raises(RuntimeError, match="'B': prompt logprobs are at row 0, the prefill at token 2"):
        lab.launch(B=2)
    with pytest.raises(ValueError, match="chunk must be 1 to 4"):
        PromptLogprobs(
            cpu, lab.transfers, lab.prompts.kernels, max_num_reqs=4, max_num_batched_tokens=T, chunk=CHUNK + 1
        )


# -- mutants -----------------------------------------------------------------------------------------------------------
MUTANTS = {
    "the last row stays": ("min(end, len(progress.targets)) - first", "end - first"),
    "given before the prompt is complete": ("if not self.has_last or sum(", "if sum("),
    "served again": ("or request.req_id in self._served", ""),
    "resumed requests again": ("or resumed or", "or"),
    "parts as they come": ("sorted(self.parts, key=lambda part: part[0])", "self.parts"),
    "targets of the row itself": ("_token_ids[1 : request.prompt_len]", "_token_ids[: request.prompt_len - 1]"),
    "rows from the batch's start": ("start = int(host.query_start_loc[b])", "start = 0"),
    "places in the step": ("np.flatnonzero(whole) % self.chunk", "np.flatnonzero(whole) % 3"),
    "a recycled row": ("        self._drop(row)\n        wish", "        wish"),
}
CAUGHT_BY = {
    "given before the prompt is complete": test_preempted_in_mid_prompt_starts_again,
    "served again": test_served_once_even_if_preempted_before_its_first_output_is_known,
    "resumed requests again": test_resumed_with_outputs_is_skipped,
    "parts as they come": test_two_steps_in_flight_collected_late_and_out_of_order,
    "rows from the batch's start": test_several_requests,
    "a recycled row": test_rows_are_recycled,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants(cpu, name, monkeypatch):
    """A deliberate bug, and the test above that fails with it."""
    old, new = MUTANTS[name]
    source = Path(prompt_logprobs.__file__).read_text()
    assert source.count(old) == 1
    module = types.ModuleType("mutant_prompt_logprobs")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source.replace(old, new), name, "exec"), vars(module))
    monkeypatch.setitem(globals(), "PromptLogprobs", vars(module)["PromptLogprobs"])
    with pytest.raises((AssertionError, KeyError, RuntimeError, ValueError, IndexError)):
        CAUGHT_BY[name](cpu) if name in CAUGHT_BY else test_chunked_prefill(cpu, [11], -1)
