"""The same requests through an engine with each backend: the same schedules, logits of the near class."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from mrv2lab.attention import FlashInferBackend, TritonBackend, make_backend
from mrv2lab.config import EngineConfig, ModelConfig
from mrv2lab.engine import worker
from mrv2lab.engine.engine import Engine
from mrv2lab.engine.workload import Arrival, Workload
from mrv2lab.protocol import SamplingParams
from mrv2lab.runtime.base import Runtime
from tests.attention import fake_flashinfer
from tests.equality.compare import off_by
from tests.equality.harness import Trace, run_workload

MODEL = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=32,
    max_position_embeddings=128,
    sliding_window=6,
    layer_types=("full_attention", "sliding_attention"),
)
"""A full and a sliding layer."""


def workload(max_tokens: int = 4) -> Workload:
    """Prefills, decodes and steps that have both, past the window."""
    sizes = ((0, 11), (0, 3), (2, 7))
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Workload(tuple(Arrival(step, length, params) for step, length in sizes))


class _Interpreted:
    """The engine's runtime as a backend of interpreted kernels sees it, on a machine that runs specs."""

    backend = "interpret"

    def __init__(self, rt: Runtime) -> None:
        self.zeros, self.raw = rt.zeros, rt.raw


def stand_in(rt: Runtime, config: EngineConfig) -> Any:
    """Backends that this CPU can run beside specs: interpreted kernels, and a fake library."""
    name = config.runner.attention
    if name == "triton":
        return TritonBackend(_Interpreted(rt), config.model)  # type: ignore[arg-type]
    if name == "flashinfer":
        return FlashInferBackend(rt, config, fake_flashinfer, workspace_bytes=1)
    return make_backend(rt, config)


def trace_of(name: str, model: ModelConfig = MODEL, work: Workload | None = None, **options: Any) -> Trace:
    options = {"device": "cpu", "num_blocks": 64, "block_size": 4, "max_model_len": 64, "max_num_reqs": 4} | options
    with Engine(model, attention=name, **options) as engine:
        return run_workload(engine, work or workload())


def check_near(one: Trace, other: Trace, bound: float) -> None:
    """The same batches, and each request's logits within ``bound`` max|ref| as far as the tokens are the same."""
    assert one.batches == other.batches
    rows = 0
    for req_id, want in one.logits.items():
        tokens, others = one.tokens[req_id], other.tokens[req_id]
        same = next((i for i, (a, b) in enumerate(zip(tokens, others, strict=True)) if a != b), len(tokens) - 1) + 1
        off = off_by(other.logits[req_id][:same], want[:same])
        assert (off <= bound).all(), f"{req_id}: {off}"
        rows += same
    assert rows >= len(one.logits)


@pytest.mark.parametrize("name", ["flashinfer", "triton"])
@pytest.mark.parametrize("runner", ["mrv2", "v1"])
def test_near_the_definition(name: str, runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "triton" and importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    monkeypatch.setattr(worker, "make_backend", stand_in)
    one, other = trace_of("torch", runner=runner), trace_of(name, runner=runner)
    check_near(one, other, 1e-4)
    assert one.tokens == other.tokens


@pytest.mark.parametrize(
    ("name", "says"),
    [("flashinfer", "needs CUDA, but this runtime's device is cpu"), ("triton", "runs specs; use kernels=")],
)
def test_an_engine_that_cannot_have_it(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Engine(MODEL, device="cpu", attention=name)


@pytest.mark.parametrize("stream", ["deferred", "threaded"])
def test_plans_hold_under_lag(stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device trails the host by as much as the loop allows; each step must run with its own plan."""
    monkeypatch.setattr(worker, "make_backend", stand_in)
    want = trace_of("torch", work=workload(12))
    for lag in (None, 0, 1) if stream == "deferred" else (None,):
        got = trace_of("flashinfer", work=workload(12), stream=stream, lag=lag)
        check_near(want, got, 1e-4)
        assert want.tokens == got.tokens


@pytest.mark.parametrize("runner", ["mrv2", "v1"])
def test_dummy_runs_between_steps_leave_plans_alone(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than there are plans, none of which the device has come to."""
    monkeypatch.setattr(worker, "make_backend", stand_in)

    def four_dummies(engine: Engine) -> None:
        for _ in range(4):
            engine.worker.runner.dummy_run(7, 3)

    options: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "max_model_len": 64, "max_num_reqs": 4}
    with Engine(MODEL, runner, "cpu", attention="flashinfer", **options) as engine:
        got = run_workload(engine, workload(), between=four_dummies)
    assert got.tokens == trace_of("torch", runner=runner).tokens


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "mode"), [("torch", "none"), ("triton", "none"), ("triton", "full"), ("flashinfer", "none")]
)
@pytest.mark.parametrize("runner", ["mrv2", "v1"])
def test_on_a_gpu(name: str, mode: str, runner: str) -> None:
    """bfloat16, heads of 128, blocks of 16, two groups; against the definition on the same GPU."""
    if name == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
        pytest.skip("flashinfer is not installed")
    model = ModelConfig(
        vocab_size=512,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        intermediate_size=256,
        max_position_embeddings=256,
        dtype="bfloat16",
        sliding_window=40,
        layer_types=("full_attention", "sliding_attention") * 2,
    )
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    work = Workload(tuple(Arrival(i % 3, 20 + 17 * i, params) for i in range(6)))
    options = {"device": "cuda", "num_blocks": 256, "block_size": 16, "max_model_len": 256, "max_num_reqs": 8}
    want = trace_of("torch", model, work, runner=runner, **options)
    got = trace_of(name, model, work, runner=runner, cudagraph_mode=mode, **options)
    check_near(want, got, 3e-2)
    assert torch.isfinite(torch.cat(list(got.logits.values()))).all()
