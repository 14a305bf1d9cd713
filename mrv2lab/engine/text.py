"""From a request's tokens to its text as it comes: stop strings, and what must be held back because of them.

Counterpart in vLLM: ``v1/engine/detokenizer.py``, BaseIncrementalDetokenizer.update and check_stop_strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from mrv2lab.protocol import SamplingParams


class Decoder(Protocol):
    """What turns tokens into certain text; ``model.tokenizer.StreamDecoder``. Unfinished characters stay inside."""

    def add(self, token_ids: Sequence[int], /) -> str: ...

    def flush(self) -> str: ...


class NewText(NamedTuple):
    """What tokens brought. ``stop`` is the stop string they completed, None if none; ``num_tokens`` of them count:
    those up to the one that completed it."""

    text: str
    num_tokens: int
    stop: str | None


class TextStream:
    """One request's text. What may still turn out to be the beginning of a stop string is held back, and no more.

    A stop string counts where it ends in text that came with a token behind the first ``min_tokens``. Of several, the
    one that ends first counts, and of those the longest: the same however the text is cut into tokens.
    """

    def __init__(self, decoder: Decoder, params: SamplingParams) -> None:
        self._decoder = decoder
        self._stops = params.stop
        self._keep = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._held = ""
        """The end of the text: a proper beginning of a stop string."""

    def add(self, token_ids: Sequence[int]) -> NewText:
        """The text that is certain now and was not given out before (possibly empty)."""
        if not self._stops:
            return NewText(self._decoder.add(token_ids), len(token_ids), None)
        given = ""
        for count, token in enumerate(token_ids, 1):
            self._num_tokens += 1
            new = self._decoder.add([token])
            if not new:
                continue
            before, text = len(self._held), self._held + new
            if self._num_tokens > self._min_tokens and (found := self._find(text, before)) is not None:
                start, end = found
                self._held, self._decoder = "", _Ended()
                return NewText(given + text[: end if self._keep else start], count, text[start:end])
            held = self._longest_beginning(text)
            self._held = text[len(text) - held :]
            given += text[: len(text) - held]
        return NewText(given, len(token_ids), None)

    def flush(self) -> str:
        """What was held back, at the request's end."""
        text, self._held = self._held + self._decoder.flush(), ""
        return text

    def _find(self, text: str, before: int) -> tuple[int, int] | None:
        """(start, end) of the stop string in ``text`` that ends first behind its first ``before`` characters."""
        found = []
        for stop in self._stops:
            start = text.find(stop, max(before - len(stop) + 1, 0))
            if start >= 0:
                found.append((start + len(stop), start))
        end, start = min(found, default=(-1, -1))
        return (start, end) if end >= 0 else None

    def _longest_beginning(self, text: str) -> int:
        """Characters at the end of ``text`` with which some stop string begins, without being all of it."""
        longest = min(max(map(len, self._stops)) - 1, len(text))
        for length in range(longest, 0, -1):
            end = text[-length:]
            if any(len(stop) > length and stop.startswith(end) for stop in self._stops):
                return length
        return 0


class _Ended:
    """The decoder of a text that is over: what it still held lies behind the stop string."""

    def add(self, token_ids: Sequence[int], /) -> str:
        return ""

    def flush(self) -> str:
        return ""
