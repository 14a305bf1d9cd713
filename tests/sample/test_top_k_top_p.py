"""The stage: what uses it, what it launches, padding, drafts; random rows against the oracle."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mrv2lab.memory.uva_backed import UvaBackedTensor
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.runtime.transfer import POLICIES
from mrv2lab.sample.top_k_top_p import TopKTopP
from tests.ops.cuts import INF
from tests.runtime.machines import cpu, rt
from tests.sample import oracle

__all__ = ["cpu", "rt"]
V = 1000


class Tables:
    """top_k and top_p of four rows: off; k 20; p 0.9; both."""

    def __init__(self, rt):
        transfers = POLICIES["pinned_copy"](rt)
        self.top_k = UvaBackedTensor(transfers, "top_k", 4, torch.int32)
        self.top_p = UvaBackedTensor(transfers, "top_p", 4, torch.float32)
        self.top_k.np[:] = [V, 20, V, 5]
        self.top_p.np[:] = [1, 1, 0.9, 0.5]
        self.top_k.publish()
        self.top_p.publish()
        self.temperature = UvaBackedTensor(transfers, "temperature", 4, torch.float32)
        self.temperature.np[:] = [1, 0.5, 0.7, 0]
        self.temperature.publish()
        self.stage = TopKTopP(rt, self.top_k, self.top_p, self.temperature, max_num_logits=8, vocab_size=V)


def rows(*numbers):
    return np.array(numbers, np.int32)


def test_used(cpu):
    stage = Tables(cpu).stage
    assert [stage.used(rows(row)) for row in range(4)] == [False, True, True, True]
    assert stage.used(rows(0, 0, 3))


@pytest.mark.parametrize(
    "mapping", [[2, 0, 3, 1], [1, 1, 1, 3, 3, 2], [0, -1, 3, -1, 1]], ids=["", "drafts", "padding"]
)
def test_apply(rt, mapping):
    """Every logits row by its request's parameters, padding untouched, as the stage's place in the sampler needs it."""
    tables, n = Tables(rt), len(mapping)
    logits = torch.randn(n, V, generator=torch.Generator().manual_seed(n)) * 2
    logits[0, 3] = float("nan")
    made = rt.adopt(logits.clone(), "logits")
    index = rt.adopt(torch.tensor(mapping, dtype=torch.int32), "mapping")
    batch = SimpleNamespace(expanded_idx_mapping=index)
    context = SimpleNamespace(rows=rows(*{i for i in mapping if i >= 0}), batch=batch, num_logits=n)
    tables.stage.apply(made, context)
    got = rt.read(made)
    for row, before, after in zip(mapping, logits, got, strict=True):
        if row < 0 or row == 0:
            assert torch.equal(before.nan_to_num(), after.nan_to_num())
            continue
        k, p = int(tables.top_k.np[row]), float(tables.top_p.np[row])
        x = oracle.top_k(oracle.clean(before.numpy()), k if k < V else 0)
        want = oracle.top_p(x, p)
        wrong = (want > -INF) != (after.numpy() > -INF)
        assert not (wrong & ~oracle.excused(x, p)).any()
        kept = want > -INF
        assert np.array_equal(after.numpy()[kept & ~wrong], before.numpy()[kept & ~wrong])


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_interpreted():
    """The kernels themselves behind a deferred stream, and the cut left for whoever applies it."""
    rt = CpuRuntime(backend="interpret")
    tables, logits = Tables(rt), torch.zeros(2, V)
    made, index = rt.adopt(logits, "logits"), rt.adopt(torch.tensor([1, 2]).int(), "mapping")
    found = tables.stage.find(made, rows(1, 2), index)
    assert rt.read(found.cut_value).tolist() == [0, 0]
    assert rt.read(found.cut_id).tolist() == [19, 899]
    assert torch.equal(rt.read(made), torch.zeros(2, V))


def test_cuts_of_quotients(rt):
    """``cut`` finds in raw logits what ``find`` finds in logits divided by the temperatures."""
    tables = Tables(rt)
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(4)) * 2
    index = rt.adopt(torch.arange(4, dtype=torch.int32), "mapping")
    context = SimpleNamespace(rows=rows(0, 1, 2, 3), batch=SimpleNamespace(expanded_idx_mapping=index))
    value, last, group_max = tables.stage.cut(rt.adopt(logits, "raw"), context)
    got = rt.read(value).tolist(), rt.read(last).tolist()
    assert rt.read(group_max)[1, 0] == logits[1, :128].max()
    divided = rt.adopt(logits / torch.tensor([1, 0.5, 0.7, 1])[:, None], "divided")
    found = tables.stage.find(divided, context.rows, index)
    assert got == (rt.read(found.cut_value).tolist(), rt.read(found.cut_id).tolist())


def test_launches_only_what_the_batch_needs(cpu):
    tables = Tables(cpu)
    logits, index = cpu.zeros((1, V), torch.float32, name="logits"), cpu.zeros(1, torch.int32, name="mapping")
    before = cpu.main.queued
    tables.stage.find(logits, rows(1), index)
    assert cpu.main.queued - before == 3
    tables.stage.find(logits, rows(1, 2), index)
    assert cpu.main.queued - before == 3 + 11  # and three rounds of narrowing, two lists


def test_memory():
    """No [n, V]: a 16th of it."""
    rt = CpuRuntime()
    table = UvaBackedTensor(POLICIES["pinned_copy"](rt), "t", 4, torch.int32)
    stage = TopKTopP(rt, table, table, table, max_num_logits=16, vocab_size=151_936)
    assert stage.buffers.nbytes < 16 * 151_936 * 4 / 16
