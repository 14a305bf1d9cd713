"""Host memory that kernels read in place: one buffer, and a round-robin pool of them.

Counterparts in vLLM: ``UvaBuffer`` and ``UvaBufferPool`` in ``v1/worker/gpu/buffer_utils.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mrv2lab.runtime.base import Runtime

NUMPY_DTYPES: dict[torch.dtype, Any] = {
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float32: np.float32,
}
"""Dtypes that host tables and staged writes carry."""


def next_power_of_2(n: int) -> int:
    """The least power of two that is >= n (1 for n <= 1)."""
    return 1 << max(n - 1, 0).bit_length()


class UvaBuffer:
    """One page-locked tensor with a NumPy view ``np`` for the host; kernels take the tensor ``gpu`` itself.

    Safe by nothing: the host must not write what a queued kernel has yet to read.
    """

    def __init__(self, rt: Runtime, shape: int | tuple[int, ...], dtype: torch.dtype, name: str) -> None:
        self.gpu = rt.empty(shape, dtype, name=name, place="uva")
        self.np: np.ndarray[Any, Any] = self.gpu.numpy()
        self.np.fill(0)


class UvaBufferPool:
    """``depth`` UVA buffers, used in turn: each publish goes to the next slot.

    Safe while no more than ``depth`` steps are in flight, each publishes at most once, and somebody waits for the
    output of a step before the step ``depth`` later begins. A slot that is too small is replaced by the next power of
    two; the old one is kept for ``depth`` more publishes, since a queued kernel may still read it.
    """

    def __init__(self, rt: Runtime, shape: int | tuple[int, ...], dtype: torch.dtype, depth: int, name: str) -> None:
        if depth < 1:
            raise ValueError(f"a pool needs at least one slot, got depth {depth}")
        self.rt = rt
        self.dtype = dtype
        self.name = name
        self.slots = [UvaBuffer(rt, shape, dtype, f"{name}.uva{i}") for i in range(depth)]
        self._retired: list[tuple[int, UvaBuffer]] = []
        self._published = 0

    def copy_to_uva(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        """Write ``values`` into the next slot, now; returns the slot's first ``len(values)`` elements for kernels."""
        slot = self._write(values)
        return slot.gpu if len(values) == len(slot.np) else slot.gpu[: len(values)]

    def copy_rows(self, values: np.ndarray[Any, Any]) -> torch.Tensor:
        """Write ``values`` into the first rows of the next slot, now; returns the whole slot."""
        return self._write(values).gpu

    def _write(self, values: np.ndarray[Any, Any]) -> UvaBuffer:
        index = self._published % len(self.slots)
        self._published += 1
        slot = self.slots[index]
        if self._retired:
            self._retired = [old for old in self._retired if old[0] > self._published]
        if len(values) > len(slot.np):
            self._retired.append((self._published + len(self.slots), slot))
            shape = (next_power_of_2(len(values)), *slot.np.shape[1:])
            slot = self.slots[index] = UvaBuffer(self.rt, shape, self.dtype, f"{self.name}.uva{index}")
        self.rt.publish(slot.gpu, values)
        return slot
