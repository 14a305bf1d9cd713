"""Look over a kernel's shoulder: which elements of which argument each interpreted program loads and stores.

Arguments are copied into guarded memory, so that an address says which element it is and a kernel with a bug cannot
touch anything else. While watched, the interpreter's builder has hooks of ours on the instance; leaving the ``with``,
however that happens, gives it back as it was.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np

from mrv2lab.recording.lens import MAX_LANES, MAX_PROGRAMS, Access, LensError, Program, SourceText

Array = np.ndarray[Any, Any]

GUARD = 4096
"""Bytes on either side of a buffer: an access in there is named by the buffer that it just missed."""
ALIGN = 64
HOOKS = ("set_grid_idx", "create_masked_load", "create_masked_store")
"""Methods of the interpreter's builder that a lens needs; unmasked loads and stores go through the masked ones."""
ATOMICS = {"create_atomic_rmw": 3, "create_atomic_cas": None}
"""Hooked where they exist: name -> position of the mask among the arguments."""


class Buffer:
    """A copy of one array, a guard before and behind it. ``array`` is a NumPy array or a tensor, taken contiguous."""

    def __init__(self, name: str, array: Any) -> None:
        self.name = name
        self.bfloat16 = str(getattr(array, "dtype", "")) == "torch.bfloat16"
        source = _as_numpy(array, self.bfloat16)
        self._raw = np.zeros(source.nbytes + 2 * GUARD + ALIGN, np.uint8)
        skip = GUARD + -(self._raw.ctypes.data + GUARD) % ALIGN
        region = self._raw[skip : skip + source.nbytes]
        # [*shape] of the array's dtype; bfloat16 as uint16
        self.bits: Array = region.view(source.dtype).reshape(source.shape)
        self.bits[...] = source
        self.start = int(self._raw.ctypes.data) + skip
        self.end = self.start + source.nbytes
        self.itemsize = source.itemsize

    def shown(self, index: Array | None = None) -> Array:
        """A copy of all of it, or of the elements at flat ``index``; bfloat16 as float32."""
        bits = self.bits.copy() if index is None else self.bits.reshape(-1)[index]
        return (bits.astype(np.uint32) << 16).view(np.float32) if self.bfloat16 else bits

    def tensor(self) -> Any:
        """The same memory as a tensor."""
        import torch

        flat = torch.from_numpy(self.bits)
        return flat.view(torch.bfloat16) if self.bfloat16 else flat


class PointerTable(Buffer):
    """uint64 addresses of other buffers. An element is shown as its number: addresses differ from run to run."""

    def __init__(self, name: str, tables: Sequence[Buffer]) -> None:
        super().__init__(name, np.array([table.start for table in tables], np.uint64))
        self.targets = tuple(table.name for table in tables)

    def shown(self, index: Array | None = None) -> Array:
        numbers: Array = np.arange(self.bits.size, dtype=np.uint64)
        return numbers if index is None else numbers[index]


def _as_numpy(array: Any, bfloat16: bool) -> Array:
    if hasattr(array, "untyped_storage"):
        import torch

        array = array.detach().cpu().contiguous()
        array = (array.view(torch.int16) if bfloat16 else array).numpy()
        return array.view(np.uint16) if bfloat16 else array  # type: ignore[no-any-return]
    return np.ascontiguousarray(array)


class _Enough(BaseException):
    """Raised between two programs to end a launch; no ``Exception``, which the interpreter would wrap."""


