"""Launches without Triton's own bookkeeping: about 5 us of host time instead of 30.

``JITFunction.run`` binds, specialises and looks up at every launch what hardly ever changes. Here a launch is looked up
by a key that is at least as fine as Triton's, and the compiled kernel's launcher is called directly. The first launch
of a key goes through Triton; so does every launch for which anything is unexpected: a profiler's hooks, changed knobs,
arguments of unknown types, another Triton.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

_INT32, _INT64 = 1 << 31, 1 << 63
_UNKNOWN: Any = object()
_SPECIALIZED, _UNSPECIALIZED, _CONSTEXPR = range(3)
"""What Triton looks at in a parameter's values: type, alignment and whether it is 1; its type; the value itself."""


class Entry(NamedTuple):
    """One compiled kernel, ready to be launched on one device: ``call(x, y, z, stream, *before, *arguments)``."""

    call: Callable[..., Any]
    before: tuple[Any, ...]
    """What stands between the stream and the arguments: function, metadata, hooks (none)."""
    packed: bool
    """Whether ``call`` takes the arguments as one tuple."""
    constants: tuple[Any, ...]
    """Values of the parameters behind the positional arguments, all of them constexpr."""
    runtime: dict[str, Any]
    compilation: dict[str, Any]
    """Knobs that somebody had set when the kernel was compiled."""
    global_values: tuple[tuple[str, Any, dict[str, Any]], ...]
    """Module globals that the kernel reads: name, value, and where they are."""
    kernel: Any
    """Kept, since its end unloads the function."""


class Launch(NamedTuple):
    """One launch as it was made, to be made again: everything but the stream."""

    entry: Entry
    device: int
    grid: tuple[int, int, int]
    passed: list[Any]
    """The arguments as the compiled launcher takes them, constants left out."""

    def behind_stream(self, passed: list[Any]) -> tuple[Any, ...]:
        """What follows the stream in a call, with ``passed`` for the arguments."""
        arguments = (*passed, *self.entry.constants)
        return (*self.entry.before, arguments) if self.entry.packed else self.entry.before + arguments


