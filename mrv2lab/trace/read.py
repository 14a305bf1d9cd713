"""Reads a trace of any known kind, told apart by its first bytes, never by its name."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

from mrv2lab.trace import cache as columnar
from mrv2lab.trace.blocks import GZIP_MAGIC, LARGE_BYTES, Blocks
from mrv2lab.trace.json_chunks import EventStream
from mrv2lab.trace.kineto import KinetoEvents
from mrv2lab.trace.kineto_info import metadata, trace_info
from mrv2lab.trace.sidecar import with_sidecar
from mrv2lab.trace.trace import Trace, TraceError

MAX_BYTES = 2 << 30
_SQLITE_MAGIC = b"SQLite format 3\0"
_ZIP_MAGIC = b"PK\x03\x04"
_BOM = b"\xef\xbb\xbf"


def load(
    path: str | Path,
    *,
    cache: bool | None = None,
    progress: bool = True,
    max_bytes: int = MAX_BYTES,
    cancel: Callable[[], bool] | None = None,
) -> Trace:
    """The trace in a file: Chrome JSON of torch's profiler, vLLM, SGLang and others, plain or gzipped; an export of
    Nsight Systems (``.sqlite``); a recording of ours.

    ``cache``: reading JSON of 1,000,000 events takes seconds, its columns load in a fraction of one from
    ``NAME.mrv2trace`` beside the file. None uses that copy where it is there and matches the file, and writes it for
    texts of more than 20 MB if the folder can be written; True writes it always; False neither uses nor writes it.
    ``progress``: a bar for texts of more than 20 MB. ``max_bytes``: the cap on the uncompressed text. ``cancel`` is
    asked after every few megabytes; once it is true, or on KeyboardInterrupt, reading stops and leaves nothing behind.

    What a profile of ours says of its steps may also come from the file's ``.meta.json``. What had to be mended or left
    out is listed in ``problems``. Raises :class:`TraceError` if the file is no trace, holds no event or is over the
    cap, :class:`TraceCancelled` if ``cancel`` said so.
    """
    path = Path(path)
    head = _first_bytes(path)
    if head.startswith(_SQLITE_MAGIC):
        from mrv2lab.trace.nsys import read_nsys

        return read_nsys(path, progress=progress, max_bytes=max_bytes, cancel=cancel)
    if head.startswith(_ZIP_MAGIC):
        return _read_recording(path, max_bytes)
    text = head.removeprefix(_BOM).lstrip()
    if head.startswith(GZIP_MAGIC) or text[:1] in (b"{", b"["):
        trace = _read_json(path, cache=cache, progress=progress, max_bytes=max_bytes, cancel=cancel)
        return with_sidecar(trace, path)
    raise TraceError(f"{path}: {_what_it_is(head)}")


def _first_bytes(path: Path) -> bytes:
    try:
        if path.is_dir():
            inside = sorted(one.name for one in path.iterdir() if one.name.endswith((".json", ".json.gz", ".sqlite")))
            choice = f"one of {', '.join(inside[:5])}" if inside else "but it holds no .json, .json.gz or .sqlite"
            raise TraceError(f"{path}: a folder, not a file; name a trace in it: {choice}")
        with path.open("rb") as file:
            return file.read(4096)
    except OSError as error:
        raise TraceError(f"{path}: cannot be opened ({error.strerror or error})") from error


def _what_it_is(head: bytes) -> str:
    if not head:
        return "an empty file: the profiler wrote nothing, or is still running"
    if not head.strip():
        return f"begins with {len(head):,} blank bytes, no trace"
    if head.startswith(columnar.MAGIC):
        return "a columnar copy that load() keeps beside a trace; load the trace, the copy is used by itself"
    if head[:1] == b"\x80":
        return "a pickle, probably a memory snapshot: mrv2lab.trace.memory_snapshot.load_snapshot() reads it"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16 text; traces are UTF-8: convert it first"
    return (
        f"no trace that is known here: it begins with {head[:16]!r} instead of '{{' or '[' (Chrome JSON), gzip, "
        "SQLite (Nsight Systems: nsys export --type sqlite) or a recording"
    )


def _read_recording(path: Path, max_bytes: int) -> Trace:
    from mrv2lab.recording.recording import Recording
    from mrv2lab.recording.schema import RecordingError
    from mrv2lab.trace.from_recording import from_recording

    try:
        recording = Recording.load(path, max_bytes)
    except (RecordingError, OSError) as error:
        raise TraceError(f"{path}: a zip archive, but no recording of ours: {error}") from error
    return from_recording(recording)


def _read_json(
    path: Path, *, cache: bool | None, progress: bool, max_bytes: int, cancel: Callable[[], bool] | None
) -> Trace:
    key = None if cache is False else columnar.fingerprint(path)
    if key is not None:
        copy = columnar.read(path, key)
        if copy is not None:
            return copy
    blocks = Blocks(path, progress=progress, max_bytes=max_bytes, cancel=cancel)
    trace = read_blocks(blocks, title=path.name, path=str(path))
    if key is not None and (cache or blocks.total > LARGE_BYTES):
        columnar.write(path, key, trace, must=bool(cache))
    return trace


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Parsed events hold no cycles, and the search for some is a fifth of the time that reading takes."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def read_blocks(blocks: Blocks, *, title: str, path: str) -> Trace:
    """The trace in a text that comes block by block; see ``load`` for errors."""
    events = KinetoEvents()
    problem = events.builder.problem
    stream = EventStream(blocks, problem, path, events.quick)
    try:
        with _no_collections():
            for piece in stream:
                events.add(piece)
    except TraceError as error:
        if not blocks.damage:
            raise
        raise TraceError(f"{path}: {blocks.damage} after {blocks.total:,} bytes, before any event") from error
    first_ns = events.finish()
    if blocks.damage:
        problem(f"{blocks.damage}; what came before was read", offset=blocks.total)
    found = metadata(stream, problem)
    if not len(events):
        counted = ", ".join(f"{count:,} {what}" for what, count in events.counts.items()) or "nothing"
        lost = "" if stream.dropped is None else ", unreadable at byte {:,}: {!r}".format(*stream.dropped)
        damage = f", {blocks.damage} after {blocks.total:,} bytes" if blocks.damage else ""
        raise TraceError(
            f"{path}: holds no events: {counted} in its {blocks.total:,} bytes{lost}{damage}; was the profiler stopped "
            "before its first step?"
        )
    info = trace_info(
        found,
        title=title,
        path=path,
        kineto=events.kineto,
        first_ns=first_ns,
        flows=events.counts["flow arrows"],
        problem=problem,
    )
    return events.build(info)
