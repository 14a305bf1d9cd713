"""Run one op on CPU tensors through any backend, in place, so that one check serves spec, interpreter, GPU and mutants.

    apply = implementation(pos_seq_lens, "interpret")     # or "spec", "triton"
    apply(idx_mapping, query_start_loc, ...)              # the tensors hold the result afterwards

``@pytest.mark.parametrize("backend", BACKENDS)`` skips what the machine lacks and marks ``triton`` as ``gpu``.
Interpreted programs are slow (1.5 ms each): at most 16 programs a test.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mrv2lab.ops._op import Backend, Op

Apply = Callable[..., None]

_needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
INTERPRET = pytest.param("interpret", marks=_needs_triton)
BACKENDS = [
    "spec",
    INTERPRET,
    pytest.param("triton", marks=[pytest.mark.gpu, _needs_triton]),
]
"""For ``parametrize``."""
CPU_BACKENDS = ["spec", INTERPRET]
"""For ``parametrize`` over mutants."""

POISON = -7777
"""What integer outputs are filled with before a launch."""


def run(op: Op, args: tuple[Any, ...], backend: Backend) -> None:
    """Execute ``op`` on CPU tensors in place. For "triton" they travel to the GPU and back, whole storages at a time,
    so strides, shared memory and what lies around a view survive. Pinned tensors stay where they are (UVA). A uint64
    tensor is a pointer table: the addresses of tensors among the arguments, translated on the way."""
    if backend != "triton":
        op.execute(backend, args)
        return
    moved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
    addresses: dict[int, int] = {}

    def move(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return tuple(move(item) for item in arg)
        if not isinstance(arg, torch.Tensor) or arg.dtype == torch.uint64 or _is_pinned(arg):
            return arg
        storage = arg.untyped_storage()
        if storage.data_ptr() not in moved:
            moved[storage.data_ptr()] = (storage, storage.cuda())
        there = torch.empty(0, dtype=arg.dtype, device="cuda")
        there.set_(moved[storage.data_ptr()][1], arg.storage_offset(), arg.size(), arg.stride())
        addresses[arg.data_ptr()] = there.data_ptr()
        return there

    def translate(arg: Any) -> Any:
        if isinstance(arg, torch.Tensor) and arg.dtype == torch.uint64:
            return pointer_table([addresses[pointer] for pointer in arg.tolist()]).cuda()
        return arg

    on_gpu = tuple(move(arg) for arg in args)
    op.execute("triton", tuple(translate(arg) for arg in on_gpu))
    torch.cuda.synchronize()
    for here, there in moved.values():
        here.copy_(there)


def implementation(op: Op, backend: Backend) -> Apply:
    """``op`` through ``backend`` as a plain function of its arguments."""
    return lambda *args: run(op, args, backend)


def pointer_table(tables: Any) -> torch.Tensor:
    """uint64[G]: the addresses of ``tables`` (tensors, or addresses already)."""
    return torch.tensor([t if isinstance(t, int) else t.data_ptr() for t in tables], dtype=torch.uint64)


def poisoned(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """An output nobody has written: POISON for integers, NaN for floats."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else POISON, dtype=dtype)


def expect(op: Op, apply: Apply, expected: dict[str, Any], **args: Any) -> None:
    """Apply to copies of ``args`` and compare every tensor afterwards: with ``expected`` where named, else unchanged.

    A uint64 argument (a pointer table) is given by the name of the argument that it points into.
    """
    args = {name: _copy(value) for name, value in args.items()}
    before = {name: _copy(value) for name, value in args.items()}
    apply(*(pointer_table(args[args[name]]) if isinstance(args[name], str) else args[name] for name in op.params))
    for name, value in args.items():
        if not isinstance(value, (torch.Tensor, tuple)):
            continue
        want = expected.get(name, before[name])
        pairs = zip(value, want, strict=True) if isinstance(value, tuple) else [(value, want)]
        for got, right in pairs:
            assert torch.equal(got, torch.as_tensor(right).to(got.dtype)), f"{name}\n got {got}\nwant {right}"


def _copy(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_copy(item) for item in value)
    if isinstance(value, torch.Tensor):
        return value.clone().pin_memory() if _is_pinned(value) else value.clone()
    return value


def _is_pinned(tensor: torch.Tensor) -> bool:
    return torch.cuda.is_available() and tensor.is_pinned()


_TRITON_TYPES = {
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint64: "*u64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
}


_COMPILER_OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")


def compile_for_gpu(op: Op, args: tuple[Any, ...], cache: Path, capability: int = 90) -> str:
    """Compile the kernel for the launch ``op(*args)`` on an NVIDIA GPU, which need not be there, and return its PTX."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = op.kernel.load()
    ptx: list[str] = []

    class Compiler:
        def __getitem__(self, grid: Any) -> Callable[..., None]:
            return self.compile

        def compile(self, *args: Any, **kwargs: Any) -> None:
            options = {name: kwargs.pop(name) for name in _COMPILER_OPTIONS if name in kwargs}
            values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
            signature, constants = {}, {}
            for param in kernel.params:
                value = values[param.name]
                is_one = isinstance(value, int) and value == 1 and not param.do_not_specialize
                if param.is_constexpr or is_one:
                    signature[param.name], constants[param.name] = "constexpr", value
                elif isinstance(value, torch.Tensor):
                    signature[param.name] = _TRITON_TYPES[value.dtype]
                else:
                    signature[param.name] = "fp32" if isinstance(value, float) else "i32"
            with triton.knobs.cache.scope():
                triton.knobs.cache.dir = str(cache)
                source = ASTSource(kernel, signature, constants)
                ptx.append(triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"])

    op.launch(Compiler(), *args)
    return ptx[-1]


_mutants = itertools.count()


def mutant(op: Op, old: str, new: str, folder: Path) -> Op:
    """The same op with a deliberate bug: ``old``, which must occur exactly once in its file, replaced by ``new``.

    The interpreter reads and writes raw memory: a bug in a kernel must stay inside the test's buffers.
    """
    source = Path(sys.modules[op.spec.__module__].__file__ or "").read_text()
    if source.count(old) != 1:
        raise ValueError(f"{old!r} occurs {source.count(old)} times in the file of op {op.name}, not once")
    name = f"mutant_{next(_mutants)}_{op.name}"
    path = folder / f"{name}.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return getattr(module, op.name)


def caught(check: Callable[[Apply], None], apply: Apply) -> bool:
    """Whether ``check`` fails, as it must for a mutant. A crash counts: a bug that raises is a bug that is seen."""
    try:
        check(apply)
    except (AssertionError, IndexError, ValueError):
        return True
    return False
