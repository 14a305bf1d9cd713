"""Cuts a stream of Chrome trace JSON into pieces of whole events, with memory for one piece at a time.

``},{"key":`` can only stand between two objects: inside a JSON string its quotation marks would be escaped. The last
such place in a block is tried as a cut; a parser that accepts the piece as an array proves it right. A piece that it
refuses is read event by event, and only the events that it still refuses are mended.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import orjson

from mrv2lab.trace.json_repair import repair, without_args
from mrv2lab.trace.trace import TraceError

_BETWEEN = re.compile(rb'\}\s*+(?:,\s*+)?(?=\{\s*+"[^"\\]{1,64}"\s*+:)')
_BETWEEN_AT_END = re.compile(rb'\}\s*+(?:,\s*+)?(?=\{\s*+(?:"[^"\\]{0,64}"?\s*)?\Z)')
"""The same where the file breaks off within the key."""
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*([^\s])')
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*(")?|[{}\[\]]', re.DOTALL)
_BLANK = re.compile(rb"[\s,]*")
_LAST_BRACKET = re.compile(rb'\](?=\s*(?:,\s*"|\}|\Z))')
_BRACKETS = 50
"""Closing brackets of one event among which the array's own is sought."""
_SPACE = b" \t\r\n"
MAX_HEAD_BYTES = 256 << 20
"""Of what stands before the events."""
MAX_TAIL_BYTES = 64 << 20
"""Of what stands behind them."""
MAX_OPEN_BYTES = 1 << 20
"""An event that is still open after so many bytes is broken, not long."""
MAX_EVENT_BYTES = 64 << 20
"""From here on a stretch without an event's end is given up."""
_Found = tuple[list[Any], bytes, list[str]]
"""Events, the text that gives them, what was mended."""


class Piece(NamedTuple):
    """Some events, in the order of the file."""

    events: list[Any]
    text: bytes
    """What gives ``events`` between brackets: the file's bytes, mended where they had to be."""
    offset: int
    """Byte of the uncompressed text where the piece begins."""
    begins: list[int] | None = None
    """From there, where each event begins; None: ``text`` is the file's own."""

    def offset_of(self, index: int) -> int:
        """Where one event begins; where the piece begins if that cannot be told."""
        begins = self.begins or [0, *(found.end() for found in _BETWEEN.finditer(self.text))]
        return self.offset + (begins[index] if len(begins) == len(self.events) else 0)


