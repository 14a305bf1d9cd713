"""The events of a clean piece of a trace, decoded straight into typed structures: no dictionary for an event.

What these types do not say of an event (a name that is no text, a length that is missing, a range in two halves) is
read event by event (:mod:`mrv2lab.trace.kineto`); so is a piece that is not JSON. Both ways give the same columns.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

Time = TypeVar("Time", float, Raw)
Id: TypeAlias = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | str
NO_ARGS = Raw(b"{}")


class Complete(Struct, Generic[Time], tag_field="ph", tag="X", gc=False):
    """A whole range."""

    cat: str
    name: str
    pid: Id
    tid: Id
    ts: Time
    dur: Time
    args: Raw = NO_ARGS


class Moment(Struct, Generic[Time], tag_field="ph", tag="i", gc=False):
    """An instant of a thread."""

    cat: ClassVar[None] = None
    dur: ClassVar[bytes] = b"0"
    name: str
    pid: Id
    tid: Id
    ts: Time
    args: Raw = NO_ARGS


class Metadata(Struct, tag_field="ph", tag="M", gc=False):
    """A name or a place of a process or thread."""

    name: Any = None
    pid: Id | None = None
    tid: Id | None = None
    args: Any = None


class _Starting(Struct, tag_field="ph", tag="s", gc=False):
    """An arrow; nothing of it is read."""


class _Passing(Struct, tag_field="ph", tag="t", gc=False):
    """The same on its way."""


class _Ending(Struct, tag_field="ph", tag="f", gc=False):
    """The same at its end."""


class Args(Struct, gc=False):
    """Those arguments that become columns."""

    correlation: int = -1
    device: Id | UnsetType = UNSET
    stream: Id | UnsetType = UNSET
    bytes: Any = UNSET
    Bytes: Any = UNSET
    nbytes: Any = UNSET


class Typed(NamedTuple):
    """The events of a piece, in the order of the file."""

    timed: list[Any]
    """``Complete`` and ``Moment``."""
    metadata: list[Metadata]
    arrows: int
    """How many there are."""


_TIMED = frozenset({Complete, Moment})
_OTHER: TypeAlias = Metadata | _Starting | _Passing | _Ending
_DOUBLES = msgspec.json.Decoder(list[Complete[float] | Moment[float] | _OTHER])
_TEXTS = msgspec.json.Decoder(list[Complete[Raw] | Moment[Raw] | _OTHER])
_ARGS = msgspec.json.Decoder(list[Args])
_EACH = msgspec.json.Decoder(list[Raw])


def decoded(text: bytes, *, exact: bool) -> Typed | None:
    """The events of a JSON array, their times as texts if ``exact``, else as doubles. None: something else is in it."""
    if not text.isascii() and not _is_utf8(text):  # of what it skips the decoder does not look at this
        return None
    try:
        events: list[Any] = (_TEXTS if exact else _DOUBLES).decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    timed = [event for event in events if type(event) in _TIMED]
    metadata = [event for event in events if type(event) is Metadata] if len(timed) < len(events) else []
    return Typed(timed, metadata, len(events) - len(timed) - len(metadata))


def decoded_args(texts: list[Raw]) -> tuple[list[Args], list[Raw]] | None:
    """Of JSON objects what becomes columns, and each without blanks. None: one is no object, or an odd one."""
    try:
        # An indented file is blanks for the greater part, and these texts are kept.
        whole = msgspec.json.format(b"[%b]" % b",".join(texts), indent=-1)
        return _ARGS.decode(whole), _EACH.decode(whole)
    except (msgspec.DecodeError, RecursionError):
        return None


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
