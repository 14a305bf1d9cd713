"""The kernel lens: one op of a recorded step, its spec and its kernel side by side, program by program.

    run = lens(recording, 12, "post_update")      # a value: recording.lens.LensRun
    open_lens(recording, 12)                      # the widget, with every op of that step to choose from

The spec runs on copies in NumPy (torch for floating-point ops), the kernel on copies through Triton's interpreter.
Nothing of an engine is touched, so a lens may be opened beside a running one.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from mrv2lab import ops
from mrv2lab.ops._op import Op
from mrv2lab.protocol import TritonMissing
from mrv2lab.recorder.lens_trace import Buffer, PointerTable, Watch, missing_hooks
from mrv2lab.recording.lens import (
    MAX_ELEMENTS,
    MAX_LANES,
    MAX_PROGRAMS,
    Difference,
    LensCalls,
    LensError,
    LensRun,
    SourceText,
    first_difference,
)
from mrv2lab.recording.replay import Replay
from mrv2lab.recording.replay_program import OpCall
from mrv2lab.recording.schema import RecordingError

if TYPE_CHECKING:
    from mrv2lab.widgets.kernel_lens import KernelLens

Array = np.ndarray[Any, Any]


@cache
def all_ops() -> dict[str, Op]:
    """Every operation of ``mrv2lab.ops`` by name."""
    found: dict[str, Op] = {}
    for info in pkgutil.iter_modules(ops.__path__):
        module = importlib.import_module(f"{ops.__name__}.{info.name}")
        found |= {value.name: value for value in vars(module).values() if isinstance(value, Op)}
    return found


def find_op(name: str) -> Op:
    """Raises :class:`LensError` where no op has that name."""
    try:
        return all_ops()[name]
    except KeyError:
        raise LensError(f"there is no op {name!r}; there are {', '.join(sorted(all_ops()))}") from None


def trace_op(op: str | Op, args: Mapping[str, Any], phase: str = "", max_programs: int = MAX_PROGRAMS) -> LensRun:
    """Run spec and kernel of ``op`` on copies of ``args`` and log what each program of the kernel loads and stores.

    ``args``: parameter name -> array, tuple of arrays, scalar or None, as the op's spec takes them, before the call.
    Tables of pointers and of strides are made anew for the copies and may be left out. At most ``max_programs``
    programs are interpreted (1.5 ms each). Raises :class:`LensError` for arguments that do not fit the op, and where
    the kernel raises.
    """
    op = find_op(op) if isinstance(op, str) else op
    values = _complete(op, args)
    by_spec, by_kernel = _Copies(values), _Copies(values)
    before, written = by_spec.shown(), by_spec.names(op)
    try:
        op.execute("spec", by_spec.passed(op.numpy))
    except (IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        text = f"the spec of {op.name} refuses these arguments: {type(error).__name__}: {error}"
        raise LensError(text) from error
    kernel = source_of(op.kernel.fn)
    run = LensRun(
        op=op.name,
        phase=phase,
        doc=inspect.cleandoc(op.__doc__ or ""),
        params=op.params,
        inputs=before,
        writes=written,
        expected={name: by_spec.buffers[name].shown() for name in written},
        spec=source_of(op.spec),
        kernel=kernel,
        launcher=source_of(op.launch),
        pointers={name: part.targets for name, part in by_spec.parts.items() if isinstance(part, PointerTable)},
    )
    distinct = {id(buffer): buffer for buffer in by_kernel.buffers.values()}
    watch = Watch(list(distinct.values()), kernel, op.kernel.fn.__code__.co_filename, max_programs)
    missing = _interpret(op, by_kernel, watch)
    if missing is not None:
        return replace(run, missing=missing)
    return replace(
        run,
        after={name: by_kernel.buffers[name].shown() for name in written},
        grid=watch.grid,
        programs=watch.programs,
        difference=_difference(by_spec, by_kernel, watch),
        notes=tuple(_notes(by_kernel, watch, max_programs)),
    )


# -- arguments --------------------------------------------------------------------------------------------------------
def _complete(op: Op, args: Mapping[str, Any]) -> dict[str, Any]:
    """``args`` in the op's order, with tables of pointers (:class:`_Pointers`) and strides made anew; sizes checked."""
    unknown = [name for name in args if name not in op.params]
    if unknown:
        raise LensError(f"op {op.name} has no argument {', '.join(unknown)}; it takes {', '.join(op.params)}")
    values: dict[str, Any] = {}
    for name in op.params:
        tables = _tables_of(name, args)
        if name.endswith("_ptrs") and tables:
            values[name] = _Pointers(tables)
        elif name.endswith("_strides") and tables:
            values[name] = np.array([table.shape[-1] for table in args[tables]], np.int64)
        elif name in args:
            values[name] = args[name]
        else:
            raise LensError(f"op {op.name} needs the argument {name}; it takes {', '.join(op.params)}")
        for part in values[name] if isinstance(values[name], tuple) else (values[name],):
            size = int(np.prod(part.shape)) if hasattr(part, "shape") else 0
            if size > MAX_ELEMENTS:
                raise LensError(
                    f"argument {name} of {op.name} has {size:,} elements, a lens takes {MAX_ELEMENTS:,} at most; "
                    "record with fewer rows or a shorter max_model_len"
                )
    return values