class Watch:
    """Watches one launch. Afterwards ``programs`` and ``grid`` say what it did."""

    def __init__(self, buffers: Sequence[Buffer], kernel: SourceText, file: str, max_programs: int = MAX_PROGRAMS):
        """``file``: the kernel's, as Python names it in a frame."""
        self._buffers = sorted(buffers, key=lambda buffer: buffer.start)
        self._starts = np.array([buffer.start - GUARD for buffer in self._buffers], np.int64)
        self._file = file
        self._lines = range(kernel.line, kernel.line + kernel.text.count("\n") + 1)
        self._max_programs = max_programs
        self._lanes = 0
        self._open: list[tuple[tuple[int, int, int], list[Access], list[str]]] = []
        self.grid: tuple[int, int, int] | None = None

    @property
    def programs(self) -> tuple[Program, ...]:
        return tuple(Program(pid, tuple(accesses), tuple(outside)) for pid, accesses, outside in self._open)

    @property
    def num_programs(self) -> int:
        """Of the launch, interpreted or not."""
        return int(np.prod(self.grid)) if self.grid else 0

    def kernel(self, real: Any) -> Any:
        """Stands in for a :class:`~mrv2lab.ops._op.Jit`: what an op launches through it is ``real``, watched."""
        return _Watched(self, real)

    def launch(self, real: Any, grid: tuple[int, ...], args: Any, kwargs: Any) -> None:
        if self.grid is not None:
            raise LensError("this op launches two kernels; the lens shows ops of one launch")
        x, y, z = (*grid, 1, 1)[:3]
        self.grid = (int(x), int(y), int(z))
        try:
            with self._attached():
                real[grid](*args, **kwargs)
        except _Enough:
            pass
        except Exception as error:
            cause = error.__cause__ or error
            where = f"program {self._open[-1][0]}" if self._open else "its first program"
            raise LensError(f"the kernel raised in {where}: {type(cause).__name__}: {cause}") from error

    @contextmanager
    def _attached(self) -> Iterator[None]:
        from triton.runtime import interpreter

        builder = interpreter.interpreter_builder
        before, thread = dict(vars(builder)), threading.get_ident()

        def hook(name: str, watched: Any) -> None:
            original = getattr(builder, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                # Somebody else's kernel may be interpreted in another thread, outside of our ops.
                mine = threading.get_ident() == thread
                return watched(original, *args, **kwargs) if mine else original(*args, **kwargs)

            setattr(builder, name, call)

        try:
            hook("set_grid_idx", self._begin)
            hook("create_masked_load", self._load)
            hook("create_masked_store", self._store)
            for name, position in ATOMICS.items():
                if hasattr(builder, name):
                    hook(name, self._atomic(position))
            yield
        finally:
            vars(builder).clear()
            vars(builder).update(before)

    # -- hooks --------------------------------------------------------------------------------------------------------
    def _begin(self, original: Any, x: int, y: int, z: int) -> None:
        if len(self._open) == self._max_programs or self._lanes > MAX_LANES:
            raise _Enough
        self._open.append(((x, y, z), [], []))
        original(x, y, z)

    def _load(self, original: Any, ptrs: Any, mask: Any, *rest: Any, **kwargs: Any) -> Any:
        mask, touched = self._admit("load", ptrs, mask)
        self._log("load", touched)
        return original(ptrs, mask, *rest, **kwargs)

    def _store(self, original: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **kwargs: Any) -> Any:
        mask, touched = self._admit("store", ptrs, mask)
        before = [buffer.shown(index) for buffer, index in touched]
        result = original(ptrs, value, mask, *rest, **kwargs)
        self._log("store", touched, before)
        return result

    def _atomic(self, position: int | None) -> Any:
        """An atomic operation is a load and a store of the same elements."""

        def watched(original: Any, *args: Any, **kwargs: Any) -> Any:
            ptrs = args[0] if position is None else args[1]
            mask, touched = self._admit("store", ptrs, None if position is None else args[position])
            if position is None and sum(len(index) for _, index in touched) < np.size(ptrs.data):
                raise LensError(self._open[-1][2][-1])  # a compare-and-swap has no mask with which to drop a lane
            args = args if position is None else (*args[:position], mask, *args[position + 1 :])
            self._log("load", touched)
            before = [buffer.shown(index) for buffer, index in touched]
            result = original(*args, **kwargs)
            self._log("store", touched, before)
            return result

        return watched

    # -- addresses -> elements ----------------------------------------------------------------------------------------
    def _admit(self, kind: str, ptrs: Any, mask: Any) -> tuple[Any, list[tuple[Buffer, Array]]]:
        """Which elements the active lanes touch; the mask without the lanes that lie outside every buffer."""
        shape = np.shape(ptrs.data)
        addresses = np.asarray(ptrs.data).reshape(-1).astype(np.int64)
        active = np.ones(shape, bool) if mask is None else np.broadcast_to(np.asarray(mask.data, bool), shape)
        lanes = np.flatnonzero(active)
        at = addresses[lanes]
        owner = np.searchsorted(self._starts, at, side="right") - 1
        inside = np.zeros(len(lanes), bool)
        touched: list[tuple[Buffer, Array]] = []
        for number in dict.fromkeys(owner.tolist()):
            buffer = self._buffers[max(number, 0)]
            mine = (owner == number) & (at >= buffer.start) & (at + buffer.itemsize <= buffer.end)
            if mine.any():
                inside |= mine
                touched.append((buffer, (at[mine] - buffer.start) // buffer.itemsize))
        if not inside.all():
            self._open[-1][2].append(self._in_words(kind, at[~inside], owner[~inside]))
            if mask is not None:
                kept = np.zeros(addresses.shape, bool)
                kept[lanes[inside]] = True
                mask = copy.copy(mask)
                mask.data = kept.reshape(shape)
        return mask, touched

    def _in_words(self, kind: str, at: Array, owner: Array) -> str:
        pid, line = self._open[-1][0], self._line()
        buffer = self._buffers[max(int(owner[0]), 0)]
        text = f"program {pid} {kind}s "
        text += "from " if kind == "load" else "to "
        if buffer.start - GUARD <= at[0] < buffer.end + GUARD:
            text += f"{buffer.name}[{(int(at[0]) - buffer.start) // buffer.itemsize}], "
            text += f"outside its {buffer.bits.size:,} elements"
        else:
            text += "an address that belongs to no argument"
        text += f" (line {line})" if line else ""
        return text + (f", and {len(at) - 1} more lanes do" if len(at) > 1 else "")

    def _log(self, kind: str, touched: list[tuple[Buffer, Array]], before: list[Array] | None = None) -> None:
        line = self._line()
        for i, (buffer, index) in enumerate(touched):
            self._lanes += len(index)
            old = before[i] if before is not None else None
            self._open[-1][1].append(Access(kind, buffer.name, index, buffer.shown(index), old, line))

    def _line(self) -> int | None:
        """Where the kernel stands: the innermost frame within its own lines, so a helper's access is its call's."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename == self._file and frame.f_lineno in self._lines:
                return frame.f_lineno
            frame = frame.f_back
        return None


class _Watched:
    def __init__(self, watch: Watch, real: Any) -> None:
        self._watch = watch
        self._real = real

    def load(self, interpret: bool = False) -> Any:
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self._watch.launch(self._real, grid, args, kwargs)


def missing_hooks() -> list[str]:
    """Hooks that the installed Triton's interpreter lacks."""
    from triton.runtime import interpreter

    builder = getattr(interpreter, "interpreter_builder", None)
    return [name for name in HOOKS if not hasattr(builder, name)]
