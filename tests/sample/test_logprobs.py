"""Log-probabilities of a step's sampled tokens: plans, drafts, modes, whole rows, memory; against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mrv2lab.protocol import RequestData, SamplingParams
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.runtime.transfer import POLICIES
from mrv2lab.sample.logprobs import SampleLogprobs
from mrv2lab.sample.token_logprobs import LogprobsBuffers, TokenLogprobs
from mrv2lab.state.input_batch import HostBatch
from tests.ops.cuts import INF
from tests.runtime.machines import cpu, rt
from tests.sample import oracle

__all__ = ["cpu", "rt"]
V = 700


def request(wish):
    return RequestData("r", 1, [1], SamplingParams(logprobs=wish), 0, False, ([1],), 0)


def batch(rows, drafts=None):
    rows = np.array(rows, np.int32)
    drafts = np.zeros(len(rows), np.int32) if drafts is None else np.array(drafts, np.int32)
    n = int((drafts + 1).sum())
    return HostBatch([str(row) for row in rows], rows, drafts + 1, drafts, np.empty(0, np.int32), rows, n, n, False)


class Lab:
    """Rows 0..5 ask for nothing, 0, 3, 20, everything and 100 log-probabilities; the device orders 20 at most."""

    def __init__(self, rt, mode="raw_logprobs", vocab=V):
        self.rt = rt
        kernels = TokenLogprobs(rt, max_rows=16, vocab_size=vocab, max_top=20)
        transfers = POLICIES["pinned_copy"](rt)
        self.state = SampleLogprobs(rt, transfers, kernels, max_num_reqs=6, max_num_logits=16, mode=mode)
        self.buffers = LogprobsBuffers(rt, "logprobs.0", max_rows=16, max_top=20)
        for row, wish in enumerate([None, 0, 3, 20, -1, 100]):
            self.state.add_request(row, request(wish))

    def step(self, host, logits, tokens, num_sampled):
        plan = self.state.plan(host)
        made = self.rt.adopt(logits.clone(), "logits")
        given = self.rt.adopt(torch.tensor(tokens, dtype=torch.int64), "tokens")
        on_its_way = self.state.launch(plan, self.buffers, made, given)
        copied = self.rt.event("copied")
        ready = self.rt.event("ready")
        ready.record(self.rt.main)
        self.rt.copy.wait_event(ready)
        with self.rt.use(self.rt.copy):
            on_its_way.copy()
            copied.record(self.rt.copy)
        copied.synchronize()
        return on_its_way.read(np.array(num_sampled, np.int32))


def assert_row(got, i, logits_row, token, k):
    ids, values = oracle.top_logprobs(oracle.clean(logits_row.float().numpy()), token, k)
    columns = got.token_ids.shape[1]
    assert got.token_ids[i].tolist() == ids + [-1] * (columns - len(ids))
    np.testing.assert_allclose(got.values[i][: len(ids)], values, rtol=1e-5)
    assert (got.values[i][len(ids) :] == -INF).all()
    assert got.ranks[i] == oracle.rank(oracle.clean(logits_row.float().numpy()), token)


def randn(n, seed=0):
    return torch.randn(n, V, generator=torch.Generator().manual_seed(seed)) * 3


def test_each_row_by_its_own_wish(rt):
    """mrv2.md #40: -1 is the whole vocabulary; 0 is the token alone; what nobody asked for is -1 and -inf."""
    logits, tokens = randn(6), [5, 6, 7, 8, 9, 10]
    got = Lab(rt).step(batch([3, 0, 1, 2, 5, 4]), logits, tokens, [1] * 6)
    assert got.token_ids.shape == (6, 1 + V)
    for i, k in ((0, 20), (2, 0), (3, 3), (4, 100), (5, -1)):
        assert_row(got, i, logits[i], tokens[i], k)
    assert (got.token_ids[1] == -1).all()
    assert (got.values[1] == -INF).all()
    assert got.ranks[1] == 0
    assert np.exp(got.values[5, 1:].astype(np.float64)).sum() == pytest.approx(1, rel=1e-5)