class CachedLauncher:
    """``launcher[grid](...)`` launches what ``real[grid](...)`` would, ``real`` being a ``JITFunction``.

    Arguments are tensors, numbers, bools and None by position and constexpr values or options by keyword, as every
    launcher under ``ops/`` passes them. Threads may share one: entries are never changed.
    """

    def __init__(self, real: Any, triton: Any, tensor_types: frozenset[type]) -> None:
        self.real = real
        self.triton = triton
        self.tensor_types = tensor_types
        self._kinds = [
            _CONSTEXPR if param.is_constexpr else _UNSPECIALIZED if param.do_not_specialize else _SPECIALIZED
            for param in real.params
        ]
        self._dynamic = frozenset(param.name for param in real.params if not param.is_constexpr)
        self.entries: dict[tuple[Any, ...], Entry | None] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Launch | None]:
        return partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> Launch | None:
        """Launch; returns what was done where Triton was not asked."""
        if not self._dynamic.isdisjoint(options) or not self._nobody_listens():
            self.real[grid](*args, **options)
            return None
        driver = self.triton.runtime.driver.active
        device = driver.get_current_device()
        described = self.describe(args, options)
        if described is None:
            self.real[grid](*args, **options)
            return None
        key, passed = (device, *described[0]), described[1]
        entry = self.entries.get(key, _UNKNOWN)
        if entry is _UNKNOWN:
            self.entries[key] = self._first(grid, args, options)
            return None
        if entry is None or not self._as_compiled(entry):
            self.real[grid](*args, **options)
            return None
        x, y, z = (*grid, 1, 1)[:3]
        made = Launch(entry, device, (x, y, z), passed)
        entry.call(x, y, z, driver.get_current_stream(device), *made.behind_stream(passed))
        return made

    def again(self, made: Launch, behind_stream: tuple[Any, ...]) -> bool:
        """Make a launch again, on the current stream; False, with nothing done, where it would not be the same now."""
        driver = self.triton.runtime.driver.active
        device = made.device
        if driver.get_current_device() != device or not self._nobody_listens() or not self._as_compiled(made.entry):
            return False
        x, y, z = made.grid
        made.entry.call(x, y, z, driver.get_current_stream(device), *behind_stream)
        return True

    def describe(self, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[list[Any], list[Any]] | None:
        """What Triton could specialise on, and the arguments as the compiled launcher takes them; None for arguments
        that this cache does not know.

        Device tensors become addresses. Host tensors (UVA) stay: Triton's launcher asks the driver for their device
        address, and refuses those that are not page-locked.
        """
        key: list[Any] = [len(args)]  # the key says nothing of the grid: Triton does not specialise on it
        passed = list(args)
        tensor_types = self.tensor_types
        for i, (arg, kind) in enumerate(zip(args, self._kinds, strict=False)):
            of = type(arg)
            if kind is _CONSTEXPR:
                key += (of, arg)
            elif of in tensor_types:
                address = arg.data_ptr()
                if arg.is_cuda:
                    passed[i] = address
                key += (arg.dtype, address & 15 == 0)
            elif of is int:
                if not -_INT32 <= arg < _INT32:
                    key += ("u64" if arg >= _INT64 else "i64", arg & 15 == 0)
                elif kind is _SPECIALIZED:
                    key.append(1 if arg == 1 else 16 if arg & 15 == 0 else 0)
                else:
                    key.append(0)
            elif of is float or of is bool or arg is None:
                key.append(of)
            else:
                return None
        for name, value in options.items():
            key += (name, type(value), value)
        return key, passed

    def _nobody_listens(self) -> bool:
        """Whether no profiler wants to hear of launches."""
        runtime = self.triton.knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        return (
            (enter is None or getattr(enter, "calls", None) == [])
            and (leave is None or getattr(leave, "calls", None) == [])
            and not self.real.pre_run_hooks
        )

    def _as_compiled(self, entry: Entry) -> bool:
        """Whether knobs and globals are what they were: Triton compiles anew, or complains, if not."""
        for name, value, where in entry.global_values:
            if where.get(name) is not value:
                return False
        knobs = self.triton.knobs
        return bool(vars(knobs.runtime) == entry.runtime and vars(knobs.compilation) == entry.compilation)

    def _first(self, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> Entry | None:
        """Launch through Triton; returns what later launches need, or None if they must go the same way."""
        kernel = self.real[grid](*args, **options)
        if hasattr(kernel, "result"):  # compiled in another thread
            kernel = kernel.result()
        behind = self.real.params[len(args) :]
        if not all(param.is_constexpr and (param.name in options or param.has_default) for param in behind):
            return None
        call = _call(getattr(kernel, "run", None), kernel)
        if call is None:
            return None
        used = getattr(self.real, "used_global_vals", {})
        knobs = self.triton.knobs
        return Entry(
            *call,
            tuple(options.get(param.name, param.default) for param in behind),
            dict(vars(knobs.runtime)),
            dict(vars(knobs.compilation)),
            tuple((name, where.get(name), where) for (name, _), (_, where) in used.items()),
            kernel,
        )


_FIRST = ("gridX", "gridY", "gridZ", "stream", "function")
_THEN = ("kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook")


def _call(run: Any, kernel: Any) -> tuple[Callable[..., Any], tuple[Any, ...], bool] | None:
    """How to call ``run``, a launcher as Triton 3.6 (which names the first five parameters) or 3.9 (nine) makes them:
    the function, what stands between stream and arguments, and whether those are one tuple. None for any other.

    Where it would only pass everything on, with no scratch memory to allocate, the C function behind it is called.
    """
    try:
        parameters = inspect.signature(run).parameters.values()
    except (TypeError, ValueError):
        return None
    names = tuple(param.name for param in parameters if param.kind is param.POSITIONAL_OR_KEYWORD)
    rest = [param for param in parameters if param.kind is not param.POSITIONAL_OR_KEYWORD]
    if names not in (_FIRST, _FIRST + _THEN) or [param.kind for param in rest] != [inspect.Parameter.VAR_POSITIONAL]:
        return None
    hooks = (kernel.packed_metadata, None, None, None)
    known = {name: getattr(run, name, _UNKNOWN) for name in _ATTRIBUTES}
    no_scratch = known["global_scratch_size"] == known["profile_scratch_size"] == 0
    if not (no_scratch and inspect.isbuiltin(known["launch"])) or _UNKNOWN in known.values():
        return run, (kernel.function, *hooks), False
    flags = known["launch_cooperative_grid"], known["launch_pdl"]
    if names == _FIRST:
        return known["launch"], (kernel.function, *flags, None, None, *hooks), False
    more = [getattr(run, name, _UNKNOWN) for name in ("arg_annotations", "kernel_signature")]
    if getattr(run, "gsan_enabled", True) or _UNKNOWN in more:
        return run, (kernel.function, *hooks), False
    return known["launch"], (kernel.function, *flags, *hooks, None, None, *more), True


_ATTRIBUTES = ("launch", "global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")


def cached_launcher(real: Any) -> Any:
    """``real``, a ``JITFunction``, behind a :class:`CachedLauncher`; ``real`` itself where this Triton's launches are
    not those of NVIDIA's backend."""
    import torch
    import triton

    try:
        backend = triton.runtime.driver.active.get_current_target().backend
        wanted = (real.params, real.pre_run_hooks, triton.knobs.runtime.launch_enter_hook, triton.knobs.compilation)
    except (AttributeError, RuntimeError):
        return real
    if backend != "cuda" or not wanted[0]:
        return real
    return CachedLauncher(real, triton, frozenset((torch.Tensor, torch.nn.Parameter)))
