"""The integer state of any step, rebuilt from a recording with the ops' NumPy specs. No torch, no device.

The state at index k is what stood on the device after all work of ``steps[k]``, bit for bit and stale tails included:
the specs are the definition of the ops, and a recording begins with a keyframe. Forward is replaying; back is the
nearest snapshot, then forward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
from tqdm.auto import tqdm

from mrv2lab.recording.replay_checksum import WORD, table_checksum
from mrv2lab.recording.replay_program import OpCall, State, host_writes, input_calls, num_reqs, output_calls
from mrv2lab.recording.replay_tables import check_tables, num_groups
from mrv2lab.recording.replay_trace import BatchTrace, StepTrace, Tracer
from mrv2lab.recording.schema import Array, Header, Publish, RecordingError, StepRecord
from mrv2lab.recording.snapshots import Packed, Snapshot, Snapshots

LONG = 500
"""From this many steps on, ``verify`` shows its progress."""

Visit = Callable[[Publish | OpCall], None]


class StateUnknown(RecordingError):
    """The way to this step leads through one whose tokens never came, or have not come yet."""


class Replayable(Protocol):
    """What :class:`Replay` needs of a recording, or of a live one that still grows."""

    @property
    def header(self) -> Header: ...

    @property
    def steps(self) -> Sequence[StepRecord]: ...


class Replay:
    """The state of a recording at one of its steps; :meth:`seek` goes to another.

    Raises ``RecordingError`` for a recording of another runner, for tables that are missing or do not go together, and
    later for a step that does not fit its tables.
    """

    def __init__(self, recording: Replayable) -> None:
        header = recording.header
        if header.runner != "mrv2":
            raise RecordingError(
                f"only recordings of the mrv2 runner can be replayed; this one is of {header.runner!r}"
            )
        check_tables(header)
        self.recording = recording
        self._state = State(
            {name: np.zeros(shape, dtype) for name, (shape, dtype) in header.tables.items()},
            block_sizes=(int(header.config["cache"]["block_size"]),) * num_groups(header),
        )
        self._position = -1
        """Index of the step whose state is held; -1: before the first."""
        self._complete = True
        self._settled = True
        """False where the record may still change: its step is in flight, and is replayed anew each time."""
        self._snapshots = Snapshots()
        self._problems: dict[int, list[str]] = {}
        """By index: what a checked step's device says otherwise. A key for every step that was checked."""
        self._unlikely: dict[int, str] = {}
        """By index: where the recorded tokens contradict the rebuilt counters."""

    # -- where we are --------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many steps can be sought: all up to the first in flight, whose state stops behind ``gather``."""
        steps = self.recording.steps
        end = len(steps)
        for index in range(end - 1, -1, -1):
            if _tokens_missing(steps[index]):
                end = index + 1
            elif num_reqs(steps[index]):
                break
            if steps[index].keyframe is not None:
                break
        return end

    @property
    def position(self) -> int:
        """Index of the step whose state is held; -1 before the first :meth:`seek`."""
        return self._position

    @property
    def complete(self) -> bool:
        """False where the step's tokens are not known: its state stops behind ``gather``."""
        return self._complete

    @property
    def tables(self) -> dict[str, Array]:
        """The tables at :attr:`position`, by name. They change with the next call: copy what is to stay."""
        return self._state.tables

    @property
    def owners(self) -> dict[str, int]:
        """Live request -> row at :attr:`position`, in the order of admission."""
        return self._state.owners

    # -- going somewhere -----------------------------------------------------------------------------------------------

    def seek(self, index: int) -> None:
        """Make :attr:`tables` and :attr:`owners` those after step ``index``.

        Raises ``IndexError`` outside the recording, ``StateUnknown`` where the way there is not known.
        """
        self._check_index(index)
        self._restore(index)
        at = self._position + 1
        while at <= index:
            at = self._next_possible(at, index)
            self._run(at, self._do)
            at += 1

    def _check_index(self, index: int) -> None:
        count = len(self.recording.steps)
        if not 0 <= index < count:
            raise IndexError(f"there is no step at index {index}; the recording has {count} (0..{count - 1})")

    def _restore(self, index: int) -> None:
        """Take the nearest state that is known and not after ``index``."""
        found = self._snapshots.latest(index)
        if self._settled and self._position <= index and (found is None or found[0] <= self._position):
            return
        if found is None:
            self._clear()
            return
        at, snapshot = found
        self._settled = False  # until all of it is there: an interrupt may come
        for name, packed in snapshot.tables.items():
            packed.restore(self._state.tables[name])
        self._state.owners = dict(snapshot.owners)
        self._state.num_dirty_rows = snapshot.num_dirty_rows
        self._position, self._complete, self._settled = at, True, True

    def _clear(self) -> None:
        for table in self._state.tables.values():
            table[...] = 0
        self._state.owners, self._state.num_dirty_rows = {}, 0
        self._position, self._complete, self._settled = -1, True, True

    def _next_possible(self, index: int, last: int) -> int:
        """``index``, or the next keyframe up to ``last`` if the tokens of the step before ``index`` never came."""
        steps = self.recording.steps
        if self._complete or steps[index].keyframe is not None:
            return index
        for later in range(index + 1, last + 1):
            if steps[later].keyframe is not None:
                return later
        missing = steps[self._position].step
        raise StateUnknown(
            f"the state of step {steps[last].step} is not known, since the tokens of step {missing} did not come "
            f"(yet); the last state that can be rebuilt is that of step {missing}, up to its gather"
        )

    def _do(self, item: Publish | OpCall) -> None:
        if isinstance(item, OpCall):
            item.run()
        else:
            self.tables[item.table].reshape(-1)[item.index] = item.values

    def _run(self, index: int, visit: Visit) -> None:
        """Step ``index`` upon the state before it."""
        record = self.recording.steps[index]
        with self._fitting(record):
            self._begin(record)
            self._check_fit(record)
            self._state.move_rows(record)
            for item in host_writes(self._state, record):
                visit(item)
            if num_reqs(record):
                for call in input_calls(self._state, record):
                    visit(call)
                if record.sampled is not None:
                    for call in output_calls(self._state, record):
                        visit(call)
                        if call.phase == "sample":
                            self._compare_lengths(index, record, call.args["num_sampled"])
        self._position, self._complete = index, not _tokens_missing(record)
        self._settled = record.sampled is not None
        if self._complete:
            self._compare_checksums(index, record)
        if self._settled and self._snapshots.wants(index):
            tables = {name: Packed.of(table) for name, table in self.tables.items()}
            self._snapshots.add(index, Snapshot(tables, dict(self.owners), self._state.num_dirty_rows))

    def _begin(self, record: StepRecord) -> None:
        if record.keyframe is not None:
            self._clear()
            self._state.restart(record.keyframe, record.owners)

    @contextmanager
    def _fitting(self, record: StepRecord) -> Iterator[None]:
        """A record that breaks its tables is refused, and whatever it half did is thrown away."""
        try:
            yield
        except BaseException as error:
            self._clear()
            if isinstance(error, (IndexError, KeyError, OverflowError, TypeError, ValueError)):
                raise RecordingError(
                    f"step {record.step} does not fit the recording's tables and cannot be replayed: {error}"
                ) from error
            raise

    def _check_fit(self, record: StepRecord) -> None:
        """NumPy takes a negative row for one from the end and cuts a long slice short; a recording may do neither."""
        tables, count = self._state.tables, num_reqs(record)
        num_rows, num_tokens = len(tables["total_len"]), len(tables["input_ids"])
        seats = [*record.rows, *(request.row for request in record.new), *(diff.row for diff in record.diffs)]
        seats += [*record.owners.values(), *(row for _, row in record.removed)]
        if seats and not (min(seats) >= 0 and max(seats) < num_rows):
            raise ValueError(f"rows {min(seats)}..{max(seats)} where there are 0..{num_rows - 1}")
        if len(record.num_scheduled) != count or len(record.req_ids) != count or count > num_rows:
            raise ValueError(f"{len(record.req_ids)} requests, {count} rows, {len(record.num_scheduled)} token counts")
        if count and not (min(record.num_scheduled) > 0 and record.num_scheduled.sum() <= num_tokens):
            raise ValueError(f"{record.num_scheduled.sum()} tokens where there is room for 1..{num_tokens}")
        if record.sampled is not None and len(record.sampled) != count:
            raise ValueError(f"tokens of {len(record.sampled)} requests in a batch of {count}")
        for diff in record.diffs:
            table = tables[diff.table]
            width = table.shape[1] if table.ndim > 1 else 1
            if not 0 <= diff.start <= diff.start + len(diff.values) <= width:
                raise ValueError(f"a write of {diff.table} to columns {diff.start}.. beyond {width}")
        for publish in record.publishes:
            if len(publish.index) and publish.index.min() < 0:
                raise ValueError(f"a publish of {publish.table} at {publish.index.min()}")

    # -- looking into a step -------------------------------------------------------------------------------------------

    def _before(self, index: int) -> StepRecord:
        """Go to the state before step ``index``, its keyframe included."""
        self._check_index(index)
        record = self.recording.steps[index]
        if record.keyframe is None:
            if index:
                self.seek(index - 1)
                self._next_possible(index, index)
            else:
                self._clear()
        with self._fitting(record):
            self._begin(record)
        return record

    def trace(self, index: int) -> StepTrace:
        """Replay step ``index`` and note every write; afterwards the state is that of :meth:`seek`."""
        record = self._before(index)
        owners = dict(self.owners)
        tracer = Tracer(self._state)
        batch: BatchTrace | None = None

        def visit(item: Publish | OpCall) -> None:
            nonlocal batch
            tracer(item)
            if isinstance(item, OpCall) and item.phase == "gather":
                batch = BatchTrace.of(self._state, record)

        self._run(index, visit)
        tracer.confirm(record)
        return StepTrace(index, self._complete, owners, dict(self.owners), tracer.values, tracer.writes, batch)

    def standstill(self, index: int) -> StepTrace:
        """In place of a trace where the state is not known: the state held, as if step ``index`` did nothing."""
        return StepTrace(index, False, dict(self.owners), dict(self.owners), Tracer(self._state).values)

    def op_calls(self, index: int) -> list[OpCall]:
        """The launches of step ``index`` that have NumPy specs, each with copies of its arguments before the call.

        Pointer arrays hold the addresses of those copies, so a call can be given to Triton's interpreter.
        """
        self._before(index)
        calls: list[OpCall] = []

        def visit(item: Publish | OpCall) -> None:
            if isinstance(item, OpCall):
                calls.append(item.copy())
            self._do(item)

        self._run(index, visit)
        return calls

    # -- is it true? ---------------------------------------------------------------------------------------------------

    def checksums(self) -> dict[str, int]:
        """64-bit checksum of every table at :attr:`position`, stale tails of rows left out; see ``ops/checksum.py``."""
        return {name: table_checksum(name, self.tables) for name in self.tables}

    def state_hash(self) -> str:
        """Hash of every cell of every table, stale ones included."""
        return hash_tables(self.tables)

    def _compare_checksums(self, index: int, record: StepRecord) -> None:
        if not record.checksums or index in self._problems:
            return
        problems = self._problems[index] = []
        for name, device in record.checksums.items():
            rebuilt = table_checksum(name, self.tables) if name in self.tables else None
            if rebuilt != device % WORD:
                problems.append(f"step {record.step}: {name} on the device differs from the rebuilt one")

    def _compare_lengths(self, index: int, record: StepRecord, num_sampled: Array) -> None:
        assert record.sampled is not None
        for req_id, tokens, count in zip(record.req_ids, record.sampled, num_sampled.tolist(), strict=True):
            if len(tokens) != count:
                self._unlikely[index] = (
                    f"step {record.step}: the record has {len(tokens)} sampled tokens of {req_id}, "
                    f"by the rebuilt state there are {count}"
                )
                return

    def checked(self, index: int) -> bool | None:
        """Whether the device's checksums of step ``index`` agreed; None if it has none, or was not replayed yet."""
        return not self._problems[index] if index in self._problems else None

    def divergence(self, index: int) -> str | None:
        """The first sentence of :meth:`verify` that concerns the state at ``index``, as far as was replayed."""
        steps = self.recording.steps
        for at in sorted({*self._unlikely, *(i for i, found in self._problems.items() if found)}):
            restarted = any(steps[later].keyframe is not None for later in range(at + 1, index + 1))
            if at <= index and not restarted:
                return self._said(at)[0]
        return None

    def _said(self, index: int) -> list[str]:
        return [*([self._unlikely[index]] if index in self._unlikely else []), *self._problems.get(index, ())]

    def verify(self) -> list[str]:
        """Replay everything; a sentence for each step and table whose recorded device checksum differs.

        Raises ``RecordingError`` for a step that does not fit the tables.
        """
        said: list[str] = []
        count = len(self)
        for index in tqdm(range(count), desc="verify", unit="step", disable=count < LONG):
            try:
                self.seek(index)
            except StateUnknown:  # steps in flight when the engine was reset: there is nothing to compare
                continue
            said += self._said(index)
        return said


def hash_tables(tables: dict[str, Array]) -> str:
    """Hash over names, dtypes, shapes and every byte of ``tables``; for comparing a replay with a device."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tables):
        table = np.ascontiguousarray(tables[name])
        digest.update(f"{name} {table.dtype} {table.shape}\n".encode())
        digest.update(table.data)
    return digest.hexdigest()


def _tokens_missing(record: StepRecord) -> bool:
    return bool(num_reqs(record)) and record.sampled is None
