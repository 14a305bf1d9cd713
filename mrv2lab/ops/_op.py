"""The shape of every operation: spec -> kernel -> launcher, and how a Triton kernel is found without importing Triton.

An op's file imports without torch and without Triton. Its kernel is a plain function under :func:`jit`; Triton is
loaded on the first launch, and the module's global ``tl`` set then. The interpreter needs jitted helpers that are
interpreted too, so it runs a second copy of the whole module (wrapping single kernels fails).
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Literal, overload

Backend = Literal["spec", "triton", "interpret"]
_COPY_PREFIX = "mrv2lab.ops._interpreted_"


class TritonMissing(RuntimeError):
    """A Triton kernel was asked for where Triton cannot be imported."""


class Jit:
    """A function to be compiled (or interpreted) by Triton on first use. Calls and launches go through :meth:`load`."""

    def __init__(self, fn: Callable[..., Any], do_not_specialize: Sequence[str] = ()) -> None:
        self.fn = fn
        self.name = fn.__name__
        unknown = set(do_not_specialize) - set(inspect.signature(fn).parameters)
        if unknown:
            raise TypeError(f"kernel {self.name} has no argument {sorted(unknown)} that could stay unspecialized")
        self.do_not_specialize = tuple(do_not_specialize)
        self._loaded: dict[bool, Any] = {}

    def load(self, interpret: bool = False) -> Any:
        """The ``JITFunction`` (or ``InterpretedFunction``), with every helper it calls loaded the same way."""
        if interpret not in self._loaded:
            module = sys.modules[self.fn.__module__]
            if interpret:
                module = _interpreted_copy(module)
            _prepare(module, interpret)
            self._loaded[interpret] = _REAL[(module.__name__, self.name)]
        return self._loaded[interpret]


@overload
def jit(fn: Callable[..., Any]) -> Jit: ...
@overload
def jit(*, do_not_specialize: Sequence[str]) -> Callable[[Callable[..., Any]], Jit]: ...
def jit(
    fn: Callable[..., Any] | None = None, *, do_not_specialize: Sequence[str] = ()
) -> Jit | Callable[[Callable[..., Any]], Jit]:
    """Mark a Triton kernel or a helper that kernels call: ``@jit`` or ``@jit(do_not_specialize=["num_reqs"])``.

    Triton compiles a kernel anew when an integer argument turns 1 or changes its divisibility by 16; name there what
    changes from step to step.
    """
    if fn is None:
        return lambda fn: Jit(fn, do_not_specialize)
    return Jit(fn)


_REAL: dict[tuple[str, str], Any] = {}
_JIT_OF: dict[int, Jit] = {}
_PREPARED: set[str] = set()


def _interpreted_copy(module: ModuleType) -> ModuleType:
    """A second copy of an op's module, to be prepared under Triton's interpret knob."""
    name = _COPY_PREFIX + module.__name__.rpartition(".")[2]
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, module.__file__)
        assert spec is not None and spec.loader is not None
        copy = importlib.util.module_from_spec(spec)
        sys.modules[name] = copy
        spec.loader.exec_module(copy)
    return sys.modules[name]


def _prepare(module: ModuleType, interpret: bool) -> None:
    """Give ``module`` its ``tl`` and replace its Jit globals by Triton's functions, imported helpers first."""
    if module.__name__ in _PREPARED:
        return
    _PREPARED.add(module.__name__)
    try:
        import triton
        import triton.language as tl
    except ImportError as error:
        raise TritonMissing("Triton is not installed; use kernels='spec' or `pip install triton` (Linux)") from error
    own: list[tuple[str, Jit]] = []
    for name, value in list(vars(module).items()):
        value = _JIT_OF.get(id(value), value)
        if isinstance(value, Jit):
            if value.fn.__module__ == module.__name__:
                own.append((name, value))
            else:
                vars(module)[name] = value.load(interpret)
    vars(module)["tl"] = tl
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = interpret
        for name, value in own:
            real = triton.jit(value.fn, do_not_specialize=list(value.do_not_specialize))
            vars(module)[name] = real
            _REAL[(module.__name__, name)] = real
            _JIT_OF[id(real)] = value


class Op:
    """One operation. ``Op(rt, *args)`` launches it through the runtime's chokepoint; arguments are positional.

    ``numpy`` ops have NumPy specs over integers; the others have torch specs. ``writes`` names the arguments that the
    op writes; every other tensor argument is read.
    """

    def __init__(
        self, launch: Callable[..., None], spec: Callable[..., None], kernel: Jit, writes: tuple[str, ...], numpy: bool
    ) -> None:
        self.name = launch.__name__
        self.launch = launch
        self.spec = spec
        self.kernel = kernel
        self.numpy = numpy
        self.params = tuple(inspect.signature(launch).parameters)[1:]
        unknown = set(writes) - set(self.params)
        if unknown:
            raise TypeError(f"op {self.name} has no argument {sorted(unknown)}; it has {self.params}")
        if tuple(inspect.signature(spec).parameters) != self.params:
            raise TypeError(f"op {self.name}: spec and launcher must take the same arguments {self.params}")
        self.write_index = tuple(self.params.index(name) for name in writes)
        self.__doc__ = launch.__doc__ or spec.__doc__

    def __call__(self, rt: Any, *args: Any) -> None:
        rt.kernel(self, *args)

    def execute(self, backend: Backend, args: tuple[Any, ...]) -> None:
        """Run now, on the machine where the tensors are. For queued work only; the step path launches ``op(rt, ...)``."""
        if backend == "spec":
            if self.numpy:
                args = tuple(_as_numpy(arg) for arg in args)
            self.spec(*args)
        else:
            self.launch(self.kernel.load(interpret=backend == "interpret"), *args)


def _as_numpy(arg: Any) -> Any:
    if isinstance(arg, tuple):
        return tuple(_as_numpy(item) for item in arg)
    return arg.numpy() if hasattr(arg, "untyped_storage") else arg


def op(
    *, spec: Callable[..., None], kernel: Jit, writes: tuple[str, ...], numpy: bool = True
) -> Callable[[Callable[..., None]], Op]:
    """Turn a launcher ``fn(kernel, *args)`` into an :class:`Op` of the same name."""

    def wrap(launch: Callable[..., None]) -> Op:
        return Op(launch, spec, kernel, writes, numpy)

    return wrap


def cdiv(a: int, b: int) -> int:
    """Ceiling division."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is >= n (1 for n <= 1)."""
    return 1 << max(n - 1, 0).bit_length()
