"""Transfer policies: how host arrays reach the device while earlier steps may still read the previous ones.

| policy        | per-step array (:class:`Upload`)                   | per-request table (:class:`Table`)             |
|---------------|----------------------------------------------------|------------------------------------------------|
| `unsafe`      | one pinned buffer, rewritten each step             | the truth itself is pinned, copied each publish|
| `barrier`     | as `unsafe`, behind an event the host waits for    | as `unsafe`, behind the same event             |
| `pinned_copy` | a pinned temporary each time                       | pageable truth, a pinned temporary each publish|
| `uva_pool`    | a pinned temporary each time (arrays), or a slot of| pageable truth, a slot of a UVA pool each      |
|               | a UVA pool (staged diffs)                          | publish, read in place                         |

`barrier` is vLLM V1, `pinned_copy` MRV2's design document, `uva_pool` vLLM today. `unsafe` is the bug itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from mrv2lab.runtime.base import Runtime, Shape
from mrv2lab.runtime.uva import NUMPY_DTYPES, UvaBufferPool, next_power_of_2

Array = np.ndarray[Any, Any]


class Upload(ABC):
    """A named host array that is sent anew each time, of changing length."""

    @abstractmethod
    def send(self, values: Array) -> torch.Tensor:
        """Make ``values`` (1-D) readable by kernels queued from now on; returns a tensor of their length."""

    def send_whole(self, values: Array) -> torch.Tensor:
        """Like :meth:`send`; returns a tensor that may be longer, where that saves a view (1 to 2 us)."""
        return self.send(values)


class Table(ABC):
    """A host table: ``np`` is the truth that the host writes, inside ``prepare``; ``gpu`` is what kernels read.

    ``gpu`` may be another tensor after each publish (`uva_pool`), so take it anew at every launch.
    """

    np: Array
    gpu: torch.Tensor

    @abstractmethod
    def publish(self, rows: int | None = None) -> None:
        """Make the present truth readable by kernels queued from now on, or its first ``rows`` rows: what lies behind
        them in ``gpu`` is unspecified then. At most once a step."""


class TransferPolicy(ABC):
    """Makes uploads and tables for one runtime. ``depth`` = the most steps in flight."""

    name: str

    def __init__(self, rt: Runtime, depth: int = 2) -> None:
        self.rt = rt
        self.depth = depth

    @abstractmethod
    def upload(self, name: str, size: int, dtype: torch.dtype) -> DeviceUpload:
        """An array of at most ``size`` elements, into device memory at a fixed address."""

    def staging(self, name: str, size: int, dtype: torch.dtype) -> Upload:
        """An array of staged diffs; grows past ``size`` if it must."""
        return self.upload(name, size, dtype)

    @abstractmethod
    def table(self, name: str, shape: Shape, dtype: torch.dtype) -> Table:
        """A table of fixed shape, zero at first."""

    @contextmanager
    def prepare(self) -> Iterator[None]:
        """Around everything of a step that writes host buffers; only `barrier` waits here."""
        yield


class DeviceUpload(Upload):
    """Into a device buffer at a fixed address; grows to the next power of two.

    Two ways to send: :meth:`send` takes the values; or the caller fills ``np`` in place and calls :meth:`send_first`.
    """

    np: Array
    """[size] host array for :meth:`send_first`: the pinned source itself, or what is copied into a temporary."""

    def __init__(self, rt: Runtime, name: str, size: int, dtype: torch.dtype) -> None:
        self.rt = rt
        self.name = name
        self.dtype = dtype
        self.longest = 0
        """Elements of the array that it has grown for last; 0: it never had to."""
        self._grow(max(size, 1))

    def _grow(self, size: int) -> None:
        self.size = size
        self.device = self.rt.zeros(size, self.dtype, name=self.name)
        self._first = self.device

    def first(self, n: int) -> torch.Tensor:
        """The first ``n`` elements of ``device``. The view is kept, since steps in a row ask for the same one."""
        if len(self._first) != n:
            self._first = self.device[:n]
        return self._first

    @abstractmethod
    def pinned(self, size: int) -> torch.Tensor:
        """The pinned source of the next copy."""

    def send(self, values: Array) -> torch.Tensor:
        """See :meth:`Upload.send`."""
        n = len(values)
        if n > self.size:
            self.longest = n
            self._grow(next_power_of_2(n))
        source = self.pinned(n)
        self.rt.publish(source, values)
        target = self.first(n)
        self.rt.h2d(target, source if len(source) == n else source[:n])
        return target

    def send_whole(self, values: Array) -> torch.Tensor:
        """See :meth:`Upload.send_whole`: all of the device buffer."""
        self.send(values)
        return self.device

    def send_first(self, n: int) -> torch.Tensor:
        """Send the first ``n`` elements of ``np``; returns a tensor of that length. ``n`` is at most ``size``."""
        return self.send(self.np[:n])


class _StaticUpload(DeviceUpload):
    """From one pinned buffer that every step rewrites."""

    def _grow(self, size: int) -> None:
        super()._grow(size)
        self._pinned = self.rt.empty(size, self.dtype, name=f"{self.name}.pinned", place="pinned")
        self.np = self._pinned.numpy()

    def pinned(self, size: int) -> torch.Tensor:
        """See :meth:`DeviceUpload.pinned`."""
        return self._pinned

    def send_first(self, n: int) -> torch.Tensor:
        """See :meth:`DeviceUpload.send_first`. The values are in the source already."""
        target = self.first(n)
        self.rt.h2d(target, self._pinned if n == self.size else self._pinned[:n])
        return target


class _TemporaryUpload(DeviceUpload):
    """From a pinned temporary; the queued copy keeps it alive (CUDA: the caching host allocator does)."""

    def _grow(self, size: int) -> None:
        super()._grow(size)
        self.np = torch.empty(size, dtype=self.dtype).numpy()

    def pinned(self, size: int) -> torch.Tensor:
        """See :meth:`DeviceUpload.pinned`."""
        return self.rt.empty(size, self.dtype, name=f"{self.name}.tmp", place="pinned")


class _PoolUpload(Upload):
    """Through a slot of a UVA pool, read in place."""

    def __init__(self, rt: Runtime, name: str, size: int, dtype: torch.dtype, depth: int) -> None:
        self._pool = UvaBufferPool(rt, max(size, 1), dtype, depth, name)

    def send(self, values: Array) -> torch.Tensor:
        """See :meth:`Upload.send`."""
        return self._pool.copy_to_uva(values)

    def send_whole(self, values: Array) -> torch.Tensor:
        """See :meth:`Upload.send_whole`."""
        return self._pool.copy_rows(values)


class _CopiedTable(Table):
    """Copied into device memory at each publish, whole or its first rows."""

    def __init__(self, rt: Runtime, name: str, shape: Shape, dtype: torch.dtype, pinned_truth: bool) -> None:
        self.rt = rt
        self.name = name
        self._pinned_truth = pinned_truth
        self.host = rt.empty(shape, dtype, name=f"{name}.host", place="pinned" if pinned_truth else "host")
        self.np = self.host.numpy()
        self.np.fill(0)
        self.gpu = rt.zeros(shape, dtype, name=name)
        self._rows = self.gpu

    def publish(self, rows: int | None = None) -> None:
        """See :meth:`Table.publish`."""
        source, target = self.host, self.gpu
        if rows is not None and rows < len(self.np):
            if len(self._rows) != rows:
                self._rows = self.gpu[:rows]
            source, target = source[:rows], self._rows
        if not self._pinned_truth:
            values = self.np if rows is None else self.np[:rows]
            source = self.rt.empty(tuple(source.shape), source.dtype, name=f"{self.name}.tmp", place="pinned")
            self.rt.publish(source, values)
        self.rt.h2d(target, source)


class _PooledTable(Table):
    """Each publish is a snapshot in the next slot of a UVA pool."""

    def __init__(self, rt: Runtime, name: str, shape: Shape, dtype: torch.dtype, depth: int) -> None:
        self.np = np.zeros(shape, NUMPY_DTYPES[dtype])
        self._pool = UvaBufferPool(rt, shape, dtype, depth, name)
        self.gpu = self._pool.slots[-1].gpu

    def publish(self, rows: int | None = None) -> None:
        """See :meth:`Table.publish`."""
        self.gpu = self._pool.copy_to_uva(self.np) if rows is None else self._pool.copy_rows(self.np[:rows])


class Unsafe(TransferPolicy):
    """One pinned buffer an array and nobody waits: wrong as soon as the host is a step ahead."""

    name = "unsafe"

    def upload(self, name: str, size: int, dtype: torch.dtype) -> DeviceUpload:
        """See :meth:`TransferPolicy.upload`."""
        return _StaticUpload(self.rt, name, size, dtype)

    def table(self, name: str, shape: Shape, dtype: torch.dtype) -> Table:
        """See :meth:`TransferPolicy.table`."""
        return _CopiedTable(self.rt, name, shape, dtype, pinned_truth=True)


class Barrier(Unsafe):
    """V1: the host waits until the previous step's copies are done before it writes the buffers again."""

    name = "barrier"

    def __init__(self, rt: Runtime, depth: int = 2) -> None:
        super().__init__(rt, depth)
        self.event = rt.event("prepare_inputs")
        """Recorded behind a step's copies; V1 waits for it with its own context manager."""

    @contextmanager
    def prepare(self) -> Iterator[None]:
        """See :meth:`TransferPolicy.prepare`."""
        with self.rt.observer.span("barrier_wait"):
            self.event.synchronize()
        try:
            yield
        finally:
            self.event.record(self.rt.main)


