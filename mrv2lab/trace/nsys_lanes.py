"""Processes, threads, streams and correlation ids of an nsys export.

``globalTid`` packs machine (8 bits), virtual machine (8), process (24) and thread (24); ``globalPid`` is the same with
a thread of 0. Correlation ids count within a process.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from mrv2lab.trace.builder import TraceBuilder
from mrv2lab.trace.nsys_tables import NULL, Columns, NsysFile, spread
from mrv2lab.trace.trace import Lane

Array = np.ndarray[Any, Any]

THREAD_MASK = 0xFFFFFF
NO_ID = 0xFFFFFFFF
"""What CUPTI writes for a stream or event that is none."""


class Lanes:
    """Lanes of one file's rows, and correlation ids that are unique in it."""

    def __init__(self, file: NsysFile, builder: TraceBuilder) -> None:
        self._file = file
        self._builder = builder
        processes = file.integers("PROCESSES", ["globalPid"])["globalPid"].tolist()
        names = file.texts("PROCESSES", "name")
        self._names = {key: name for key, name in zip(processes, names, strict=True) if name}
        threads = file.integers("ThreadNames", ["globalTid", "nameId"])
        self._threads = {int(key): file.string(int(name)) for key, name in zip(*threads.values(), strict=True)}
        gpus = file.integers("TARGET_INFO_CUDA_DEVICE", ["pid", "cudaId", "gpuId"])
        # CUDA_VISIBLE_DEVICES renumbers devices a process: every rank may call its own one 0.
        self._gpus = {(int(pid), int(cuda)): int(gpu) for pid, cuda, gpu in zip(*gpus.values(), strict=True)}
        self._scopes: dict[int, int] = {}
        self._contexts: dict[tuple[int, int, int], set[int]] = defaultdict(set)
        self._users: dict[int, set[int]] = defaultdict(set)
        self._device_of: dict[tuple[int, int], int] = {}
        self.devices: set[int] = set()
        """Devices that did any work."""

    def _person(self, global_id: int) -> str:
        """A process for people."""
        return f"{self._names.get(global_id & ~THREAD_MASK, 'process')} {_pid(global_id)}"

    def threads(self, global_tids: Array) -> Array:
        """[n] int64: lanes of host threads."""
        return spread(global_tids, lambda key: self._builder.lane(self._thread(key)))

    def ranges(self, global_tids: Array) -> Array:
        """[n] int64: lanes of ranges that may begin and end anywhere, one a process."""
        return spread(np.where(global_tids == NULL, NULL, global_tids & ~THREAD_MASK), self._ranges)

    def _ranges(self, key: int) -> int:
        name = "NVTX start/end ranges"
        return self._builder.lane(Lane(process_id(key), name, label=f"{self._person(key)}: {name}"))

    def _thread(self, key: int) -> Lane:
        if key == NULL:
            return Lane("", "unknown thread")
        tid = key & THREAD_MASK
        return Lane(process_id(key), str(tid), label=f"{self._person(key)}: {self._threads.get(key, f'thread {tid}')}")

    def note_contexts(self, rows: Columns) -> None:
        """Remember which contexts have a stream, before lanes are made: CUDA numbers streams a context."""
        keys = np.stack([rows[name] for name in ("globalPid", "deviceId", "streamId", "contextId")], axis=1)
        for pid, device, stream, context in np.unique(keys, axis=0).tolist():
            self._contexts[pid, device, stream].add(context)
            self._users[self.device(pid, device)].add(pid)
            self._device_of[pid, context] = device

    def streams(self, rows: Columns, role: str = "stream", suffix: str = "") -> Array:
        """[n] int64: lanes of device streams. ``rows`` has globalPid, deviceId, contextId and streamId."""
        names = ("globalPid", "deviceId", "contextId", "streamId")
        if not len(rows["globalPid"]):
            return np.empty(0, np.int64)
        keys, back = np.unique(np.stack([rows[name] for name in names], axis=1), axis=0, return_inverse=True)
        lanes = [self._builder.lane(self._stream(key, role, suffix)) for key in keys.tolist()]
        return np.array(lanes, np.int64)[back.ravel()]

    def _stream(self, key: list[int], role: str, suffix: str) -> Lane:
        global_pid, cuda_id, context, stream = key
        if role != "stream":
            # CUPTI's synchronisation records know their context alone, and nsys writes device 0 (2026.2).
            cuda_id = self._device_of.get((global_pid, context), cuda_id)
        device = self.device(global_pid, cuda_id)
        if role == "stream":
            self.devices.add(device)
        known = stream not in (NULL, NO_ID)
        thread, label = (str(stream), f"GPU {device} stream {stream}") if known else ("", f"GPU {device}")
        if len(self._contexts[global_pid, cuda_id, stream]) > 1:
            thread, label = f"{thread} of context {context}", f"{label} of context {context}"
        if len(self._users[device]) > 1:
            label += f" of {self._person(global_pid)}"
        return Lane(process_id(global_pid), thread, role, device, stream if known else -1, label=label + suffix)

    def device(self, global_pid: int, cuda_id: int) -> int:
        """Number of a GPU on its machine; the process's own number where the file has no table of them."""
        if cuda_id == NULL:
            return -1
        return self._gpus.get((_pid(global_pid), cuda_id), cuda_id)

    def correlations(self, global_ids: Array, ids: Array) -> Array:
        """[n] int64: ids that are unique in the trace, process included; -1: none."""
        scope = spread(np.where(global_ids == NULL, NULL, global_ids & ~THREAD_MASK), self._scope)
        known = (ids > 0) & (ids < NO_ID)
        return np.where(known, (scope << 32) | np.where(known, ids, 0), -1)

    def _scope(self, process: int) -> int:
        if process == NULL and len(self._scopes) == 1:
            return 0  # old exports name no process, and there is only one
        return self._scopes.setdefault(process, len(self._scopes))


def process_id(global_id: int) -> str:
    """Number of a process; on another virtual machine than the first with that one's."""
    if global_id == NULL:
        return ""
    machine = (global_id >> 48) & 0xFFFF
    return f"{_pid(global_id)}" + (f" of machine {machine}" if machine > 1 else "")


def _pid(global_id: int) -> int:
    return (global_id >> 24) & 0xFFFFFF