def _tables_of(name: str, args: Mapping[str, Any]) -> str | None:
    """``table_ptrs`` -> ``tables``, ``input_ptrs`` -> ``input_tables``, ``table_strides`` -> ``tables``."""
    stem = name.rpartition("_")[0]
    return next((found for found in (f"{stem}s", f"{stem}_tables") if isinstance(args.get(found), tuple)), None)


class _Pointers:
    """To be a table of the addresses of the copies of ``args[tables]``."""

    def __init__(self, tables: str) -> None:
        self.tables = tables


class _Copies:
    """One set of copies of an op's arguments, in guarded buffers. An array that is given twice stays one array."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        seen: dict[int, Buffer] = {}

        def made(name: str, value: Any) -> Any:
            if isinstance(value, np.generic):
                return value.item()
            if not hasattr(value, "shape"):
                return value
            return seen.setdefault(id(value), Buffer(name, value))

        args: dict[str, Any] = {}
        for name, value in values.items():
            if isinstance(value, tuple):
                args[name] = tuple(made(f"{name}[{i}]", part) for i, part in enumerate(value))
            elif not isinstance(value, _Pointers):
                args[name] = made(name, value)
        for name, value in values.items():
            if isinstance(value, _Pointers):
                args[name] = PointerTable(name, args[value.tables])
        self._args = {name: args[name] for name in values}
        self.parts = {key: part for name, value in self._args.items() for key, part in _parts(name, value)}
        """Every buffer and scalar by name, tuples spread."""
        self.buffers = {key: part for key, part in self.parts.items() if isinstance(part, Buffer)}

    def names(self, op: Op) -> tuple[str, ...]:
        """The buffers that ``op`` says it writes."""
        written = [op.params[i] for i in op.write_index]
        return tuple(key for name in written for key, _ in _parts(name, self._args[name]))

    def passed(self, numpy: bool) -> tuple[Any, ...]:
        """The arguments over these copies: NumPy arrays or tensors."""

        def passed(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(passed(part) for part in value)
            if isinstance(value, Buffer):
                return value.bits if numpy else value.tensor()
            return value

        return tuple(passed(value) for value in self._args.values())

    def shown(self) -> dict[str, Any]:
        return {key: part.shown() if isinstance(part, Buffer) else part for key, part in self.parts.items()}


def _parts(name: str, value: Any) -> list[tuple[str, Any]]:
    return [(f"{name}[{i}]", part) for i, part in enumerate(value)] if isinstance(value, tuple) else [(name, value)]


# -- running ----------------------------------------------------------------------------------------------------------
def _interpret(op: Op, copies: _Copies, watch: Watch) -> str | None:
    """Run the kernel on ``copies``; a sentence if this machine cannot."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed, so there is no interpreter: `pip install triton` (Linux)."
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed, and Triton's interpreter takes its tensors: see README, Set-up."
    try:
        real = op.kernel.load(interpret=True)
    except TritonMissing as error:
        return str(error)
    if lacking := missing_hooks():
        import triton

        return f"The interpreter of Triton {triton.__version__} has no {', '.join(lacking)}, which the lens listens to."
    watched: Any = copy.copy(op)
    watched.kernel = watch.kernel(real)
    watched.execute("interpret", copies.passed(numpy=False))
    return None


