"""The virtual clock of a CPU-only machine: real host time, modelled device time.

Executing deferred work takes the host's own time, which a real device would not cost. So the virtual host clock stands
still while queued work runs, and jumps to a record's modelled end where the host waits for it. Timelines drawn from it
are *modelled* and say so.
"""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class CostModel:
    """Modelled duration of one record: a launch floor, or the bytes it touches over a bandwidth if that is longer.

    The defaults are an H200's: 2 us a kernel, 4.2 TB/s of device memory, 50 GB/s over the bus.
    """

    launch_ns: int = 2_000
    device_bytes_per_ns: float = 4_200.0
    bus_bytes_per_ns: float = 50.0

    def kernel_ns(self, nbytes: int) -> int:
        """A kernel or segment that touches ``nbytes`` of device memory."""
        return max(self.launch_ns, int(nbytes / self.device_bytes_per_ns))

    def copy_ns(self, nbytes: int) -> int:
        """A copy between host and device."""
        return self.launch_ns + int(nbytes / self.bus_bytes_per_ns)


class VirtualClock:
    """``now`` in nanoseconds: host time without the time spent standing in for the device, plus modelled waits."""

    def __init__(self) -> None:
        self._offset = 0
        self._frozen_at: int | None = None

    def now(self) -> int:
        """Virtual host time."""
        return (time.perf_counter_ns() if self._frozen_at is None else self._frozen_at) + self._offset

    def freeze(self) -> bool:
        """Stop the clock while queued work runs; False if it stood already."""
        if self._frozen_at is not None:
            return False
        self._frozen_at = time.perf_counter_ns()
        return True

    def thaw(self) -> None:
        """Let the clock go on from where it stood."""
        assert self._frozen_at is not None
        self._offset -= time.perf_counter_ns() - self._frozen_at
        self._frozen_at = None

    def wait_until(self, moment: int) -> int:
        """The host waits for a modelled moment; returns the nanoseconds waited (0 if it has passed)."""
        waited = max(0, moment - self.now())
        self._offset += waited
        return waited
