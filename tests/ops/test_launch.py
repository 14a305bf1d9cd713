"""Cached launches: a key at least as fine as Triton's, and the plain path for whatever is unexpected."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrv2lab.ops import _launch
from mrv2lab.ops._launch import CachedLauncher, cached_launcher
from mrv2lab.ops.pos_seq_lens import pos_seq_lens

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


class Tensor:
    """A tensor on a device that this machine need not have."""

    def __init__(self, address: int = 256, dtype: torch.dtype = torch.int32, cuda: bool = True) -> None:
        self.dtype = dtype
        self.is_cuda = cuda
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def parameter(name: str, kind: str = "") -> SimpleNamespace:
    return SimpleNamespace(
        name=name, is_constexpr=kind == "constexpr", do_not_specialize=kind == "stable", has_default=False, default=None
    )


class CudaLauncher:
    def __init__(self, log: list[Any], number: int) -> None:
        self.log, self.number = log, number

    def __call__(self, gridX: int, gridY: int, gridZ: int, stream: int, function: Any, *args: Any) -> None:
        self.log.append(("cached", self.number, (gridX, gridY, gridZ), stream, function, args))


class Real:
    """A stand-in for ``JITFunction`` that compiles at each plain launch and logs."""

    def __init__(self, log: list[Any], launcher: Callable[[list[Any], int], Any] = CudaLauncher) -> None:
        self.params = [
            parameter("table"),
            parameter("stride"),
            parameter("count", "stable"),
            parameter("W", "constexpr"),
        ]
        self.pre_run_hooks: list[Any] = []
        self.used_global_vals = {("WIDTH", 0): (8, {"WIDTH": 8})}
        self.log = log
        self.launcher = launcher

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            self.log.append(("plain", grid, args, options))
            run = self.launcher(self.log, len(self.log))
            return SimpleNamespace(run=run, function=f"f{len(self.log)}", packed_metadata=(4, 1, 0))

        return run


def make(launcher: Any = CudaLauncher) -> tuple[CachedLauncher, list[Any], SimpleNamespace]:
    log: list[Any] = []
    device = SimpleNamespace(index=0, stream=7)
    driver = SimpleNamespace(
        get_current_device=lambda: device.index, get_current_stream=lambda index: 100 * index + device.stream
    )
    runtime = type("runtime", (), {"launch_enter_hook": None, "launch_exit_hook": None})()
    triton = SimpleNamespace(
        runtime=SimpleNamespace(driver=SimpleNamespace(active=driver)),
        knobs=SimpleNamespace(runtime=runtime, compilation=type("compilation", (), {})()),
        device=device,
    )
    return CachedLauncher(Real(log, launcher), triton, frozenset((Tensor,))), log, triton


def kinds(log: list[Any]) -> list[str]:
    return [entry[0] for entry in log]


def test_the_first_launch_of_a_key_is_tritons_and_the_next_ones_are_direct() -> None:
    launcher, log, triton = make()
    launcher[(3,)](Tensor(), 20, 5, W=8)
    triton.device.stream = 9
    launcher[(4, 2)](Tensor(512), 21, 1, W=8)
    host = Tensor(4096, cuda=False)
    launcher[(1, 2, 3)](host, 21, 1, W=8)
    assert log[0] == ("plain", (3,), log[0][2], {"W": 8})
    run = (4, 1, 0), None, None, None
    assert log[1:] == [
        ("cached", 1, (4, 2, 1), 9, "f1", (*run, 512, 21, 1, 8)),
        ("cached", 1, (1, 2, 3), 9, "f1", (*run, host, 21, 1, 8)),  # the driver is asked for a host tensor's address
    ]


BASE: tuple[Any, ...] = (Tensor(), 20, 5)
APART: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "dtype": ((Tensor(dtype=torch.int64), 20, 5), {"W": 8}),
    "alignment": ((Tensor(264), 20, 5), {"W": 8}),
    "one": ((Tensor(), 1, 5), {"W": 8}),
    "a multiple of 16": ((Tensor(), 32, 5), {"W": 8}),
    "64 bits": ((Tensor(), 1 << 31, 5), {"W": 8}),
    "unsigned 64 bits": ((Tensor(), 1 << 63, 5), {"W": 8}),
    "64 bits unspecialised": ((Tensor(), 20, -(1 << 31) - 1), {"W": 8}),
    "bool": ((Tensor(), True, 5), {"W": 8}),
    "float": ((Tensor(), 20.0, 5), {"W": 8}),
    "None": ((None, 20, 5), {"W": 8}),
    "constexpr": ((Tensor(), 20, 5), {"W": 16}),
    "constexpr type": ((Tensor(), 20, 5), {"W": 8.0}),
    "constexpr by position": ((Tensor(), 20, 5, 8), {}),
    "an option": ((Tensor(), 20, 5), {"W": 8, "num_warps": 8}),
}


def check_apart(what: str) -> None:
    launcher, log, _ = make()
    launcher[(1,)](*BASE, W=8)
    args, options = APART[what]
    launcher[(1,)](*args, **options)
    launcher[(1,)](*BASE, W=8)
    launcher[(1,)](*args, **options)
    assert kinds(log) == ["plain", "plain", "cached", "cached"]
    assert [entry[1] for entry in log[2:]] == [1, 2]


@pytest.mark.parametrize("what", APART)
def test_what_triton_specialises_on_is_told_apart(what: str) -> None:
    check_apart(what)


def test_what_it_does_not_specialise_on_is_not() -> None:
    launcher, log, _ = make()
    for tensor in (Tensor(16), Tensor(32)):
        for stride in (2, 3, -7):
            for count in (0, 1, 16, 5):
                launcher[(stride,)](tensor, stride, count, W=8)
    assert kinds(log) == ["plain"] + ["cached"] * 23


def test_each_device_has_its_own_function() -> None:
    launcher, log, triton = make()
    for index in (0, 1, 0, 1):
        triton.device.index = index
        launcher[(1,)](*BASE, W=8)
    assert kinds(log) == ["plain", "plain", "cached", "cached"]
    assert [(entry[1], entry[3]) for entry in log[2:]] == [(1, 7), (2, 107)]


class OtherLauncher:
    def __init__(self, log: list[Any], number: int) -> None: ...

    def __call__(self, grid: Any, stream: int, function: Any, *args: Any) -> None:
        raise AssertionError("never called")


def plain_cases() -> dict[str, Callable[[CachedLauncher, Any], Any]]:
    def hook(launcher: CachedLauncher, triton: Any) -> None:
        triton.knobs.runtime.launch_enter_hook = lambda metadata: None

    def chain(launcher: CachedLauncher, triton: Any) -> None:
        triton.knobs.runtime.launch_exit_hook = SimpleNamespace(calls=[print])

    def before(launcher: CachedLauncher, triton: Any) -> None:
        launcher.real.pre_run_hooks.append(print)

    def debug(launcher: CachedLauncher, triton: Any) -> None:
        triton.knobs.runtime.debug = True

    def instrumentation(launcher: CachedLauncher, triton: Any) -> None:
        triton.knobs.compilation.instrumentation_mode = "all"

    def a_global(launcher: CachedLauncher, triton: Any) -> None:
        launcher.real.used_global_vals["WIDTH", 0][1]["WIDTH"] = 9

    return {one.__name__: one for one in (hook, chain, before, debug, instrumentation, a_global)}


@pytest.mark.parametrize("case", plain_cases())
def test_what_changes_a_launch_goes_through_triton(case: str) -> None:
    launcher, log, triton = make()
    for _ in range(2):
        launcher[(1,)](*BASE, W=8)
    plain_cases()[case](launcher, triton)
    launcher[(1,)](*BASE, W=8)
    assert kinds(log) == ["plain", "cached", "plain"]


def test_an_empty_chain_of_hooks_hears_nothing() -> None:
    launcher, log, triton = make()
    triton.knobs.runtime.launch_enter_hook = SimpleNamespace(calls=[])
    for _ in range(2):
        launcher[(1,)](*BASE, W=8)
    assert kinds(log) == ["plain", "cached"]


@pytest.mark.parametrize(
    ("launcher_class", "args", "options"),
    [
        (OtherLauncher, BASE, {"W": 8}),
        (CudaLauncher, (Tensor(), (1, 2), 5), {"W": 8}),
        (CudaLauncher, (Tensor(), 20), {"W": 8, "count": 5}),
        (lambda log, number: None, BASE, {"W": 8}),
    ],
    ids=["another Triton", "a tuple", "a value by keyword", "no launcher"],
)
def test_what_is_unknown_goes_through_triton(launcher_class: Any, args: Any, options: Any) -> None:
    launcher, log, _ = make(launcher_class)
    for _ in range(3):
        launcher[(1,)](*args, **options)
    assert kinds(log) == ["plain"] * 3


class Launcher36(CudaLauncher):
    """As Triton 3.6 makes them, with a C function behind."""

    launch: Any = print
    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True


class Launcher39(Launcher36):
    gsan_enabled = False
    arg_annotations, kernel_signature = "annotations", b"signature"

    def __call__(
        self, gridX: int, gridY: int, gridZ: int, stream: int, function: Any, kernel_metadata: Any,
        launch_metadata: Any, launch_enter_hook: Any, launch_exit_hook: Any, *args: Any,
    ) -> None: ...  # fmt: skip


def test_the_function_behind_a_launcher_is_called_where_nothing_is_to_be_allocated() -> None:
    kernel, hooks = SimpleNamespace(function="f", packed_metadata="m"), ("m", None, None, None)
    run: Any = Launcher36([], 0)
    assert _launch._call(run, kernel) == (print, ("f", False, True, None, None, *hooks), False)
    run.global_scratch_size = 8
    assert _launch._call(run, kernel) == (run, ("f", *hooks), False)
    run = Launcher36([], 0)
    run.launch = lambda *args: None  # wrapped, for tensor descriptors
    assert _launch._call(run, kernel) == (run, ("f", *hooks), False)
    run = Launcher39([], 0)
    behind = (False, True, *hooks, None, None, "annotations", b"signature")
    assert _launch._call(run, kernel) == (print, ("f", *behind), True)
    run.gsan_enabled = True
    assert _launch._call(run, kernel) == (run, ("f", *hooks), False)


MUTANTS: list[tuple[str, str, str]] = [
    ("address & 15 == 0)", "True)", "alignment"),
    ("1 if arg == 1 else ", "", "one"),
    ("16 if arg & 15 == 0 else 0", "0", "a multiple of 16"),
    ("key += (arg.dtype, ", "key += (0, ", "dtype"),
    ("not -_INT32 <= arg < _INT32", "False", "64 bits unspecialised"),
    ("key.append(of)", "key.append(0)", "float"),
    ("key += (name, type(value), value)", "key += (name, type(value))", "constexpr"),
    ("key += (name, type(value), value)", "key += (name, value)", "constexpr type"),
]


@pytest.mark.parametrize(("right", "wrong", "what"), MUTANTS, ids=[what for _, _, what in MUTANTS])
def test_mutant_a_key_that_is_too_coarse(right: str, wrong: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(_launch.__file__, encoding="utf-8") as file:
        source = file.read()
    assert source.count(right) == 1
    names: dict[str, Any] = {"__name__": "mutant"}
    exec(compile(source.replace(right, wrong), "mutant", "exec", dont_inherit=True), names)
    monkeypatch.setattr(CachedLauncher, "describe", names["CachedLauncher"].describe)
    with pytest.raises(AssertionError):
        check_apart(what)


@needs_triton
def test_the_key_is_at_least_as_fine_as_tritons() -> None:
    """Against the function that Triton itself specialises with: equal keys mean equal specialisations."""
    libtriton = pytest.importorskip("triton._C.libtriton")
    specialize = getattr(libtriton, "native_specialize_impl", None)
    if specialize is None:
        pytest.skip("this Triton specialises elsewhere")
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    integers = [
        0,
        1,
        2,
        15,
        16,
        *(sign * (1 << bit) + off for bit in (31, 32, 63) for sign in (1, -1) for off in (-16, -1, 0, 1)),
    ]
    numbers = [n for n in integers if -(1 << 63) <= n < 1 << 64]
    buffers = [
        torch.zeros(64, dtype=dtype)[k:] for dtype in (torch.int32, torch.int64, torch.bfloat16) for k in range(9)
    ]
    values = [*numbers, *buffers, True, False, 1.0, 0.5, None]
    for kind in ("", "stable"):
        launcher = CachedLauncher(SimpleNamespace(params=[parameter("x", kind)]), None, frozenset((torch.Tensor,)))
        found: dict[Any, Any] = {}
        for value in values:
            described = launcher.describe((value,), {})
            assert described is not None
            theirs = specialize(backend, value, False, kind == "", True)
            assert found.setdefault(tuple(described[0]), theirs) == theirs, value


@needs_triton
def test_without_nvidias_backend_nothing_is_cached() -> None:
    real = pos_seq_lens.kernel.load()
    if not torch.cuda.is_available():
        assert cached_launcher(real) is real


@pytest.mark.gpu
@needs_triton
def test_a_cached_launch_writes_what_a_plain_one_does() -> None:
    """Values, streams, pinned arguments, misaligned views, a graph's capture and Triton's hooks."""
    import triton

    launcher = cached_launcher(pos_seq_lens.kernel.load())
    assert isinstance(launcher, CachedLauncher)
    heard: list[Any] = []
    real_run = launcher.real.run

    def run(*args: Any, **options: Any) -> Any:
        heard.append(options["grid"])
        return real_run(*args, **options)

    launcher.real.run = run
    try:
        for offset, pinned in ((0, False), (1, False), (0, True), (0, False), (1, False), (0, True)):
            counts = torch.arange(5, 14, dtype=torch.int32)
            counts = counts.pin_memory() if pinned else counts.cuda()
            rows = torch.tensor([7, 3, 1, 0, 2], dtype=torch.int32, device="cuda")[offset:]
            starts = torch.arange(0, 15, 3, dtype=torch.int32, device="cuda")
            positions = torch.full((20,), -1, dtype=torch.int64, device="cuda")
            seq_lens = torch.full((9,), -1, dtype=torch.int32, device="cuda")
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                pos_seq_lens.launch(launcher, rows, starts, counts, positions, seq_lens, 4)
            stream.synchronize()
            done = [5 + row for row in [7, 3, 1, 0, 2][offset:][:4]]
            assert seq_lens.tolist() == [*(n + 3 for n in done), 0, 0, 0, 0, 0]
            assert positions.tolist() == [*(n + k for n in done for k in range(3)), *[-1] * 8]
        assert len(heard) == 2, "aligned or not; pinned or not makes no difference to a kernel"
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            pos_seq_lens.launch(launcher, rows, starts, counts, positions, seq_lens, 4)
        seq_lens.fill_(-1)
        graph.replay()
        assert seq_lens.tolist() == [*(n + 3 for n in done), 0, 0, 0, 0, 0]
        assert len(heard) == 2
        seen: list[Any] = []
        chain = triton.knobs.runtime.launch_enter_hook
        if hasattr(chain, "add"):
            chain.add(seen.append)
            try:
                pos_seq_lens.launch(launcher, rows, starts, counts, positions, seq_lens, 4)
            finally:
                chain.remove(seen.append)
            assert len(heard) == 3
            assert len(seen) == 1
        with pytest.raises(ValueError, match="cannot be accessed from Triton"):
            pos_seq_lens.launch(launcher, rows, starts, torch.zeros(9, dtype=torch.int32), positions, seq_lens, 4)
    finally:
        del launcher.real.run
