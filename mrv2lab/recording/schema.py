"""What a recording holds. Event-sourced: what the scheduler decided, what the host staged, what came back, and when.

The integer state of any step follows from these (``replay``); nothing in here was read from the device, checksums and
optional top-k logits apart. Shapes: r = requests in the step, R = max_num_reqs. Times are int64 nanoseconds of the
recording host's clock, counted from ``Header.epoch_host_ns``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

FORMAT = "mrv2lab-recording"
VERSION = 1
"""Of the file's schema. A reader refuses a greater one."""

Array = np.ndarray[Any, Any]


class RecordingError(ValueError):
    """A file that is no recording, or one that this version cannot or must not read; the message says why."""


@dataclass(frozen=True)
class Header:
    """What is true for the whole run."""

    mode: str
    """``record`` (asynchronous, no added waits) or ``step`` (paused between phases, synchronised)."""
    runner: str
    """``mrv2`` or ``v1``."""
    device: str
    """Name of the device, e.g. ``NVIDIA H200`` or ``cpu``."""
    modelled: bool
    """True where device times come from a cost model (software streams), not from a device."""
    config: dict[str, Any]
    """EngineConfig as nested plain values: model, cache, scheduler, runner, spec."""
    backend: str
    """Kernel backend: spec, triton, interpret."""
    tables: dict[str, tuple[tuple[int, ...], str]]
    """Every integer table of the state, by name: its shape and NumPy dtype. See ``replay.Replay``."""
    epoch_host_ns: int
    """Host clock at time 0 of this recording."""
    epoch_unix_ns: int
    """The same moment by the wall clock."""
    versions: dict[str, str] = field(default_factory=dict)
    """mrv2lab, python, torch, triton, noise (version of the counter-based noise)."""
    machine: dict[str, Any] = field(default_factory=dict)
    call_sites: bool = True
    top_k: int = 0
    """How many logits a row were kept; 0 = none."""
    check_every: int = 16
    """Steps between two device checksums."""


@dataclass(slots=True)
class NewRequest:
    """A request that got a row in this step: new, or ``resumed`` after a preemption."""

    req_id: str
    row: int
    prompt_len: int
    prefill_len: int
    num_computed_tokens: int
    block_ids: list[list[int]]
    temperature: float
    seed: int
    seed_given: bool
    max_tokens: int
    resumed: bool = False


@dataclass(slots=True)
class Diff:
    """One staged write: ``table[row, start : start + len(values)] = values``, as the host staged it."""

    table: str
    row: int
    start: int
    values: Array


@dataclass(slots=True)
class Publish:
    """What changed in a host table (``UvaBackedTensor``) between two publishes: ``table.flat[index] = values``."""

    table: str
    # [k] int64, flat indices
    index: Array
    # [k], dtype of the table
    values: Array


@dataclass(slots=True)
class TopK:
    """The greatest logits of each logits row, greatest first. Floats: never part of the rebuilt state."""

    # [n, k] int32
    token_ids: Array
    # [n, k] float32
    logits: Array


@dataclass(slots=True)
class SpanRecord:
    """A phase or sub-phase: host time, and device time where it was stamped (-1 = not known)."""

    name: str
    start_ns: int
    end_ns: int
    depth: int = 0
    device_end_ns: int = -1
    """When the device had done everything queued by the end of the span (main stream)."""
    added: bool = False
    """The recorder's own."""


@dataclass(slots=True)
class MarkRecord:
    """One pass through a chokepoint, as ``observer.Mark``, with its time and its phase."""

    kind: str
    name: str
    stream: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    site: str | None
    nbytes: int
    wait_ns: int
    time_ns: int
    """Host time at the end of the call."""
    phase: str
    device_start_ns: int = -1
    device_end_ns: int = -1
    """Device time of a launch or copy; -1 = not known. The start is the later of enqueue and its predecessor's end."""
    added: bool = False
    """The recorder's own launch, not the engine's."""


@dataclass(slots=True)
class StepRecord:
    """One step of the scheduler."""

    step: int
    """The scheduler's number of it."""
    # -- what the scheduler decided
    new: list[NewRequest] = field(default_factory=list)
    removed: list[tuple[str, int]] = field(default_factory=list)
    """(request, row) whose row was freed at the start of the step: finished, aborted or preempted."""
    finished: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    unscheduled: list[str] = field(default_factory=list)
    decisions: list[tuple[str, str, int, int]] = field(default_factory=list)
    """(kind, request, needed, free) as ``engine.records.Decision``."""
    gauges: dict[str, float] = field(default_factory=dict)
    """running, waiting, free_blocks, in_flight, ... after the schedule was made."""
    new_blocks: dict[str, list[list[int]]] = field(default_factory=dict)
    """Blocks that continued requests got."""
    # -- the batch, in batch order
    req_ids: list[str] = field(default_factory=list)
    # [r] int32: idx_mapping
    rows: Array = field(default_factory=lambda: np.empty(0, np.int32))
    # [r] int32
    num_scheduled: Array = field(default_factory=lambda: np.empty(0, np.int32))
    has_prefill: bool = False
    # -- what the host wrote
    diffs: list[Diff] = field(default_factory=list)
    publishes: list[Publish] = field(default_factory=list)
    # -- what came back; None: not (yet) known
    sampled: list[list[int]] | None = None
    """By batch index; empty = an unfinished prefill."""
    finish_reasons: dict[str, str] = field(default_factory=dict)
    """Requests that ended with this step's output."""
    top_k: TopK | None = None
    # -- when
    spans: list[SpanRecord] = field(default_factory=list)
    marks: list[MarkRecord] = field(default_factory=list)
    paused: bool = False
    """Step mode: the engine stood still between its phases, so its times are the reader's."""
    # -- what the device said of itself
    checksums: dict[str, int] = field(default_factory=dict)
    """Table -> 64-bit checksum (``ops/checksum.py``) after this step's device work; every ``check_every`` steps."""
    # -- a break in the story
    keyframe: dict[str, Array] | None = None
    """Whole tables read from the device BEFORE this step: at the start of a recording, after ``engine.reset()`` and
    after steps that are missing."""
    owners: dict[str, int] = field(default_factory=dict)
    """With a keyframe: live request -> row before this step."""