def test_the_greatest_k_of_the_batch_rules_the_width(cpu):
    lab, logits = Lab(cpu), randn(2)
    assert lab.step(batch([2, 1]), logits, [1, 2], [1, 1]).token_ids.shape == (2, 4)
    assert lab.step(batch([1, 0]), logits, [1, 2], [1, 1]).token_ids.shape == (2, 1)
    assert lab.step(batch([5, 0]), logits, [1, 2], [1, 1]).token_ids.shape == (2, 101)


def test_nobody_asks(cpu):
    lab = Lab(cpu)
    before = cpu.main.queued
    assert lab.state.plan(batch([0, 0])) is None
    lab.state.add_request(3, request(None))  # rows are recycled
    assert lab.state.plan(batch([3])) is None
    assert cpu.main.queued == before


@pytest.mark.parametrize("order", [[2, 3], [3, 0, 2], [4, 2, 0]])
def test_drafts_mrv2_52(rt, order):
    """Requests with drafts: each accepted token belongs to its own logits row; a request may accept 0."""
    drafts = [3, 2, 1][: len(order)]
    sampled = [2, 1, 0] if order[0] == 3 else [2, 1, 2][: len(order)]
    host = batch(order, drafts)
    logits, tokens = randn(host.num_logits, seed=3), list(range(10, 10 + host.num_logits))
    tokens[1 + drafts[0] - 1] = -1  # behind the accepted ones
    got = Lab(rt).step(host, logits, tokens, sampled)
    wishes = {0: None, 2: 3, 3: 20, 4: -1}
    i = first = 0
    for row, draft, count in zip(order, drafts, sampled, strict=True):
        for j in range(count):
            if wishes[row] is None:
                assert (got.token_ids[i] == -1).all()
            else:
                assert_row(got, i, logits[first + j], tokens[first + j], wishes[row])
            i += 1
        first += 1 + draft
    assert len(got.ranks) == i


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
def test_logits_modes(cpu, mode):
    logits = randn(1)
    got = Lab(cpu, mode).step(batch([2]), logits, [4], [1])
    assert got.values[0].tolist() == logits[0, got.token_ids[0]].tolist()
    assert got.token_ids[0].tolist() == [4, *logits[0].topk(3).indices.tolist()]


def test_processed_mrv2_53(cpu):
    """Over what top-k 5 kept, exp of the log-probabilities sums to 1; what it dropped is absent."""
    lab, logits = Lab(cpu, "processed_logprobs"), randn(1)
    assert lab.state.processed
    kept = logits[0].topk(5).indices
    masked = torch.full_like(logits, -INF)
    masked[0, kept] = logits[0, kept]
    got = lab.step(batch([3]), masked, [int(kept[2])], [1])
    assert got.token_ids[0].tolist() == [int(kept[2]), *kept.tolist(), *[-1] * 15]
    assert np.exp(got.values[0, 1:6]).sum() == pytest.approx(1)
    assert (got.values[0, 6:] == -INF).all()
    assert got.ranks[0] == 3


def test_results_outlive_the_buffers(cpu):
    lab, logits = Lab(cpu), randn(2)
    one = lab.step(batch([2]), logits[:1], [1], [1])
    kept = one.token_ids.copy(), one.values.copy(), one.ranks.copy()
    lab.step(batch([2]), logits[1:], [2], [1])
    for before, after in zip(kept, (one.token_ids, one.values, one.ranks), strict=True):
        assert np.array_equal(before, after)


def test_memory():
    """Under 2 MiB for 256 rows of 151,936 logits, k = 20, the output included."""
    rt = CpuRuntime()
    kernels = TokenLogprobs(rt, max_rows=256, vocab_size=151_936, max_top=20)
    assert kernels.buffers.nbytes + 256 * (21 * 8 + 4) + 3 * 256 * 4 < 2**21
    assert TokenLogprobs(rt, max_rows=256, vocab_size=151_936).buffers.nbytes < 2**21


def test_bad_input(cpu):
    kernels = TokenLogprobs(cpu, max_rows=4, vocab_size=V)
    transfers = POLICIES["pinned_copy"](cpu)
    with pytest.raises(ValueError, match=r"logprobs mode must be one of .*, got 'logits'"):
        SampleLogprobs(cpu, transfers, kernels, max_num_reqs=4, max_num_logits=4, mode="logits")
    with pytest.raises(ValueError, match="8 logits rows need kernels for as many, got 4"):
        SampleLogprobs(cpu, transfers, kernels, max_num_reqs=4, max_num_logits=8)
