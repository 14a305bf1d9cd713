"""Which kernel the Triton backend gives a step's queries to, in both runners, and that each query has one."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from mrv2lab.attention import make_backend, triton_backend
from mrv2lab.config import RunnerConfig
from mrv2lab.engine import worker
from mrv2lab.engine.engine import Engine
from mrv2lab.protocol import CommonAttentionMetadata
from mrv2lab.runner import forward
from mrv2lab.runner_v1 import forward_inputs
from mrv2lab.runtime import make_runtime
from mrv2lab.runtime.base import Runtime
from tests.attention.batches import CONFIG, Step, group, make_step
from tests.attention.test_backends import attend, backend_of, machine
from tests.attention.test_engine import MODEL, stand_in, trace_of, workload
from tests.equality.harness import run_workload
from tests.model.decoding import assert_near_class

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

DECODE, PAGED = ("decode_attention",), ("paged_attention",)
REST = "paged_attention, single queries skipped"
BOTH = ("decode_attention", REST)


class Launches:
    """Stands in for both ops: notes which was launched, and launches it, or its spec, unless it is to be ``lost``."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, module: ModuleType, lost: tuple[str, ...] = (), spec: bool = False
    ) -> None:
        self.names: list[str] = []
        self.spec = spec
        for name in ("decode_attention", "paged_attention"):
            op = getattr(module, name)
            monkeypatch.setattr(module, name, _Noted(self, op, name in lost))

    def take(self) -> tuple[str, ...]:
        """Those since the last call."""
        names, self.names = self.names, []
        return tuple(names)


class _Noted:
    def __init__(self, launches: Launches, op: Any, lost: bool) -> None:
        self.launches, self.op, self.lost = launches, op, lost

    def execute(self, backend: Any, args: tuple[Any, ...]) -> None:
        skips = self.op.name == "paged_attention" and len(args) > self.op.params.index("skip_single") and args[-1]
        self.launches.names.append(REST if skips else self.op.name)
        if not self.lost:
            self.op.execute("spec" if self.launches.spec else backend, args)


def common_of(
    counts: list[int], any_lengths: bool = False, longest: int = 0, lengths: dict[int, int] | None = None
) -> CommonAttentionMetadata:
    """A batch of so many queries each, of 500 tokens but for ``lengths``; only the host's values matter."""
    starts = np.cumsum([0, *counts]).astype(np.int32)
    r, nothing = len(counts), torch.empty(0)
    bounds = np.full(r, 500, np.int32)
    for i, length in (lengths or {}).items():
        bounds[i] = length
    longest = longest or max(counts)
    lines = {"query_start_loc_np": starts, "seq_lens_np_upper_bound": bounds, "max_query_len": longest}
    rest = {"num_reqs": r, "num_tokens": int(starts[-1]), "max_seq_len": int(bounds.max()), "any_lengths": any_lengths}
    tensors = dict.fromkeys(("query_start_loc", "seq_lens", "block_table", "slot_mapping"), nothing)
    return CommonAttentionMetadata(**tensors, **lines, **rest)  # type: ignore[arg-type]


ENOUGH, FAR = triton_backend.SPLIT_FROM, triton_backend.SPLIT_BEHIND
LIVE = [
    ("decodes", [1] * 3, DECODE),
    ("many decodes", [1] * 300, DECODE),
    ("padded decodes", [1] * ENOUGH + [0] * 5, DECODE),
    ("enough", [1] * ENOUGH + [5], BOTH),
    ("one too few", [1] * (ENOUGH - 1) + [5], PAGED),
    ("few", [1, 5, 1], PAGED),
    ("as many requests", [1] * (ENOUGH - 1) + [2] * 90 + [0] * 9, PAGED),
    ("anywhere", [5, *[1] * ENOUGH, 5], BOTH),
    ("chunks", [5, 2], PAGED),
    ("decodes that verify drafts", [3] * 300, PAGED),
]
LONG = [
    ("one far behind", [1, 5, 1], {2: FAR}, BOTH),
    ("not far enough", [1, 5, 1], {2: FAR - 1}, PAGED),
    ("a long chunk", [1, 5, 1], {1: 9 * FAR}, PAGED),
    ("a long decode among decodes", [1, 1], {1: 9 * FAR}, DECODE),
]
FROZEN = [
    ("any lengths", [8, 0, 0], 8, BOTH),
    ("any lengths, a shape of one token", [1], 1, DECODE),
    ("any lengths, a step of decodes", [1, 1, 0], 8, BOTH),
]