class EventStream:
    """Iterate once for the pieces; afterwards ``heads`` and ``tail`` hold the text around the events.

    ``problem(reason, count=, offset=, example=)`` is told what had to be mended or dropped. ``quick`` is offered the
    text of every piece as an array; what it takes (True) does not come out again.
    """

    def __init__(
        self,
        blocks: Iterable[bytes],
        problem: Callable[..., None],
        title: str,
        quick: Callable[[bytes], bool] | None = None,
    ) -> None:
        self.heads: list[bytes] = []
        """Objects that enclose the array, outermost first, each up to the array's key; none for a bare array."""
        self.tail = b""
        """From behind the array to the end of the file."""
        self.tail_offset = 0
        self.closed = False
        """The array's end was found."""
        self.dropped: tuple[int, str] | None = None
        """Byte and beginning of the first event that could not be read."""
        self._blocks = iter(blocks)
        self._problem = problem
        self._title = title
        self._quick = quick
        self._position = 0  # of the first byte in hand
        self._scan = MAX_OPEN_BYTES  # bytes that the search for ends may still waste on a piece

    def __iter__(self) -> Iterator[Piece]:
        text = self._find_array()
        fresh = 0  # nothing before it is worth a search for a cut
        block: bytes | None = b""
        while block is not None:
            block = next(self._blocks, None)
            text += block or b""
            if not text.strip(_SPACE + b","):
                self._position += len(text)
                text = b""
                continue
            if self._ends_at_once(text):
                break
            if block is None:
                text = text.rstrip(_SPACE + b",")
            cut, begin = (len(text), len(text)) if block is None else self._last_cut(text, fresh)
            if not cut:
                # Perhaps the last event, with a long text behind the array.
                cut = begin = max(0, _object_end(text, _skipped(text, 0), MAX_OPEN_BYTES))
            if not cut:
                if len(text) > MAX_EVENT_BYTES:
                    raise TraceError(
                        f"{self._title}: no event ends within {len(text):,} bytes from byte {self._position:,} on, "
                        f"which begin with {text[:40]!r}: no trace, or one broken there"
                    )
                fresh = max(0, len(text) - 200)
                continue
            fresh = 0
            piece, end = self._read(text, cut, begin, final=block is None)
            if piece.events:
                yield piece
            if self.closed:
                self.tail_offset = self._position + end
                self.tail = text[end:]
                break
            text = text[end:]
            self._position += end
        self._collect_tail()

    # -- around the array

    def _find_array(self) -> bytes:
        """Reads up to the events and returns what is in hand behind the opening bracket."""
        text = next(self._blocks, b"")
        while text.isspace() or len(text) < 4:
            block = next(self._blocks, None)
            if block is None:
                break
            text += block
        start = 3 if text.startswith(b"\xef\xbb\xbf") else 0
        start += len(text[start:]) - len(text[start:].lstrip(_SPACE))
        if text[start : start + 1] == b"[":
            self._position = start + 1
            return text[start + 1 :]
        searched = start
        while True:
            found = _EVENTS.search(text, searched)
            if found is not None:
                self.heads.append(text[start : found.start()])
                start = searched = found.start(1)
                if found[1] == b"[":
                    self._position = start + 1
                    return text[start + 1 :]
                if found[1] == b"{":
                    continue
                raise TraceError(f'{self._title}: holds no events: "traceEvents" at byte {found.start():,} is no array')
            searched = max(searched, len(text) - 64)
            block = next(self._blocks, None)
            if block is None or len(text) > MAX_HEAD_BYTES:
                raise TraceError(
                    f'{self._title}: holds no events: no array "traceEvents" in the first {len(text):,} bytes, which '
                    f"begin with {text[:40]!r}; a trace is what torch.profiler's export_chrome_trace() writes"
                )
            text += block

    def _ends_at_once(self, text: bytes) -> bool:
        stripped = text.lstrip(_SPACE + b",")
        if not stripped.startswith(b"]"):
            return False
        self.closed = True
        self.tail = stripped[1:]
        self.tail_offset = self._position + len(text) - len(self.tail)
        return True

    def _collect_tail(self) -> None:
        kept = [self.tail]
        size = len(self.tail)
        for block in self._blocks:
            size += len(block)
            if size <= MAX_TAIL_BYTES:
                kept.append(block)
        self.tail = b"".join(kept)
        if size > MAX_TAIL_BYTES:
            self._problem("what stands behind the events is too long and was not read", offset=self.tail_offset)

    # -- pieces

    def _last_cut(self, text: bytes, fresh: int) -> tuple[int, int]:
        """Behind the last whole event, and where the next one begins; zeros if there is none."""
        window = 8 << 10
        while True:
            begin = max(fresh, len(text) - window)
            found = list(_BETWEEN.finditer(text, begin))
            if found:
                return found[-1].start() + 1, found[-1].end()
            if begin == fresh:
                return 0, 0
            window *= 8

    def _read(self, text: bytes, cut: int, begin: int, *, final: bool) -> tuple[Piece, int]:
        """The events before ``cut``, and where to go on: ``begin``, or earlier if the cut was wrong."""
        whole = b"".join((b"[", memoryview(text)[:cut], b"]"))
        if self._quick is not None and self._quick(whole):
            return Piece([], b"", self._position), begin
        try:
            return Piece(orjson.loads(whole), whole[1:-1], self._position), begin
        except orjson.JSONDecodeError:
            return self._by_event(text, cut, begin, final=final)

    def _by_event(self, text: bytes, cut: int, begin: int, *, final: bool) -> tuple[Piece, int]:
        ends = [found.start() + 1 for found in _BETWEEN.finditer(text, 0, cut)]
        if final and (last := _BETWEEN_AT_END.search(text, max(0, cut - 300))):
            ends.append(last.start() + 1)
        ends.append(cut)
        self._scan = MAX_OPEN_BYTES
        piece = Piece([], b"", self._position, [])
        texts: list[bytes] = []
        place = 0
        while (place := _skipped(text, place)) < cut and not self.closed:
            if text.startswith(b"]", place):
                self.closed = True
                begin = place + 1
                break
            end = ends[bisect_right(ends, place)]
            found = _parsed(text[place:end])
            if found is None:
                found, end = self._mended(text, place, end, final=final)
            if found is None and end < 0:
                begin = place
                break
            if found is not None:
                piece.events.extend(found[0])
                piece.begins.extend([place] * len(found[0]))  # type: ignore[union-attr]
                if found[0]:
                    texts.append(found[1])
                for reason in found[2]:
                    self._problem(reason, offset=self._position + place, example=_excerpt(text[place : place + 80]))
            place = end
            begin = max(begin, end)
        return piece._replace(text=b",".join(texts)), begin

    def _mended(self, text: bytes, place: int, end: int, *, final: bool) -> tuple[_Found | None, int]:
        """The event that begins at ``place`` and seems to end at ``end``, and where it really ends: behind nested
        objects, or before what stands behind the array. None if it is lost; -1 if its end is not in hand yet."""
        start = text.find(b"{", place, end)
        if start > place:  # entries that are no events, or rubbish
            found = _parsed(text[place:start].rstrip(_SPACE + b","))
            if found is None:
                self._drop(text[place:start], place, at_end=False)
            return found, start
        one = text[place:end]
        short = len(one) <= MAX_OPEN_BYTES
        balanced = one.count(b"{") == one.count(b"}")
        if short and balanced and (found := repair(one)) is not None:
            return found, end
        whole_end = _object_end(text, place, max(self._scan, 4 * len(one)))
        if whole_end < 0:
            self._scan -= min(self._scan, len(text) - place)
        if whole_end >= 0 and whole_end != end and (found := _parsed(text[place:whole_end])) is not None:
            return found, whole_end
        if short and not balanced and (found := repair(one)) is not None:
            return found, end
        if whole_end >= 0 and whole_end != end and (found := repair(text[place:whole_end])) is not None:
            return found, whole_end
        if not short:
            self._drop(one[:MAX_OPEN_BYTES], place, at_end=False)
            return None, end
        found, last_end = _before_closing(one, place)
        if found is not None:
            return found, last_end
        if whole_end < 0 and not final and len(text) - place < MAX_OPEN_BYTES:
            return None, -1
        at_end = final and end == len(text) and whole_end < 0
        found = None if at_end else without_args(one)
        if found is None:
            self._drop(one, place, at_end=at_end)
        return found, end

    def _drop(self, one: bytes, start: int, *, at_end: bool) -> None:
        stripped = one.lstrip(_SPACE)
        place, example = self._position + start + len(one) - len(stripped), _excerpt(stripped)
        self.dropped = self.dropped or (place, example)
        reason = "the file ends in the middle of an event, which was left out" if at_end else "events that are not JSON"
        self._problem(reason, offset=place, example=example)


