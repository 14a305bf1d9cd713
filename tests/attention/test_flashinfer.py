"""What flashinfer is planned with, and, on a GPU where it is installed, what it makes of it."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch

from mrv2lab.attention import FlashInferBackend, make_backend
from mrv2lab.config import KVGroup, RunnerConfig
from mrv2lab.observer import EventLog
from mrv2lab.runtime import make_runtime
from mrv2lab.runtime.software import SoftwareEvent
from tests.attention import fake_flashinfer
from tests.attention.batches import CONFIG, group, make_step
from tests.attention.test_backends import attend, machine

QUERIES = [(1, 9), (1, 1), (3, 11)]
"""(queries, length); blocks of 4."""


def planned(requests: list[tuple[int, int]], window: int | None = None) -> tuple[str, dict[str, Any], list[list[int]]]:
    """Which wrapper was planned, with what, and each request's row of the block table."""
    rt = machine("flashinfer")
    backend = FlashInferBackend(rt, CONFIG, fake_flashinfer)
    step = make_step(rt, requests, window)
    metadata = backend.builder(group(window)).build(step.common)
    plan = backend.plans[metadata.plan]
    used = [(name, made.plans) for name, made in (("decode", plan.decode), ("prefill", plan.prefill)) if made.plans]
    (name, (one,)), *others = used
    assert not others
    assert name == metadata.kind
    assert one["indices"] is metadata.page_indices, "no copy: the device fills it later"
    table = rt.read(step.common.block_table).tolist()
    return name, one | {"indices": rt.read(one["indices"]).tolist()}, table


def test_a_mixed_batch() -> None:
    name, plan, table = planned(QUERIES)
    assert name == "prefill"
    assert plan["qo_indptr"].tolist() == [0, 1, 2, 5]
    assert plan["indptr"].tolist() == [0, 3, 4, 7]
    assert plan["last_page_len"].tolist() == [1, 1, 3]
    assert plan["indices"] == table[0][:3] + table[1][:1] + table[2][:3]
    assert plan["shape"] == (4, 2, 16, 4)
    assert plan["window_left"] == -1
    assert plan["sm_scale"] == 0.25


def test_decodes() -> None:
    name, plan, table = planned(QUERIES[:2])
    assert name == "decode"
    assert plan["indptr"].tolist() == [0, 3, 4]
    assert plan["indices"] == table[0][:3] + table[1][:1]


def test_rows_without_a_query_are_no_decodes() -> None:
    """The decode wrapper takes one query from every row there is."""
    name, plan, _ = planned([(1, 9), (0, 0)])
    assert name == "prefill"
    assert plan["qo_indptr"].tolist() == [0, 1, 1]
    assert plan["indptr"].tolist() == [0, 3, 3]
    assert plan["last_page_len"].tolist() == [1, 0]


def test_pages_begin_at_the_window() -> None:
    """Length 9, window 3: the query at 8 sees 6..8, so block 0 is left out. Length 11, queries at 8..10: from 6 on."""
    name, plan, table = planned(QUERIES, window=3)
    assert name == "prefill"
    assert plan["indptr"].tolist() == [0, 2, 3, 5]
    assert plan["last_page_len"].tolist() == [1, 1, 3]
    assert plan["indices"] == table[0][1:3] + table[1][:1] + table[2][1:3]
    assert plan["window_left"] == 2, "keys besides its own"


