"""The recording file: a zip of ``.npy`` columns and JSON that grows by whole chunks.

::

    header.json                     format, version and the Header
    chunks/00000/<column>.npy       16 steps, laid end to end (see ``encode``)
    chunks/00000/steps.json         their irregular part; last of its chunk
    chunks/00001/...
    device/<column>.npy             device times, known only when the recording ends
    end.json                        clock facts, problems; a file without it was cut off

Any zip tool opens it, and ``np.load(path)["chunks/00000/marks.nbytes"]`` reads a column.
"""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import orjson

from mrv2lab.recording.conform import finite
from mrv2lab.recording.encode import ChunkEncoder
from mrv2lab.recording.layout import Layout, header_to_json
from mrv2lab.recording.members import CHUNK, COLUMN_SUFFIX, DEVICE, END, HEADER, STEPS
from mrv2lab.recording.npy import narrow, to_npy
from mrv2lab.recording.schema import Array, Header, RecordingError, StepRecord

SUFFIX = ".mrv2rec"
CHUNK_STEPS = 16
UNKNOWN = -1
"""A device time that is not known."""


def _none() -> Array:
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class DeviceTimes:
    """Device times of everything recorded, int64 nanoseconds on the host's clock, -1 = unknown, and how good they are.

    In the order in which the spans and marks were appended. An empty ``method`` means that no clock was fitted.
    """

    # [spans]
    span_end_ns: Array = field(default_factory=_none)
    # [marks]
    mark_start_ns: Array = field(default_factory=_none)
    # [marks]
    mark_end_ns: Array = field(default_factory=_none)
    uncertainty_ns: float = 0
    """Of the mapping from the device's clock to the host's."""
    drift_ppm: float = 0.0
    """Of the device's clock against the host's."""
    method: str = ""
    """How the mapping was made, in words."""


