"""The shape of every operation: spec -> kernel -> launcher, and how a Triton kernel is found without importing Triton.

An op's file imports without torch and without Triton. Its kernel is a plain function under :func:`jit`; Triton is
loaded on the first launch, and the module's global ``tl`` set then. The interpreter needs jitted helpers that are
interpreted too, so it runs a second copy of the whole module (wrapping single kernels fails).
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, overload

from mrv2lab.ops._launch import CachedLauncher, cached_launcher
from mrv2lab.ops._repeat import Repeats
from mrv2lab.protocol import Backend, TritonMissing

_COPY_PREFIX = "mrv2lab.ops._interpreted_"


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
        self._launcher: Any = None

    def load(self, interpret: bool = False) -> Any:
        """The ``JITFunction`` (or ``InterpretedFunction``), with every helper it calls loaded the same way."""
        if interpret not in self._loaded:
            module = sys.modules[self.fn.__module__]
            if interpret:
                module = _interpreted_copy(module)
            _prepare(module, interpret)
            self._loaded[interpret] = _REAL[(module.__name__, self.name)]
        return self._loaded[interpret]

    def launcher(self) -> Any:
        """``launcher[grid](...)`` launches the compiled kernel: the ``JITFunction`` behind a cache of launches."""
        if self._launcher is None:
            self._launcher = cached_launcher(self.load())
        return self._launcher


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
    try:
        import triton
        import triton.language as tl
    except ImportError as error:
        raise TritonMissing("Triton is not installed; use kernels='spec' or `pip install triton` (Linux)") from error
    _PREPARED.add(module.__name__)
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


_INTERPRETER = threading.RLock()
_substitutes: list[tuple[Any, str, Any]] = []


@contextmanager
def _interpreter() -> Iterator[None]:
    """Triton's own library (``tl.max``, ``tl.zeros``, ...) is jitted code too and was loaded for compilation:
    interpreted copies stand in for the time of one launch, one thread at a time. Methods (``x.max()``) stay as they
    are, so kernels call ``tl.max(x)``."""
    with _INTERPRETER:
        if not _substitutes:
            _substitutes.extend(_make_substitutes())
        core = sys.modules["triton.language.core"]  # the library's functions patch it and leave it so
        originals = [(module, name, getattr(module, name)) for module, name, _ in _substitutes]
        originals += [(core, name, value) for name, value in vars(core).items()]
        try:
            for module, name, substitute in _substitutes:
                setattr(module, name, substitute)
            yield
        finally:
            for module, name, original in originals:
                setattr(module, name, original)


def _make_substitutes() -> list[tuple[Any, str, Any]]:
    import triton
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction, mangle_type

    mangle_type(0)  # imports, on first use, modules that want the library as it was
    substitutes: list[tuple[Any, str, Any]] = []
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        for name, function in list(vars(tl.standard).items()):
            if isinstance(function, JITFunction):
                interpreted = triton.jit(function.fn)
                places = (module for module in (tl, tl.standard) if vars(module).get(name) is function)
                substitutes += [(module, name, interpreted) for module in places]
    if triton.__version__.startswith("3.6."):
        # `range(0, n)` in a kernel: 3.6 calls int() on an array of shape (1,), which NumPy 2.4 refuses.
        patch = interpreter._patch_lang_tensor

        def patch_for_numpy(tensor: Any, scope: Any) -> None:
            patch(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        substitutes.append((interpreter, "_patch_lang_tensor", patch_for_numpy))
    return substitutes


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
        self._start: Callable[[tuple[Any, ...]], None] | None = None
        self.__doc__ = launch.__doc__ or spec.__doc__

    def __call__(self, rt: Any, *args: Any) -> None:
        rt.kernel(self, *args)

    def start(self, args: tuple[Any, ...]) -> None:
        """Launch the compiled kernel. For the runtime; tensors that are the same ones step by step cost least."""
        start = self._start
        if start is None:
            launcher = self.kernel.launcher()
            cached = isinstance(launcher, CachedLauncher)
            start = Repeats(self.launch, launcher) if cached else lambda args: self.launch(launcher, *args)
            self._start = start
        start(args)

    def execute(self, backend: Backend, args: tuple[Any, ...]) -> None:
        """Run now, where the tensors are. For queued work only; the step path launches ``op(rt, ...)``."""
        if backend == "spec":
            if self.numpy:
                args = tuple(_as_numpy(arg) for arg in args)
            self.spec(*args)
        elif backend == "interpret":
            kernel = self.kernel.load(interpret=True)
            with _interpreter():
                self.launch(kernel, *args)
        else:
            self.launch(self.kernel.launcher(), *args)


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
