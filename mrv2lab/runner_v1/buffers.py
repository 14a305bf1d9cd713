"""V1's host buffers and the barrier that keeps them safe.

Each array has one pinned host side that every step rewrites, and a device twin of the same size. A copy reads the host
side when the stream reaches it, not when Python queues it, so with two steps in flight the host could overwrite what
the previous step's copy has yet to read. :class:`AsyncBarrier` is V1's answer; the other transfer policies need none.

Counterparts in vLLM: ``CpuGpuBuffer`` in ``v1/utils.py``, ``GPUModelRunner.synchronize_input_prep`` in
``v1/worker/gpu_model_runner.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np
import torch

from mrv2lab.runtime.base import Event, Runtime
from mrv2lab.runtime.transfer import Table, TransferPolicy, UvaPool

BUFFERS: tuple[str, ...] = (
    "block_table",
    "temperature",
    "num_computed_tokens",
    "query_start_loc",
    "discard_request_mask",
    "req_indices",
    "query_pos",
    "num_scheduled_tokens",
    "input_ids",
)
"""Every host buffer that a step rewrites and copies, all KV-cache groups' block tables being one: what
``RunnerConfig.protected`` may name."""

Late = tuple[Callable[..., Any], tuple[Any, ...]]


class AsyncBarrier:
    """``with barrier:`` around everything of a step that writes host buffers.

    On entry the host waits until the previous step's event has passed, on exit the event is recorded on the main
    stream: so what was copied inside has been read before it is written again. The copy of a buffer that is not
    ``protected`` is queued after the record, and with it everything the step queues behind it: right order, no
    protection, which is how buffers have been forgotten in vLLM (``_preprocess``, #28706; sampling arrays, #25279).

    ``event`` None: no barrier (a synchronous loop, or another transfer policy); then nothing here does anything.
    Raises ``ValueError`` for a name that is not in :data:`BUFFERS`.
    """

    def __init__(self, rt: Runtime, event: Event | None, protected: tuple[str, ...] | None = None) -> None:
        unknown = sorted(set(protected or ()) - set(BUFFERS))
        if unknown:
            raise ValueError(f"protected names {unknown[0]!r}, which is no buffer of V1; its buffers: {BUFFERS}")
        self._rt = rt
        self._event = event
        self.unprotected = frozenset(BUFFERS) - set(BUFFERS if event is None or protected is None else protected)
        """Names of the buffers that the barrier forgets."""
        self._late: list[Late] = []

    def __enter__(self) -> None:
        if self._event is not None:
            with self._rt.observer.span("barrier_wait"):
                self._event.synchronize()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._event is not None:
            self._event.record(self._rt.main)
        late, self._late = self._late, []
        if kind is None:
            for fn, args in late:
                fn(*args)

    def copy(self, name: str, fn: Callable[..., Any], *args: Any) -> None:
        """Queue the copy of buffer ``name`` by ``fn(*args)``: now, or after the record where it is not protected."""
        if name in self.unprotected:
            self._late.append((fn, args))
        else:
            fn(*args)

    def then(self, fn: Callable[..., Any], *args: Any) -> None:
        """Queue device work that may read what was copied so far, behind it: now, or after a late copy."""
        if self._late:
            self._late.append((fn, args))
        else:
            fn(*args)

    def reset(self) -> None:
        """Forget copies that a step which broke off left behind."""
        self._late = []


class CpuGpuBuffer:
    """A host array ``np`` that each step fills in place, and its device twin ``gpu`` of the same size."""

    def __init__(
        self, transfers: TransferPolicy, barrier: AsyncBarrier, name: str, size: int, dtype: torch.dtype
    ) -> None:
        self.name = name
        self._barrier = barrier
        self._upload = transfers.upload(name, size, dtype)
        # [size]
        self.np: np.ndarray[Any, Any] = self._upload.np
        # [size], device
        self.gpu = self._upload.device

    def copy_to_gpu(self, n: int) -> None:
        """Queue the copy of the first ``n`` elements."""
        self._barrier.copy(self.name, self._upload.send_first, n)

    def first(self, n: int) -> torch.Tensor:
        """The first ``n`` elements on the device."""
        return self._upload.first(n)


class GuardedTable:
    """A table of the transfer policy whose publish passes the barrier."""

    def __init__(
        self, transfers: TransferPolicy, barrier: AsyncBarrier, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self._buffer = name.partition(".")[0]
        self._barrier = barrier
        self._table: Table = transfers.table(name, shape, dtype)
        self.stays = not isinstance(transfers, UvaPool)
        """Whether ``gpu`` is one tensor for good."""
        self.np: np.ndarray[Any, Any] = self._table.np

    @property
    def gpu(self) -> torch.Tensor:
        """What kernels queued from now on should be given; under ``uva_pool`` another tensor after each publish."""
        return self._table.gpu

    def publish(self, rows: int | None = None) -> None:
        """Make the first ``rows`` rows (None: all) readable by kernels queued from now on."""
        self._barrier.copy(self._buffer, self._table.publish, rows)