def _difference(expected: _Copies, got: _Copies, watch: Watch) -> Difference | None:
    """Of all arguments, so that a stray store into one that is only read counts too. Where programs were left out, of
    the cells that the others stored."""
    where: dict[str, Array] | None = None
    if len(watch.programs) < watch.num_programs:
        stores = [access for program in watch.programs for access in program.stores]
        names = {access.buffer for access in stores}
        where = {name: np.unique(np.concatenate([a.index for a in stores if a.buffer == name])) for name in names}
    return first_difference(
        {name: buffer.shown() for name, buffer in expected.buffers.items() if buffer.name == name},
        {name: buffer.shown() for name, buffer in got.buffers.items()},
        where,
    )


def _notes(copies: _Copies, watch: Watch, max_programs: int) -> list[str]:
    notes = [f"{key} and {part.name} are one array." for key, part in copies.buffers.items() if part.name != key]
    done, launched = len(watch.programs), watch.num_programs
    if watch.grid is None or launched == 0:
        notes.append("This call has nothing to do and launches no program.")
    elif done < launched:
        why = f"a lens takes {max_programs}" if done == max_programs else f"they touched over {MAX_LANES:,} elements"
        notes.append(f"This call launches {launched:,} programs; the first {done} were interpreted ({why}).")
    return notes


def source_of(function: Callable[..., Any]) -> SourceText:
    """A function as it stands in its file, with the comment above it, which says the shapes.

    Raises :class:`LensError` where Python cannot find the source.
    """
    try:
        lines, first = inspect.getsourcelines(function)
        whole, _ = inspect.findsource(function)
    except (OSError, TypeError) as error:
        raise LensError(f"the source of {function.__name__} cannot be read: {error}") from error
    while first > 1 and whole[first - 2].startswith("#") and not whole[first - 2].startswith("# --"):
        first -= 1
        lines.insert(0, whole[first - 1])
    return SourceText(function.__module__.replace(".", "/") + ".py", first, "".join(lines).rstrip("\n"))


# -- a recorded step --------------------------------------------------------------------------------------------------
def lens(source: Any, index: int = -1, op: str | int = 0) -> LensRun:
    """Trace one op of a step.

    ``source``: a Recording, a Replay, anything with a ``recording``, or a single :class:`OpCall`. ``index``: the step,
    negative from the end. ``op``: its name (the first such call of the step) or its number among the step's calls.
    Raises :class:`LensError` where the step has no such call or cannot be rebuilt.
    """
    if isinstance(source, OpCall):
        return trace_op(source.op, source.args, source.phase)
    calls, index = _calls(source, index)
    return lens(calls[_number(calls, index, op)])


def open_lens(source: Any, index: int | None = None, op: str | int = 0) -> KernelLens:
    """The widget on one step's ops, beginning with ``op``.

    ``source`` as for :func:`lens`, or a StepExplorer: at the step that it shows, unless ``index`` says another.
    """
    from mrv2lab.widgets.kernel_lens import KernelLens

    if isinstance(source, OpCall):
        return KernelLens(LensCalls("one call", [(source.phase, source.name)], lambda _: lens(source)))
    if hasattr(source, "sources"):  # a StepExplorer
        if not source.sources:
            raise LensError("this step explorer is closed; open a lens on the recording itself")
        index = source.index if index is None else index
        source = source.sources[0]
    calls, index = _calls(source, -1 if index is None else index)
    offered = LensCalls(f"step {index}", [(call.phase, call.name) for call in calls], lambda i: lens(calls[i]))
    return KernelLens(offered, _number(calls, index, op) if calls or op != 0 else 0)


def _number(calls: list[OpCall], index: int, op: str | int) -> int:
    names = [call.name for call in calls]
    if op in names:
        return names.index(op)
    if isinstance(op, (int, np.integer)) and op in range(len(names)):
        return int(op)
    raise LensError(f"step {index} has no op {op!r}; its ops: {', '.join(dict.fromkeys(names)) or 'none'}")


def _calls(source: Any, index: int) -> tuple[list[OpCall], int]:
    """The op calls of a step, and its index from the front."""
    try:
        recording = getattr(source, "recording", source)
        if not (hasattr(source, "op_calls") or hasattr(recording, "header")):
            raise LensError(f"a {type(source).__name__} is no recording to look into; Recording.load(path) reads one")
        replay = source if hasattr(source, "op_calls") else Replay(recording)
        count = len(replay)
        if not (isinstance(index, (int, np.integer)) and -count <= index < count):
            raise LensError(f"there is no step {index!r}; this recording has {count} to look into, from 0")
        return list(replay.op_calls(index % count)), index % count
    except RecordingError as error:
        raise LensError(str(error)) from error
