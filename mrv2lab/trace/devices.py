"""Which device each piece of work ran on. A device is a number within a rank; in a merged trace, within a process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mrv2lab.trace.trace import DEVICE_KINDS, Trace

Array = np.ndarray[Any, Any]

NO_GPU = "no GPU activity recorded: the file holds no kernel, copy or memset; profile with CUDA activities to see any"


class Device(NamedTuple):
    """One device of a trace."""

    rank: int
    device: int
    """-1: the file does not say."""
    process: str
    """Empty unless the trace is a merged one."""


@dataclass(frozen=True, eq=False)
class DeviceWork:
    """The m pieces of device work of a trace, in order of start."""

    devices: tuple[Device, ...]
    # [m] int64: positions in the trace
    events: Array
    # [m] int64: position in devices
    device: Array

    def of(self, device: int) -> Array:
        """[k] int64: the positions in the trace of one device's work, in order of start."""
        chosen: Array = self.events[self.device == device]
        return chosen


def device_work(trace: Trace) -> DeviceWork:
    """Kernels, copies, memsets and whole graphs, by device."""
    merged = trace.info.producer == "merged"
    of_lane = [Device(lane.rank, lane.device, lane.process if merged else "") for lane in trace.lanes]
    events = np.flatnonzero(trace.mask(*DEVICE_KINDS))
    devices = tuple(sorted({of_lane[lane] for lane in np.unique(trace.lane[events])}))
    place = np.array([devices.index(device) if device in devices else -1 for device in of_lane] or [-1], np.int64)
    return DeviceWork(devices, events, place[trace.lane[events]])
