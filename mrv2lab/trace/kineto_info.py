"""What stands around the events of a Chrome trace: clock, rank, devices, versions, everything else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import orjson

from mrv2lab.trace.json_chunks import EventStream
from mrv2lab.trace.json_repair import repair
from mrv2lab.trace.microseconds import LIMIT_NS
from mrv2lab.trace.trace import TraceInfo

_SPACE = b" \t\r\n"
_SIMPLE = re.compile(rb'"([A-Za-z_]\w{0,40})"\s*:\s*(-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|"[^"\\]{0,200}")\s*(?=[,}]|\Z)')
_VERSION = re.compile(r"(?:.*_)?version|schemaVersion")
_CONVERTED = ("nsys", "recording", "merged")
"""Producers of files that ``write_perfetto`` turned into this format."""
UNIX_NS = (1_420_070_400 * 10**9, 4_102_444_800 * 10**9)
"""2015 and 2100: absolute times lie between."""


def metadata(stream: EventStream, problem: Callable[..., None]) -> dict[str, Any]:
    """Top-level keys of the file but the events; of nested objects the inner ones win."""
    found: dict[str, Any] = {}
    for head in stream.heads:
        text = head.rstrip(_SPACE).removesuffix(b",") + b"}"
        found |= _object(text, problem, -1)
    found |= _behind(stream, problem)
    return found


def _behind(stream: EventStream, problem: Callable[..., None]) -> dict[str, Any]:
    tail = stream.tail.strip(_SPACE + b"\0")
    depth = len(stream.heads)
    if not stream.closed:
        problem("the array of events has no end: the file was cut off, or is still being written")
        return {}
    found: dict[str, Any] = {}
    while depth:
        if not tail:
            problem("the file ends before its closing brace", offset=stream.tail_offset)
            return found
        if tail.startswith(b"}"):
            tail = tail[1:].lstrip(_SPACE)
        else:
            values, tail = _rest_of_object(tail, problem, stream.tail_offset)
            found = values | found
        depth -= 1
    if tail:
        problem("bytes behind the end of the trace, not read", offset=stream.tail_offset, example=repr(tail[:40]))
    return found


def _rest_of_object(tail: bytes, problem: Callable[..., None], offset: int) -> tuple[dict[str, Any], bytes]:
    """``, "key": value, ...}`` and what follows it."""
    text = b"{" + tail.removeprefix(b",")
    try:
        return orjson.loads(text), b""
    except orjson.JSONDecodeError:
        pass
    try:
        readable = text.decode("utf-8", "replace")
        values, end = json.JSONDecoder(strict=False).raw_decode(readable)
        return values, readable[end:].lstrip().encode()
    except (ValueError, RecursionError):
        return _object(text, problem, offset), b""


def _object(text: bytes, problem: Callable[..., None], offset: int) -> dict[str, Any]:
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        mended = repair(text)
        if mended is not None and len(mended[0]) == 1:
            found = mended[0][0]
            problem("metadata that are not valid JSON, mended", offset=offset)
        else:
            # Whatever is a plain number or text; a base time matters more than a whole object.
            found = {key.decode(): _value(value) for key, value in _SIMPLE.findall(text)}
            problem("metadata that are not valid JSON, read in part", offset=offset)
    return found if isinstance(found, dict) else {}


def _value(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text.decode("utf-8", "replace")


def trace_info(
    found: dict[str, Any],
    *,
    title: str,
    path: str,
    kineto: bool,
    first_ns: int,
    flows: int,
    problem: Callable[..., None],
) -> TraceInfo:
    """From the metadata and the earliest time of the events."""
    extra = {key: value for key, value in found.items() if key not in ("deviceProperties", "baseTimeNanoseconds")}
    if flows:
        extra["flow_arrows"] = flows
    distributed = _dict(found.get("distributedInfo"))
    devices = found.get("deviceProperties")
    versions = {key: str(value) for key, value in found.items() if _VERSION.fullmatch(key)}
    if "nccl_version" in distributed:
        versions["nccl_version"] = str(distributed["nccl_version"])
    clock, origin = _clock(found.get("baseTimeNanoseconds"), first_ns, problem)
    # What write_perfetto or a profile of ours says: Chrome's format has no place for it.
    own = _dict(found.get("mrv2lab"))
    producer = "kineto" if kineto or "schemaVersion" in found else "chrome"
    if own.get("producer") in _CONVERTED:
        producer = str(own["producer"])
        extra = _dict(own.get("extra"))
        versions = {key: str(value) for key, value in _dict(own.get("versions")).items()}
    if clock == "unknown" and own.get("clock") in ("host", "session"):
        clock = str(own["clock"])
    return TraceInfo(
        producer=producer,
        title=own["title"] if isinstance(own.get("title"), str) else title,
        path=path,
        clock=clock,
        origin_ns=origin,
        rank=_rank(distributed.get("rank")),
        world_size=_rank(distributed.get("world_size")),
        devices=tuple(one for one in devices if isinstance(one, dict)) if isinstance(devices, list) else (),
        modelled=own.get("modelled") is True,
        versions=versions,
        extra=extra,
    )


def _clock(base: object, first_ns: int, problem: Callable[..., None]) -> tuple[str, int]:
    origin = _whole(base, 0)
    if UNIX_NS[0] <= first_ns < UNIX_NS[1]:
        if origin > 0:
            problem("a base time beside times that are absolute already, ignored")
        return "unix", 0
    return ("unix", origin) if 0 < origin < LIMIT_NS - abs(first_ns) else ("unknown", 0)


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _rank(value: object) -> int:
    found = _whole(value, -1)
    return found if 0 <= found < 1 << 31 else -1


def _whole(value: object, otherwise: int) -> int:
    try:
        return int(value)  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError, OverflowError):
        return otherwise
