"""Mends one piece of JSON that no parser takes: what profilers are known to write, one remedy after the other."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import orjson

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_CONTROL = re.compile(rb"[\x00-\x1f]")
_CONTROL_IN_TEXT = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]|[^{}\[\],\s][ \t]*[\t\r\n](?!\s*[}\]])")
"""What looks like one in a text: the blanks of a pretty print stand beside punctuation."""
_CONTROL_OUTSIDE = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
_BAD_ESCAPE = re.compile(rb'\\(?:(["\\/bfnrt]|u[0-9a-fA-F]{4})|(.?))', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_NOT_FINITE = re.compile(rb"(?<![\w.])[-+]?(?:inf(?:inity)?|nan(?:\([\w]*\))?)(?![\w.])", re.IGNORECASE)
_TRAILING_COMMA = re.compile(rb",(\s*[}\]])")
_KEYS = rb"ph|cat|name|pid|tid|ts|dur|args|id|bp|s"
_UNOPENED_KEY = re.compile(rb"([{,]\s*)(" + _KEYS + rb')"\s*:')
_UNCLOSED_KEY = re.compile(rb'([{,]\s*)"(' + _KEYS + rb")\s*:")
_NAME = re.compile(rb'("(?:name|cat)"\s*:\s*")(.{0,8000}?)(?="\s*(?:,\s*"(?:' + _KEYS + rb')"\s*:|\}))', re.DOTALL)
_LONG_BYTES = 64 << 10
_INNER_QUOTE = re.compile(rb'\\.|"', re.DOTALL)
_ARGS = re.compile(rb'"args"\s*:\s*\{')


def repair(text: bytes) -> tuple[list[Any], bytes, list[str]] | None:
    """The values of ``[text]``, the text that gives them, and a sentence for each remedy; None if none helps.

    ``text`` is one event (or a few), without the brackets of the array.
    """
    reasons: list[str] = []
    for reason, remedy in REMEDIES:
        mended = remedy(text)
        if mended == text:
            continue
        text = mended
        reasons.append(reason)
        try:
            return orjson.loads(b"[" + text + b"]"), text, reasons
        except orjson.JSONDecodeError:
            pass
    return None


def without_args(text: bytes) -> tuple[list[Any], bytes, list[str]] | None:
    """The last resort: the event up to its arguments, which are usually what is broken and usually come last."""
    found = _ARGS.search(text)
    if found is None:
        return None
    text = text[: found.start()].rstrip(b", \t\r\n") + b"}"
    reason = "arguments that are not valid JSON, left out"
    try:
        return orjson.loads(b"[" + text + b"]"), text, [reason]
    except orjson.JSONDecodeError:
        mended = repair(text)
        return None if mended is None else (mended[0], mended[1], [*mended[2], reason])


def _outside(text: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """The text with everything but its strings changed."""
    pieces, end = [], 0
    for string in _STRING.finditer(text):
        pieces += [change(text[end : string.start()]), string.group()]
        end = string.end()
    return b"".join([*pieces, change(text[end:])])


def _inside(text: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """The text with its strings changed."""
    return _STRING.sub(lambda string: change(string.group()), text)


def _valid_utf8(text: bytes) -> bytes:
    return text.decode("utf-8", "replace").encode()


def _escaped_controls(text: bytes) -> bytes:
    return _all_controls_escaped(text) if _CONTROL_IN_TEXT.search(text) else text


def _all_controls_escaped(text: bytes) -> bytes:
    escaped = _inside(text, lambda string: _CONTROL.sub(lambda one: b"\\u%04x" % one.group()[0], string))
    return _outside(escaped, lambda gap: _CONTROL_OUTSIDE.sub(b" ", gap))


def _null_for_not_finite(text: bytes) -> bytes:
    if b"\\\\" in text or len(text) > _LONG_BYTES:
        return _outside(text, lambda gap: _NOT_FINITE.sub(b"null", gap))

    def one(found: re.Match[bytes]) -> bytes:
        quotes = text.count(b'"', 0, found.start()) - text.count(b'\\"', 0, found.start())
        return found.group() if quotes % 2 else b"null"

    return _NOT_FINITE.sub(one, text)


def _valid_escapes(text: bytes) -> bytes:
    def one(found: re.Match[bytes]) -> bytes:
        return found.group() if found.group(1) else b"\\\\" + found.group(2)

    text = _inside(text, lambda string: _BAD_ESCAPE.sub(one, string))
    return _SURROGATE.sub(lambda found: found.group() if len(found.group()) > 6 else b"\\ufffd", text)


def _escaped_quotes(text: bytes) -> bytes:
    def quote(found: re.Match[bytes]) -> bytes:
        return b'\\"' if found.group() == b'"' else found.group()

    if len(text) > _LONG_BYTES:  # the pattern looks far ahead from every name
        return text
    return _NAME.sub(lambda found: found[1] + _INNER_QUOTE.sub(quote, found[2]), text)


def _quoted_keys(text: bytes) -> bytes:
    return _UNCLOSED_KEY.sub(rb'\1"\2":', _UNOPENED_KEY.sub(rb'\1"\2":', text))


def _no_trailing_commas(text: bytes) -> bytes:
    return _outside(text, lambda gap: _TRAILING_COMMA.sub(rb"\1", gap)).strip(b", \t\r\n")


REMEDIES: tuple[tuple[str, Callable[[bytes], bytes]], ...] = (
    ("bytes that are not UTF-8, replaced", _valid_utf8),
    ("control characters in a text, escaped", _escaped_controls),
    ("inf or nan where JSON has no word for it, read as null", _null_for_not_finite),
    ("commas too many, left out", _no_trailing_commas),
    ("backslashes that escape nothing, doubled", _valid_escapes),
    ("quotation marks inside a name, escaped", _escaped_quotes),
    ("keys without both quotation marks, mended", _quoted_keys),
    # A missing quotation mark hides what is inside a text and what is not: the same once more.
    ("control characters in a text, escaped", _all_controls_escaped),
    ("inf or nan where JSON has no word for it, read as null", _null_for_not_finite),
)
