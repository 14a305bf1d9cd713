"""Record a run without changing it: ``with Recorder(engine) as rec: ...`` and then ``rec.recording``.

Nothing is waited for between the start and the end of a recording, and nothing is read from the device. Two moments
synchronise: entering (a keyframe of the integer state and the first clock anchor are taken from an idle device) and
leaving (the last anchor). After ``engine.reset()`` the next step begins with another keyframe, which synchronises too.
"""

from __future__ import annotations

import dataclasses
import platform
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from mrv2lab import __version__
from mrv2lab.bench.machine import installed
from mrv2lab.engine.engine import Engine
from mrv2lab.recorder.listen import Listener, RawStep
from mrv2lab.recorder.probes import Probes
from mrv2lab.recorder.store import Store
from mrv2lab.recording.recording import Recording
from mrv2lab.recording.schema import Header
from mrv2lab.recording.write import RecordingWriter
from mrv2lab.runner.async_output import AsyncOutput
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.runtime.stamps import ClockFit


class Recorder:
    """Attaches to ``engine`` in a ``with`` and detaches always. One at a time an engine, and once each.

    ``path``: write a file as the run goes; its steps do not stay in memory. ``check_every``: steps between two device
    checksums of the integer state, 0 = none. ``top_k``: logits kept a row; copying them is work that the engine does
    not do by itself. ``device_times``: what gets a timing event: ``"launches"``, ``"phases"`` or ``"none"``; ``"auto"``
    stamps every launch on a software stream, where it is free, and phases on a GPU, where an event costs as much as a
    launch.
    ``call_sites``: whether marks know their caller's line.

    Raises ``RuntimeError`` when the engine is being recorded already or was closed, ``ValueError`` for arguments out of
    range and for an engine with the V1 runner.
    """

    def __init__(
        self,
        engine: Engine,
        path: str | Path | None = None,
        *,
        check_every: int = 16,
        top_k: int = 0,
        device_times: Literal["auto", "launches", "phases", "none"] = "auto",
        call_sites: bool = True,
    ) -> None:
        if engine.config.runner.runner != "mrv2":
            raise ValueError(
                f"a recording holds MRV2's rows, and this engine's runner is {engine.config.runner.runner!r}; record "
                "with runner='mrv2', or listen to V1 with an EventLog"
            )
        vocab = engine.config.model.vocab_size
        if not 0 <= top_k <= vocab:
            raise ValueError(f"top_k must lie between 0 (no logits) and the vocabulary's {vocab}, got {top_k}")
        if check_every < 0:
            raise ValueError(f"check_every must be 0 (no checks) or a number of steps, got {check_every}")
        if device_times not in ("auto", "launches", "phases", "none"):
            raise ValueError(f"device_times must be 'auto', 'launches', 'phases' or 'none', got {device_times!r}")
        if device_times == "auto":
            device_times = "launches" if isinstance(engine.rt, CpuRuntime) else "phases"
        self.engine = engine
        self.path = Path(path) if path is not None else None
        self.top_k = top_k
        self.check_every = check_every
        self.device_times = device_times
        self.call_sites = call_sites
        self.listener: Listener | None = None
        """The observer while the ``with`` lasts."""
        self._store: Store | None = None

    # -- begin ---------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        engine, rt = self.engine, self.engine.rt
        if isinstance(engine.observer, Listener):
            raise RuntimeError(
                "this engine is being recorded already; leave that Recorder, or close the explorer on the engine, first"
            )
        if self._store is not None:
            raise RuntimeError("a Recorder records once; make a new one")
        engine._refuse_if_closed()
        self._before = engine.observer
        self.stamps = rt.stamps()
        probes = Probes(engine, self.check_every, self.top_k)
        probes.prime()
        self.stamps.start()
        self._tables: dict[str, np.ndarray[Any, Any]] | None = self._read_tables()
        self._core = engine.core
        recording = Recording(self._header(), title=self.path.name if self.path else "recording in memory")
        writer = RecordingWriter(self.path, recording.header) if self.path is not None else None
        decode = engine.tokenizer.decode if engine.tokenizer is not None else None
        self._store = Store(recording, writer, probes, self.stamps, decode)
        self.listener = Listener(
            engine,
            self.stamps,
            probes,
            self._keyframe,
            self._store.add,
            call_sites=self.call_sites,
            device_times=self.device_times,
        )
        self.listener.recorder = self
        engine.observer = self.listener
        return self

    def _header(self) -> Header:
        engine, rt = self.engine, self.engine.rt
        modelled = isinstance(rt, CpuRuntime)
        versions = {"mrv2lab": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
        triton = installed("triton")
        return Header(
            mode="record",
            runner=engine.config.runner.runner,
            device="cpu" if modelled else torch.cuda.get_device_name(rt.device),
            modelled=modelled,
            config=dataclasses.asdict(engine.config),
            backend=rt.backend,
            tables={
                name: (tuple(table.shape), str(table.dtype).removeprefix("torch."))
                for name, table in engine.worker.runner.tables().items()
            },
            epoch_host_ns=rt.now(),
            epoch_unix_ns=time.time_ns(),
            versions=versions | ({"triton": triton} if triton else {}),
            machine={"platform": f"{platform.system()} {platform.machine()}"},
            call_sites=self.call_sites,
            top_k=self.top_k,
            check_every=self.check_every,
        )

    def _read_tables(self) -> dict[str, np.ndarray[Any, Any]]:
        """Every integer table, after everything that is queued: this synchronises."""
        rt = self.engine.rt
        return {name: rt.read(table).numpy() for name, table in self.engine.worker.runner.tables().items()}

    def _keyframe(self, step: RawStep) -> None:
        """The tables before ``step``: those read on entering, or the present ones after ``engine.reset()``."""
        fresh = self._tables is None or self.engine.core is not self._core
        step.keyframe = self._read_tables() if fresh else self._tables
        self._tables = None

    # -- use -----------------------------------------------------------------------------------------------------------

    @property
    def recording(self) -> Recording:
        """What was recorded: inside the ``with`` the steps that are settled, behind it all of them.

        Raises ``RuntimeError`` before the ``with``, and inside it when a file is written.
        """
        if self._store is None:
            raise RuntimeError("nothing is recorded yet: with Recorder(engine) as rec: engine.step()")
        if self.listener is not None:
            if self.path is not None:
                raise RuntimeError(f"{self.path} is being written; leave the `with` first, or load what is there of it")
            self._store.flush()
        return self._store.recording

    @property
    def num_settled(self) -> int:
        """Recorded steps whose output is known; of those in memory."""
        return len(self._store) if self._store is not None else 0

    # -- end -----------------------------------------------------------------------------------------------------------

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        listener, store = self.listener, self._store
        assert listener is not None and store is not None
        self.engine.observer, self.listener = self._before, None
        listener.notice_reset()
        clock: ClockFit | None = None
        try:
            clock = self.stamps.finish()
            self._peek(listener)
        except RuntimeError:  # queued work had raised; whoever waits for it next is told, and what is settled is kept
            pass
        store.finish(clock)
        if self.path is not None:
            store.recording = Recording.load(self.path)

    def _peek(self, listener: Listener) -> None:
        """Steps in flight are done on the device now, but their outputs belong to whoever steps on."""
        futures = {schedule.step: future for schedule, future in self.engine.core.in_flight}
        while listener.open and listener.open[0].schedule is not None:
            step = listener.open.popleft()
            assert step.schedule is not None
            future = futures.get(step.schedule.step)
            if isinstance(future, AsyncOutput):
                step.sampled = list(future.peek())
            elif step.schedule.total_num_scheduled_tokens:
                return  # it broke off
            assert self._store is not None
            self._store.add(step)