def _parsed(text: bytes) -> _Found | None:
    try:
        return orjson.loads(b"[" + text + b"]"), text, []
    except orjson.JSONDecodeError:
        return None


def _skipped(text: bytes, place: int) -> int:
    """Behind blanks and commas."""
    found = _BLANK.match(text, place)
    return place if found is None else found.end()


def _object_end(text: bytes, place: int, limit: int) -> int:
    """Where the object ends that begins at ``place``; -1 if it does not within so many bytes, or none begins there."""
    depth = 0
    if text.startswith(b"{", place):
        for token in _TOKEN.finditer(text, place, place + limit):
            byte = token[0]
            if byte in (b"{", b"["):
                depth += 1
            elif byte in (b"}", b"]"):
                depth -= 1
                if not depth:
                    return token.end()
            elif token[1] is None:  # a text that does not end
                return -1
    return -1


def _before_closing(text: bytes, place: int) -> tuple[_Found | None, int]:
    """The last event of the array where a quotation mark is missing, so that only trying shows where it ends."""
    for bracket in islice(_LAST_BRACKET.finditer(text), _BRACKETS):
        found = _parsed(text[: bracket.start()]) or repair(text[: bracket.start()])
        if found is not None:
            return found, place + bracket.start()
    return None, -1


def _excerpt(text: bytes) -> str:
    return text[:80].decode("utf-8", "replace")
