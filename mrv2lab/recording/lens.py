"""One call of an operation, taken apart: what its spec and its kernel did, program by program. Values only, no torch.

``recorder.lens`` makes them with Triton's interpreter, ``widgets.kernel_lens`` shows them. An argument that is a tuple
of arrays appears as one buffer each: ``tables[0]``, ``tables[1]``. All indices are flat and row-major.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

MAX_PROGRAMS = 64
"""How many programs of a launch are interpreted; the rest are left out, and the run says so."""
MAX_ELEMENTS = 1 << 22
"""Of one argument: all_token_ids of 1,024 rows of 4,096 tokens."""
MAX_LANES = 1 << 18
"""Elements that the programs of one run load and store together, before interpreting stops."""


class LensError(ValueError):
    """This call cannot be looked into; the message says why and what would help."""


@dataclass(frozen=True)
class SourceText:
    """A function as it stands in its file."""

    file: str
    """Below the package, e.g. ``mrv2lab/ops/apply_write.py``."""
    line: int
    """Number of the first line of ``text``."""
    text: str


@dataclass(frozen=True)
class Access:
    """One load or store of one program: the lanes that its mask lets through, in lane order."""

    kind: str
    """``load`` or ``store``."""
    buffer: str
    # [k] int64
    index: Array
    # [k], dtype of the buffer (bfloat16 as float32): what was loaded, or what the cells hold after the store
    values: Array
    # [k], stores only: what the cells held
    before: Array | None = None
    line: int | None = None
    """Line of the kernel in its file; None where it is not known."""


@dataclass(frozen=True)
class Program:
    """One program of the launch grid."""

    pid: tuple[int, int, int]
    accesses: tuple[Access, ...] = ()
    """In the order in which the program made them."""
    outside: tuple[str, ...] = ()
    """Accesses outside every argument, in words. They were dropped: such a load gave 0, such a store wrote nothing."""

    @property
    def loads(self) -> list[Access]:
        return [access for access in self.accesses if access.kind == "load"]

    @property
    def stores(self) -> list[Access]:
        return [access for access in self.accesses if access.kind == "store"]


@dataclass(frozen=True)
class Difference:
    """The first cell, in the order of the parameters, in which kernel and spec differ."""

    buffer: str
    index: tuple[int, ...]
    expected: Any
    """What the spec left there."""
    got: Any
    """What the kernel left there."""
    count: int
    """How many cells differ, in all buffers."""
    largest: float | None = None
    """Greatest absolute difference where all differing cells are floating-point, else None."""

    def __str__(self) -> str:
        cell = f"{self.buffer}[{', '.join(map(str, self.index))}]"
        text = f"{cell} is {_said(self.got)} by the kernel and {_said(self.expected)} by the spec"
        if self.count > 1:
            text += f"; {self.count:,} cells differ"
            text += f", by at most {self.largest:.3g}" if self.largest is not None else ""
        return text


@dataclass(frozen=True)
class LensRun:
    """What spec and kernel of ``op`` did with the same arguments."""

    op: str
    phase: str
    """Of the step; empty for a call that belongs to none."""
    doc: str
    params: tuple[str, ...]
    inputs: dict[str, Any]
    """Every buffer (a copy) and scalar before the call, in the order of ``params``."""
    writes: tuple[str, ...]
    """Buffers that the op says it writes."""
    expected: dict[str, Array]
    """The written buffers after the spec."""
    spec: SourceText
    kernel: SourceText
    launcher: SourceText
    after: dict[str, Array] = field(default_factory=dict)
    """The written buffers after the kernel, or after those of its programs that were interpreted."""
    pointers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Pointer tables: whose addresses they hold. Their elements appear as 0, 1, .. in ``inputs`` and accesses."""
    grid: tuple[int, int, int] | None = None
    """None: the kernel was not launched."""
    programs: tuple[Program, ...] = ()
    difference: Difference | None = None
    missing: str | None = None
    """Why there is a spec only: one sentence. None where the kernel was interpreted."""
    notes: tuple[str, ...] = ()

    @property
    def num_programs(self) -> int:
        """Of the launch, interpreted or not."""
        return int(np.prod(self.grid)) if self.grid else 0

    @property
    def agrees(self) -> bool:
        """Whether every cell that was compared is the same by spec and kernel, bit for bit, and no access was dropped.
        False where no kernel could be run."""
        return self.missing is None and self.difference is None and not any(p.outside for p in self.programs)

    @property
    def verdict(self) -> str:
        """``agrees`` in words."""
        if self.missing is not None:
            return f"Spec only. {self.missing}"
        outside = [text for program in self.programs for text in program.outside]
        if outside:
            text = f"the kernel leaves its arguments: {outside[0]}"
            return f"{text}. And {self.difference}" if self.difference else text
        if self.difference is not None:
            text = f"kernel and spec differ: {self.difference}"
            if self.difference.largest is not None:
                text += " (floating point: a kernel may add and round in another order)"
            return text
        if len(self.programs) < self.num_programs:
            return f"kernel = spec: bit for bit, in every cell that these {len(self.programs)} programs stored"
        return "kernel = spec: bit for bit"


@dataclass(frozen=True)
class LensCalls:
    """The operations of one step that can be looked into, and how."""

    title: str
    calls: Sequence[tuple[str, str]]
    """(phase, op) in the order of the step."""
    run: Callable[[int], LensRun]
    """Trace the call at that index. Raises :class:`LensError`."""
    empty: str = "This step launched no operation that a recording can replay."
    """What to say if ``calls`` is empty."""


def first_difference(
    expected: Mapping[str, Array], got: Mapping[str, Array], where: Mapping[str, Array] | None = None
) -> Difference | None:
    """Compare buffers of equal shapes bit for bit, so that NaN equals itself and 0.0 is not -0.0.

    ``where``: compare only these flat indices of each buffer.
    """
    first: tuple[str, tuple[int, ...], Any, Any] | None = None
    count, largest, floats = 0, 0.0, True
    for name, want in expected.items():
        a, b = want.reshape(-1), got[name].reshape(-1)
        cells = np.flatnonzero(_bits(a) != _bits(b))
        if where is not None:
            cells = np.intersect1d(cells, where.get(name, np.empty(0, np.int64)))
        if not len(cells):
            continue
        count += len(cells)
        if np.issubdtype(want.dtype, np.floating):
            largest = max(largest, float(np.abs(a[cells].astype(float) - b[cells].astype(float)).max()))
        else:
            floats = False
        if first is None:
            at = tuple(int(i) for i in np.unravel_index(cells[0], want.shape))
            first = (name, at, a[cells[0]].item(), b[cells[0]].item())
    return Difference(*first, count, largest if floats else None) if first else None


def _said(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def _bits(flat: Array) -> Array:
    return np.ascontiguousarray(flat).view(f"u{flat.dtype.itemsize}")
