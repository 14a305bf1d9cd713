"""Programmatic dependent launch: a kernel starts while the one in front of it still runs, and waits inside.

Between two small kernels of one stream the GPU idles for about a microsecond. A kernel that is launched with Triton's
``launch_pdl`` may begin as soon as every program of its predecessor has said so (:func:`let_next_start`) or has ended.
It then reads what no kernel writes, its weights, and waits (:func:`wait_for_previous`) before it touches anything else.
A kernel that waits has a predecessor that waited, so at most the reading of weights ever runs ahead.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization". Compute capability 9.0 on.
"""

from __future__ import annotations

from typing import Any

from mrv2lab.ops._op import jit

tl: Any = None

LINE = 128
"""Bytes of a cache line."""

_ON: dict[str, bool] = {"PDL": True, "launch_pdl": True}
_OFF: dict[str, bool] = {"PDL": False}
_capable: dict[int | None, bool] = {}


class _HeldBack:
    """A context of two additions: a decoder enters it for every segment of a large step."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


_held_back = _HeldBack()


def early_start(tensor: Any) -> dict[str, bool]:
    """Launch options for a kernel that waits: on where ``tensor``'s device can do it, off elsewhere (interpreter too).

    A kernel launched with them must call :func:`wait_for_previous` in every program.
    """
    if _held_back.depth or not tensor.is_cuda:
        return _OFF
    index = tensor.device.index
    if index not in _capable:
        import torch

        _capable[index] = torch.cuda.get_device_capability(index) >= (9, 0)
    return _ON if _capable[index] else _OFF


def without_early_start() -> _HeldBack:
    """Inside the ``with`` every launch waits for its predecessor's end: where early starts do not pay, for measurements
    and comparisons. Reentrant; for the one thread that launches."""
    return _held_back


@jit
def let_next_start(PDL: tl.constexpr):
    """The next kernel may be scheduled beside this one."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@jit
def wait_for_previous(PDL: tl.constexpr):
    """Everything that the previous kernel wrote is visible behind this."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@jit
def prefetch(pointers):
    """Ask for the cache lines at ``pointers`` to be brought into L2. Compiled kernels only."""
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