def check_choices(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table in the module's docstring."""
    rt = machine("triton")
    launches = Launches(monkeypatch, module, lost=("decode_attention", "paged_attention"))
    batches = [(name, common_of(counts), want) for name, counts, want in LIVE]
    batches += [(name, common_of(counts, lengths=lengths), want) for name, counts, lengths, want in LONG]
    batches += [(name, common_of(counts, True, longest), want) for name, counts, longest, want in FROZEN]
    nothing = torch.empty(0)
    for model in (CONFIG.model, None):
        backend = module.TritonBackend(rt, model)
        for name, common, want in batches:
            args = backend.builder(group(None)).build(common).args
            backend.attend(nothing, nothing, nothing, nothing, args, 1.0, None)
            assert launches.take() == (want if model else PAGED), name


def test_which_kernels_a_step_has(monkeypatch: pytest.MonkeyPatch) -> None:
    check_choices(triton_backend, monkeypatch)


def changed(folder: Path, old: str, new: str) -> ModuleType:
    """The backend's module with a deliberate bug: ``old``, which occurs once, replaced by ``new``."""
    source = Path(triton_backend.__file__).read_text()
    assert source.count(old) == 1, old
    path = folder / "mutant_triton_backend.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(f"{path.stem}_{abs(hash((old, new)))}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("max_query_len, *how, decodes)", "max_query_len, *how, False)"),
        ("        if decodes:\n", "        if decodes and max_query_len == 1:\n"),
        ("if max_query_len > 1 or not decodes", "if not decodes"),
        ("if max_query_len > 1 or not decodes", "if True"),
        ("(common.any_lengths or _has_work_for_two(common))", "_has_work_for_two(common)"),
        ("common.max_query_len > 1 and (", "(common.max_query_len > 1 or "),
        (">= SPLIT_FROM", "> SPLIT_FROM"),
        (">= SPLIT_FROM", ">= SPLIT_FROM - 1"),
        ("== 1]", "<= 1]"),
        ("== 1]", "<= 2]"),
        ("== 1]", "== 5]"),
        ("lengths >= SPLIT_BEHIND", "lengths > SPLIT_BEHIND"),
        (" and common.max_seq_len < SPLIT_BEHIND", ""),
        ("bool(self._scratch) and ", ""),
    ],
)
def test_mutants_of_the_choice(old: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((AssertionError, ValueError)):
        check_choices(changed(tmp_path, old, new), monkeypatch)


MIXED = [(1, 9), (3, 11), (1, 70), (1, 1), (5, 5), (0, 0)]


def split_step(rt: Runtime, window: int | None, **shape: Any) -> Step:
    """As a graph of any lengths has it: bounds that are wider than the step."""
    step = make_step(rt, MIXED, window, **shape)
    step.common = replace(step.common, any_lengths=True, max_query_len=9)
    return step


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("lost", ["", "decode_attention", "paged_attention"])
def test_each_query_has_one_kernel(window: int | None, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel's rows equal dense attention, and are untouched where its launch is lost: nobody else writes them."""
    launches = Launches(monkeypatch, triton_backend, lost=(lost,))
    rt = machine("triton")
    step = split_step(rt, window)
    attend(rt, backend_of("triton", rt), step, window)
    out = rt.read(step.out).flatten(1)
    assert launches.take() == BOTH
    singles = torch.tensor([n == 1 for n, _ in MIXED for _ in range(n)])
    untouched = {"": singles & ~singles, "decode_attention": singles, "paged_attention": ~singles}[lost]
    assert_near_class(out[~untouched], step.want.flatten(1)[~untouched], 1e-5)
    assert bool((out[untouched] == 7).all())


def check_runners(mode: Any, runners: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same kernels in the same order, and the tokens of the definition. Two single queries are enough here, but
    graphs of any lengths have both kernels for another reason. Where all graphs are such, V1 has none for decodes, and
    launches both: the second finds nothing to do."""
    if mode != "full":
        monkeypatch.setattr(triton_backend, "SPLIT_FROM", 2)
    launches = Launches(monkeypatch, triton_backend, spec=True)
    monkeypatch.setattr(worker, "make_backend", stand_in)
    options: dict[str, Any] = {"cudagraph_capture_sizes": (4, 16)} if mode != "none" else {}
    options |= {"num_blocks": 64, "block_size": 4, "max_model_len": 64, "max_num_reqs": 4}
    found, want = [], trace_of("torch").tokens
    for runner in runners:
        with Engine(MODEL, runner, "cpu", attention="triton", cudagraph_mode=mode, **options) as engine:
            engine.rt.synchronize()
            launches.take()
            assert run_workload(engine, workload()).tokens == want
        names = launches.take()
        assert REST in names
        if mode == "full":
            assert "paged_attention" not in names
            names = tuple(name for name in names if name != REST)
        found.append(names)
    assert found[0] == found[-1]


@pytest.mark.parametrize("mode", ["none", "piecewise", "full"])
def test_both_runners_choose_alike(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_runners(mode, ("mrv2", "v1"), monkeypatch)


@pytest.mark.parametrize(("runner", "module"), [("mrv2", forward), ("v1", forward_inputs)])
def test_a_runner_that_does_not_say_any_lengths_is_caught(
    runner: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(**fields: Any) -> CommonAttentionMetadata:
        return CommonAttentionMetadata(**fields | {"any_lengths": False})

    monkeypatch.setattr(module, "CommonAttentionMetadata", forgetful)
    with pytest.raises(AssertionError):
        check_runners("full", (runner,), monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("any_lengths", [False, True])
def test_a_full_server_on_a_gpu(window: int | None, any_lengths: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """256 decodes and a prompt of 128 in bfloat16, 16/8 heads of 128 in blocks of 16; and the same from a graph."""
    rt = make_runtime(RunnerConfig(device="cuda"))
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 2048}
    config = replace(CONFIG, model=replace(CONFIG.model, **heads), runner=RunnerConfig(attention="triton"))  # type: ignore[arg-type]
    requests = [(1, 150 + 37 * i % 250) for i in range(256)] + [(128, 128), (0, 0)]
    step = make_step(rt, requests, window, shape=(16, 8, 128, 16), dtype=torch.bfloat16)
    common = replace(step.common, any_lengths=any_lengths)
    launches = Launches(monkeypatch, triton_backend)
    backend = make_backend(rt, config)
    with rt.active():
        args = backend.builder(group(window)).build(common).args
        call = (step.out, step.q, step.key_cache, step.value_cache, args, 128**-0.5, window)
        backend.attend(*call)
        assert launches.take() == BOTH
        assert_near_class(rt.read(step.out).flatten(1), step.want.flatten(1), 2e-2)
        before = rt.read(step.out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            backend.attend(*call)
        rt.raw(step.out).fill_(7)
        graph.replay()
        assert torch.equal(rt.read(step.out), before)
