"""Bugs on the way between host and device: buffers written while a copy of them is queued, outputs read before theirs.

All of them are right while the device keeps up with the host, which is why they survive tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mrv2lab.memory.uva_backed import UvaBackedTensor
from mrv2lab.runner.async_output import AsyncOutput, OutputRing
from mrv2lab.runtime.transfer import Barrier, DeviceUpload, PinnedCopy, Unsafe, _TemporaryUpload
from mrv2lab.runtime.uva import UvaBufferPool
from mrv2lab.teach.mutants.mutant import Patch, mutant


@mutant(
    "mrv2",
    "twin",
    "race",
    breaks="Every pool of host buffers has one slot, though two steps are in flight (vLLM #53057): the next step's "
    "tables are read by the step before.",
)
def pool_depth_1(patch: Patch) -> None:
    def make(original: Any, self: Any, rt: Any, shape: Any, dtype: Any, depth: int, name: str) -> None:
        original(self, rt, shape, dtype, 1, name)

    patch.around(UvaBufferPool, "__init__", make)


@mutant(
    "mrv2",
    "twin",
    "race",
    breaks="Per-step arrays are copied from one pinned buffer that every step rewrites (vLLM #32799), not from a "
    "temporary.",
)
def one_staging_buffer(patch: Patch) -> None:
    def pinned(original: Any, self: DeviceUpload, size: int) -> torch.Tensor:
        kept: torch.Tensor | None = vars(self).get("_kept")
        if kept is None or len(kept) < size:
            kept = vars(self)["_kept"] = original(self, self.size)
        assert kept is not None
        return kept

    patch.around(_TemporaryUpload, "pinned", pinned)


@mutant(
    "mrv2",
    "race",
    breaks="The host's own table is pinned and copied from directly: what the host changes for the next step is in it. "
    "Only rows that find a new owner in two steps running show it in the text, so a twin rarely does.",
    transfer="pinned_copy",
)
def table_copied_in_place(patch: Patch) -> None:
    patch.set(PinnedCopy, "table", Unsafe.table)


@mutant(
    "mrv2",
    "twin",
    "race",
    breaks="Nobody waits at the barrier, so buffers are rewritten under the previous step's copies.",
    transfer="barrier",
)
def barrier_not_waited_for(patch: Patch) -> None:
    @contextmanager
    def prepare(self: Barrier) -> Iterator[None]:
        yield

    patch.set(Barrier, "prepare", prepare)


@mutant(
    "mrv2",
    "twin",
    "race",
    breaks="The barrier's event is recorded in front of the step's copies: it protects the step before.",
    transfer="barrier",
)
def barrier_recorded_early(patch: Patch) -> None:
    @contextmanager
    def prepare(self: Barrier) -> Iterator[None]:
        self.event.synchronize()
        self.event.record(self.rt.main)
        yield

    patch.set(Barrier, "prepare", prepare)


@mutant(
    "mrv2",
    "twin",
    "recording",
    breaks="Tables that the host changed are not sent: kernels read what was published last, or zeros.",
)
def publish_forgotten(patch: Patch) -> None:
    patch.set(UvaBackedTensor, "publish", lambda self: None)


@mutant(
    "mrv2",
    "twin",
    breaks="Tokens are read on the host before the event behind their copy (vLLM #36942): those of an older step come.",
)
def output_read_before_its_event(patch: Patch) -> None:
    def get_output(original: Any, self: AsyncOutput) -> Any:
        slot = self._slot
        assert slot is not None
        event, slot.copied = slot.copied, _Done()  # type: ignore[assignment]
        try:
            return original(self)
        finally:
            slot.copied = event

    def make(original: Any, self: OutputRing, i: int, rows: int, width: int) -> Any:
        slot = original(self, i, rows, width)
        slot.sampled_np.fill(0)  # nothing was ever there
        slot.num_sampled_np.fill(0)
        return slot

    patch.around(AsyncOutput, "get_output", get_output)
    patch.around(OutputRing, "_make", make)


@mutant(
    "mrv2",
    "twin",
    breaks="The copy stream does not wait for the sampler: it copies the tokens that lay in the buffer before.",
)
def copy_before_sampling(patch: Patch) -> None:
    def send(original: Any, self: OutputRing, slot: Any, *rest: Any) -> Any:
        ready, slot.ready = slot.ready, self.rt.event("nothing")
        original_record = slot.ready.record
        slot.ready.record = lambda stream: original_record(self.rt.copy)
        try:
            return original(self, slot, *rest)
        finally:
            slot.ready = ready

    patch.around(OutputRing, "send", send)


@mutant(
    "mrv2",
    "twin",
    breaks="All steps share one output buffer, so that a fast device overwrites tokens that nobody has fetched yet.",
    lag=0,
)
def one_output_buffer(patch: Patch) -> None:
    def take(original: Any, self: OutputRing) -> Any:
        self._slots[0].owner = None
        self._next = 0
        return original(self)

    patch.around(OutputRing, "take", take)


class _Done:
    """An event that says that it is over."""

    def synchronize(self) -> None:
        """Return at once."""