class PinnedCopy(TransferPolicy):
    """The design document: pageable truth, a pinned temporary for each copy, no wait."""

    name = "pinned_copy"

    def upload(self, name: str, size: int, dtype: torch.dtype) -> DeviceUpload:
        """See :meth:`TransferPolicy.upload`."""
        return _TemporaryUpload(self.rt, name, size, dtype)

    def table(self, name: str, shape: Shape, dtype: torch.dtype) -> Table:
        """See :meth:`TransferPolicy.table`."""
        return _CopiedTable(self.rt, name, shape, dtype, pinned_truth=False)


class UvaPool(PinnedCopy):
    """vLLM today: tables and staged diffs through pools of UVA slots, per-step arrays through pinned temporaries."""

    name = "uva_pool"

    def staging(self, name: str, size: int, dtype: torch.dtype) -> Upload:
        """See :meth:`TransferPolicy.staging`."""
        return _PoolUpload(self.rt, name, size, dtype, self.depth)

    def table(self, name: str, shape: Shape, dtype: torch.dtype) -> Table:
        """See :meth:`TransferPolicy.table`."""
        return _PooledTable(self.rt, name, shape, dtype, self.depth)


POLICIES: dict[str, type[TransferPolicy]] = {policy.name: policy for policy in (Unsafe, Barrier, PinnedCopy, UvaPool)}