class RecordingWriter:
    """Writes a recording as it happens. For one thread at a time; use it in a ``with``.

    A chunk reaches the file in one write, so whoever reads a file that is still being written, or whose writer was
    killed, gets every whole chunk.
    """

    def __init__(self, path: str | Path, header: Header, *, chunk_steps: int = CHUNK_STEPS) -> None:
        if chunk_steps < 1:
            raise ValueError(f"chunk_steps must be at least 1, got {chunk_steps}")
        self.path = Path(path)
        # Tables of any size may be written; a reader asks before it allocates them.
        self._encoder = ChunkEncoder(Layout(header, max_bytes=sys.maxsize))
        self._chunk_steps = chunk_steps
        self._chunks = self._num_spans = self._num_marks = 0
        self._pending: list[StepRecord] = []
        self._pending_texts: list[tuple[int, str]] = []
        self._known_texts: set[int] = set()
        self._broken: str | None = None
        """Why no further step is taken."""
        self._torn = False
        """Whether a chunk may be in the file by half: then it gets no end, and is read as one that was cut off."""
        first = _dumps(header_to_json(header))
        self._file = _Held(self.path.open("wb"))
        self._zip = zipfile.ZipFile(self._file, "w", zipfile.ZIP_DEFLATED)
        self._member(HEADER, first)
        self._file.commit()

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._file.closed

    def append(self, steps: Iterable[StepRecord], texts: Mapping[int, str] | None = None) -> None:
        """Add ``steps``, which nobody changes from now on, and the texts of token ids that they are the first to name.

        Device times in them are ignored: see :meth:`close`. Raises ``RecordingError`` for a step that cannot be in a
        file with this header, ``OSError`` where the disk is full, and after either ``RecordingError`` for every further
        step.
        """
        if self.closed:
            raise ValueError(f"{self.path.name} is closed")
        if self._broken is not None:
            raise RecordingError(self._broken)
        for token, text in (texts or {}).items():
            if token not in self._known_texts:
                self._known_texts.add(token)
                self._pending_texts.append((token, text))
        for step in steps:
            self._pending.append(step)
            if len(self._pending) == self._chunk_steps:
                self.flush()

    def flush(self) -> None:
        """Write what is pending as a chunk of its own, however short."""
        if not self._pending and not self._pending_texts:
            return
        steps, self._pending = self._pending, []
        texts, self._pending_texts = self._pending_texts, []
        folder = CHUNK.format(self._chunks)
        try:
            chunk = self._encoder.encode(steps, texts)
            small = _dumps(chunk.small)
            for name, column in chunk.columns.items():
                self._member(folder + name + COLUMN_SUFFIX, to_npy(column))
            self._member(folder + STEPS, small)
            self._file.commit()
        except BaseException as error:
            self._broken = str(error) or type(error).__name__
            self._torn = not isinstance(error, RecordingError)
            raise
        self._chunks += 1
        self._num_spans += sum(len(step.spans) for step in steps)
        self._num_marks += sum(len(step.marks) for step in steps)

    def close(self, device_times: DeviceTimes | None = None, problems: Sequence[str] = ()) -> None:
        """Write what is pending, the device times and the zip's directory. A second call does nothing.

        ``problems`` are sentences about what is missing from the recording; they are kept, and a recording that has
        some is not ``complete``. Raises ``RecordingError`` where the times are not as many as the spans and marks; the
        file is closed all the same.
        """
        if self.closed:
            return
        problems = list(problems)
        try:
            if self._broken is None:
                self.flush()
            else:
                problems.append(f"recording stopped: {self._broken}")
                device_times = None
            if not self._torn:
                self._finish(device_times, problems)
        finally:
            try:
                self._zip.close()
                self._file.commit()
            finally:
                self._file.close()

    def _finish(self, device_times: DeviceTimes | None, problems: list[str]) -> None:
        times = device_times or DeviceTimes()
        columns = {
            "span_end": (times.span_end_ns, self._num_spans),
            "mark_start": (times.mark_start_ns, self._num_marks),
            "mark_end": (times.mark_end_ns, self._num_marks),
        }
        bases: dict[str, int] = {}
        packed: list[tuple[str, Array]] = []
        for name, (values, count) in columns.items() if device_times is not None else ():
            if len(values) != count:
                raise RecordingError(f"{len(values)} device times ({name}) for {count} recorded entries")
            index = np.flatnonzero(np.asarray(values) != UNKNOWN)
            # Which are known, and when, each as the difference to the one before.
            for part, column in ((f"{name}.index", index), (f"{name}.ns", np.asarray(values, np.int64)[index])):
                if len(column):
                    bases[part] = int(column[0])
                    packed.append((part, narrow(np.diff(column, prepend=column[:1]))))
        clock = [finite(times.uncertainty_ns), finite(times.drift_ppm), times.method]
        counts = {"spans": self._num_spans, "marks": self._num_marks}
        end = _dumps({"clock": clock, "problems": problems, "chunks": self._chunks, "counts": counts, "bases": bases})
        for name, column in packed:
            self._member(DEVICE + name + COLUMN_SUFFIX, to_npy(column))
        self._member(END, end)

    def _member(self, name: str, content: bytes) -> None:
        # A date of its own would make two files of the same steps differ.
        info = zipfile.ZipInfo(name)
        info.compress_type = zipfile.ZIP_DEFLATED
        info.external_attr = 0o644 << 16
        self._zip.writestr(info, content)

    def __enter__(self) -> RecordingWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(problems=[] if kind is None else [f"recording was broken off by a {kind.__name__}"])


class _Held:
    """A file for ``ZipFile`` that holds everything back until :meth:`commit`.

    ``ZipFile`` writes a member's header with sizes of 0 and returns to it when the member is there; without this, a
    reader of the growing file would meet empty members.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._start = 0
        self._held = io.BytesIO()
        self.closed = False

    def tell(self) -> int:
        return self._start + self._held.tell()

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._start + self._held.seek(offset - self._start if whence == 0 else offset, whence)

    def write(self, data: Any) -> int:
        return self._held.write(data)

    def flush(self) -> None:
        """Nothing: ``ZipFile`` flushes after each member."""

    def commit(self) -> None:
        """Hand everything over in one write."""
        content = self._held.getvalue()
        self._start += len(content)
        self._held = io.BytesIO()
        self._file.write(content)
        self._file.flush()

    def close(self) -> None:
        self.closed = True
        self._file.close()


def _dumps(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:  # orjson.JSONEncodeError is one
        raise RecordingError(f"this cannot be written as JSON: {error}") from None
