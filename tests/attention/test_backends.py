"""One batch through every backend: each must equal dense attention, and read nothing that it may not."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch

from mrv2lab.attention import AttentionBackend, FlashInferBackend, make_backend
from mrv2lab.config import RunnerConfig, SpecConfig
from mrv2lab.runtime import Runtime, make_runtime
from tests.attention import fake_flashinfer
from tests.attention.batches import CONFIG, HEAD_DIM, Step, group, make_step
from tests.model.decoding import assert_near_class

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
NAMES = ["torch", pytest.param("triton", marks=needs_triton), "flashinfer"]
MIXED = [(1, 9), (1, 1), (3, 11), (5, 5), (1, 30)]
DECODES = [(1, 9), (1, 1), (1, 30)]
PADDED = [(1, 9), (1, 30), (0, 0), (0, 0)]
"""A batch of two decodes at the shape of four, as a graph has it."""


def machine(name: str, stream: str = "deferred") -> Runtime:
    """A CPU that runs kernels as the backend of this name needs it."""
    kernels = "interpret" if name == "triton" else "spec"
    return make_runtime(RunnerConfig(device="cpu", kernels=kernels, stream=stream))  # type: ignore[arg-type]


def backend_of(name: str, rt: Runtime) -> AttentionBackend:
    if name == "flashinfer":
        return FlashInferBackend(rt, CONFIG, fake_flashinfer)
    return make_backend(rt, replace(CONFIG, runner=RunnerConfig(attention=name)))  # type: ignore[arg-type]


def attend(rt: Runtime, backend: AttentionBackend, step: Step, window: int | None, name: str = "attend") -> None:
    """Build and queue, as a step does."""
    args = backend.builder(group(window)).build(step.common).args
    rt.register(
        name,
        lambda out, q, keys, values, *args: backend.attend(out, q, keys, values, args, HEAD_DIM**-0.5, window),
    )
    rt.run(name, step.out, step.q, step.key_cache, step.value_cache, *args, writes=(step.out,))


def check(name: str, requests: list[tuple[int, int]], window: int | None, stream: str = "deferred") -> None:
    rt = machine(name, stream)
    try:
        step = make_step(rt, requests, window, strict=name != "flashinfer")
        attend(rt, backend_of(name, rt), step, window)
        assert_near_class(rt.read(step.out).flatten(1), step.want.flatten(1), 1e-5)
    finally:
        rt.close()


@pytest.mark.parametrize("window", [None, 1, 4, 6, 100])
@pytest.mark.parametrize("requests", [MIXED, DECODES, PADDED], ids=["mixed", "decodes", "padded"])
@pytest.mark.parametrize("name", NAMES)
def test_equals_dense_attention(name: str, requests: list[tuple[int, int]], window: int | None) -> None:
    """NaN stands wherever no query looks: behind the end, before the window, in the null block."""
    check(name, requests, window)


@pytest.mark.parametrize("name", ["torch", "flashinfer"])
def test_on_a_thread(name: str) -> None:
    check(name, MIXED, 6, "threaded")


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 6, 40])
@pytest.mark.parametrize("requests", [MIXED, DECODES, PADDED], ids=["mixed", "decodes", "padded"])
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_on_a_gpu(name: str, requests: list[tuple[int, int]], window: int | None) -> None:
    """bfloat16, 16/8 heads of 128 in blocks of 16, sequences ten times as long."""
    rt = make_runtime(RunnerConfig(device="cuda"))
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 2048}
    config = replace(CONFIG, model=replace(CONFIG.model, **heads), runner=RunnerConfig(attention=name))  # type: ignore[arg-type]
    longer = [(n, 10 * length) for n, length in requests]
    step = make_step(rt, longer, window, shape=(16, 8, 128, 16), dtype=torch.bfloat16)
    backend = make_backend(rt, config)
    with rt.active():
        args = backend.builder(group(window)).build(step.common).args
        backend.attend(step.out, step.q, step.key_cache, step.value_cache, args, 128**-0.5, window)
    assert_near_class(rt.read(step.out).flatten(1), step.want.flatten(1), 2e-2)


@pytest.mark.parametrize("name", NAMES)
def test_a_window_that_begins_too_early_is_caught(name: str) -> None:
    """The mutant reaches back one token more: into what may be somebody else's by now."""
    rt = machine(name)
    step = make_step(rt, MIXED, 6)
    attend(rt, backend_of(name, rt), step, 7)
    with pytest.raises(AssertionError):
        assert_near_class(rt.read(step.out).flatten(1), step.want.flatten(1), 1e-5)


@needs_triton
def test_decodes_without_a_scratch() -> None:
    """A decoder on its own has no engine's config."""
    rt = machine("triton")
    step = make_step(rt, DECODES, 6)
    attend(rt, make_backend(rt), step, 6)
    assert_near_class(rt.read(step.out).flatten(1), step.want.flatten(1), 1e-5)


@needs_triton
def test_auto_follows_the_kernels() -> None:
    names = [make_backend(machine(name)).name for name in ("torch", "triton")]
    assert names == ["torch", "triton"]
    assert make_backend(machine("torch"), CONFIG).name == "torch"


@needs_triton
def test_full_graphs() -> None:
    """A tape runs the spec anew, so it may hold it; a plan made on the host is of one step."""
    assert make_backend(machine("torch"), "torch").full_graphs
    assert make_backend(machine("triton"), "triton").full_graphs
    assert not backend_of("flashinfer", machine("flashinfer")).full_graphs


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("triton", "attention='triton' needs Triton kernels, but this runtime runs specs; use kernels='interpret'"),
        ("flashinfer", "attention='flashinfer' plans for one model and batch size: give the EngineConfig, not a name"),
        ("flash", "attention must be one of .*, got 'flash'"),
    ],
)
def test_a_name_that_cannot_be(name: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_backend(machine("torch"), name)


def test_flashinfer_on_a_cpu() -> None:
    config = replace(CONFIG, runner=RunnerConfig(attention="flashinfer"))
    with pytest.raises(ValueError, match="needs CUDA, but this runtime's device is cpu; use 'torch'"):
        make_backend(machine("torch"), config)


def test_flashinfer_with_drafts() -> None:
    with pytest.raises(ValueError, match="bounds while drafts are verified; set num_speculative_tokens=0"):
        FlashInferBackend(machine("torch"), replace(CONFIG, spec=SpecConfig(2)), fake_flashinfer)


def test_torch_never_waits_on_software_streams() -> None:
    rt = machine("torch")
    step = make_step(rt, MIXED)
    with rt.watch_syncs() as syncs:
        attend(rt, backend_of("torch", rt), step, None)
    assert syncs == []
    assert torch.equal(rt.raw(step.out), torch.full_like(rt.raw(step.out), 7)), "it is only queued"