def test_nothing_waits_and_plans_take_turns() -> None:
    """Two steps in flight, and one plan more: a step's page-locked buffers are its own."""
    rt = machine("flashinfer")
    backend = FlashInferBackend(rt, CONFIG, fake_flashinfer)
    builder = backend.builder(group(None))
    step = make_step(rt, QUERIES)
    ends, rt.observer = [rt.event(f"end.{i}") for i in range(4)], EventLog()
    numbers = []
    with rt.watch_syncs() as syncs:
        for i, end in enumerate(ends):
            if i > 1:
                ends[i - 2].synchronize()
            numbers.append(builder.build(step.common).plan)
            end.record(rt.main)
    assert syncs == []
    assert [mark.name for mark in rt.observer.marks if mark.kind == "synchronize"] == ["end.0", "end.1"]
    assert numbers == [0, 1, 2, 0]
    assert backend.builder(group(3)).build(step.common).plan == 3, "another group, other plans"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_plan_in_use_is_waited_for_and_one_that_is_not_is_caught(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps are queued before the device has done any; the first must not run with the second one's plan."""

    def both_right() -> bool:
        rt = machine("flashinfer")
        backend = FlashInferBackend(rt, CONFIG, fake_flashinfer)
        monkeypatch.setattr(backend, "_depth", depth)
        steps = [make_step(rt, requests, seed=i) for i, requests in enumerate([QUERIES, QUERIES[:1]])]
        builder = backend.builder(group(None))
        monkeypatch.setattr(backend, "builder", lambda group: builder)
        try:
            for i, step in enumerate(steps):
                attend(rt, backend, step, None, f"attend.{i}")
            return all(torch.allclose(rt.read(step.out).double(), step.want, atol=1e-5) for step in steps)
        except Exception:
            return False

    assert both_right()
    monkeypatch.setattr(SoftwareEvent, "query", lambda self: True)
    assert both_right() == (depth == 2)


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None, reason="flashinfer is installed")
def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is named. A device that says it is CUDA is enough to get that far."""
    rt = machine("flashinfer")
    monkeypatch.setattr(rt, "device", torch.device("cuda", 0))
    model = replace(CONFIG.model, dtype="bfloat16", head_dim=64)
    config = replace(CONFIG, model=model, runner=RunnerConfig(attention="flashinfer"))
    with pytest.raises(ImportError, match=r"in a checkout: pip install -e '\.\[flashinfer\]'"):
        make_backend(rt, config)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dtype": "float32"}, "no float32 kernels; use dtype='bfloat16'"),
        ({"dtype": "bfloat16", "head_dim": 80}, r"kernels for head_dim \(64, 128, 256\), not 80"),
    ],
)
def test_a_model_without_kernels(change: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rt = machine("flashinfer")
    monkeypatch.setattr(rt, "device", torch.device("cuda", 0))
    config = replace(CONFIG, model=replace(CONFIG.model, **change), runner=RunnerConfig(attention="flashinfer"))
    with pytest.raises(ValueError, match=says):
        make_backend(rt, config)


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed")
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    "requests", [[(1, 152), (1, 1), (1, 300)], [(1, 152), (7, 7), (64, 300)]], ids=["decode", "mixed"]
)
def test_the_real_one(requests: list[tuple[int, int]], window: int | None) -> None:
    """bfloat16, 16/8 heads of 128, blocks of 16, against dense float64 attention over the same bfloat16 values."""
    rt = make_runtime(RunnerConfig(device="cuda"))
    model = replace(
        CONFIG.model, dtype="bfloat16", num_attention_heads=16, num_key_value_heads=8, head_dim=128, hidden_size=2048
    )
    model = replace(model, max_position_embeddings=512)
    config = replace(
        CONFIG,
        model=model,
        cache=replace(CONFIG.cache, block_size=16),
        scheduler=replace(CONFIG.scheduler, max_num_batched_tokens=512, max_model_len=512),
        runner=RunnerConfig(attention="flashinfer"),
    )
    step = make_step(rt, requests, window, shape=(16, 8, 128, 16), dtype=torch.bfloat16, strict=False)
    backend = make_backend(rt, config)
    with rt.active():
        args = backend.builder(KVGroup(window, (0,))).build(step.common).args
        backend.attend(step.out, step.q, step.key_cache, step.value_cache, args, 128**-0.5, window)
    error = (rt.read(step.out).double() - step.want).abs().amax()
    assert error <= 0.02 * step.want.abs().amax()
