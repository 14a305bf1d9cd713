"""Structured output: what a request may sample next so that its text conforms to a schema, a pattern or a list.

The grammar itself is llguidance's (``pip install -e '.[grammar]'``); here is who follows it and when. A matcher
catches up with its request's known outputs whenever a step is settled, so preemption, resumption and tokens that come
late need no care.

Counterpart in vLLM: ``v1/structured_output/backend_guidance.py`` and ``v1/structured_output/__init__.py``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from mrv2lab.engine.request import Request
from mrv2lab.model.tokenizer import Tokenizer
from mrv2lab.protocol import GrammarOutput, SchedulerOutput, StructuredOutput

Bits = np.ndarray[Any, np.dtype[np.int32]]

_JSON_FORMAT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""As ``json.dumps`` writes. Free white space would be legal JSON too, and a small model would write nothing else."""
_NOTHING = "NoExtension"
"""How llguidance names a grammar that no text satisfies and that only its first mask gives away."""


class Matcher:
    """One request's place in its grammar. W = ceil(V / 32) words of bits; bit 0 of a word is its lowest token."""

    def __init__(self, native: Any) -> None:
        self._native = native
        self.num_accepted = 0
        """Outputs that it has seen."""

    def accept(self, tokens: Sequence[int]) -> str | None:
        """Go on by the outputs that are new; why the first misfit does not fit, or None."""
        self.num_accepted += len(tokens)
        for token in tokens:  # at once, the library would not take the end of a text that had to end there
            if not self._native.consume_token(token):
                return f"the output left its grammar: {_one_line(self._native.get_error())}"
        return None

    def fill(self, rows: Bits, drafts: Sequence[int] = ()) -> None:
        """``rows`` int32[K + 1, W]: what may follow the outputs, then what may follow each of ``drafts`` as well.

        A row behind a draft that does not fit, or is unknown here (-1), allows everything: it will not be used.
        """
        rows[1:] = -1
        self._fill_row(rows[0])
        accepted = 0
        for draft in drafts:
            if draft < 0 or not self._native.validate_tokens([draft]):
                break
            self._native.consume_token(draft)
            accepted += 1
            self._fill_row(rows[accepted])
        if accepted:
            self._native.rollback(accepted)

    def _fill_row(self, row: Bits) -> None:
        self._native.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

    def allowed(self, vocab_size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Ids of the tokens that may come next."""
        row = np.zeros((1, -(-vocab_size // 32)), np.int32)
        self.fill(row)
        return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


class GrammarCompiler:
    """Makes matchers for one vocabulary; the latest 64 grammars are kept compiled."""

    def __init__(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self._tokenizer: Tokenizer | None = None
        self._native_tokenizer: Any = None
        self._compiled = lru_cache(maxsize=64)(self._compile)

    def matcher(self, wanted: StructuredOutput, tokenizer: Tokenizer) -> Matcher:
        """A fresh matcher at the beginning of its grammar.

        Raises ``ValueError`` with the library's reason for a grammar that is invalid, and for one that no text
        satisfies; where llguidance is missing it says how to get it.
        """
        if self._tokenizer is not tokenizer:
            self._native_tokenizer, self._tokenizer = self._load(tokenizer), tokenizer
            self._compiled.cache_clear()
        return Matcher(self._compiled(wanted).deep_copy())

    def _load(self, tokenizer: Tokenizer) -> Any:
        native = _library()
        if not self.eos_token_ids:
            raise ValueError("structured_output needs a model with an end-of-text token: nothing else ends its text")
        try:
            return native.LLTokenizer(
                tokenizer.backend.to_str(), n_vocab=self.vocab_size, eos_token=list(self.eos_token_ids)
            )
        except Exception as error:  # the library raises plain ones
            raise ValueError(f"llguidance cannot use this model's tokenizer: {_one_line(str(error))}") from error

    def _compile(self, wanted: StructuredOutput) -> Any:
        kind = next(name for name in ("json_schema", "regex", "choice") if getattr(wanted, name) is not None)
        native = _library()
        try:
            grammar = self._grammar(native.LLMatcher, wanted)
            matcher = native.LLMatcher(self._native_tokenizer, grammar, log_level=0)
            if not matcher.is_error():
                matcher.compute_bitmask()  # what no text satisfies may show only here
        except Exception as error:
            raise ValueError(f"structured_output.{kind} is invalid: {_one_line(str(error))}") from error
        if not matcher.is_error():
            return matcher
        reason = _one_line(matcher.get_error())
        if reason.startswith((_NOTHING, "Unsatisfiable")):
            raise ValueError(f"structured_output.{kind} allows nothing: no text satisfies it ({reason})")
        raise ValueError(f"structured_output.{kind} is invalid: {reason}")

    @staticmethod
    def _grammar(factory: Any, wanted: StructuredOutput) -> str:
        if wanted.json_schema is not None:
            schema = str(wanted.json_schema)
            # Only an object can say how it is written; ``true`` allows what ``{}`` allows.
            schema = "{}" if schema.strip() == "true" else schema
            return str(factory.grammar_from_json_schema(schema, _JSON_FORMAT if schema.lstrip()[:1] == "{" else None))
        if wanted.regex is not None:
            return str(factory.grammar_from_regex(wanted.regex))
        assert wanted.choice is not None
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in wanted.choice)
        return str(factory.grammar_from_lark(f"start: {texts}"))


Follower = tuple[Request, Matcher]


class Grammars:
    """Who follows a grammar: the matchers of the live requests, and the masks of a step.

    ``depth`` steps may be in flight: as many masks are kept in turn, since a mask may be copied late.
    """

    def __init__(self, vocab_size: int, num_drafts: int = 0, depth: int = 1) -> None:
        self._words = -(-vocab_size // 32)
        self._width = num_drafts + 1
        self._masks = [np.empty((0, self._width, self._words), np.int32) for _ in range(max(depth, 1))]
        self._turn = 0
        # Requests, not ids: an id may be submitted again while a step of its first life is in flight.
        self._followers: dict[str, Follower] = {}

    def add(self, request: Request, matcher: Matcher) -> None:
        """Let ``matcher`` follow ``request`` until it ends."""
        self._followers[request.req_id] = (request, matcher)

    def follow(self) -> dict[str, str]:
        """Let every matcher catch up with its request; the ids of those whose output does not fit, and why."""
        misfits: dict[str, str] = {}
        for req_id, (request, matcher) in list(self._followers.items()):
            if request.finished:
                del self._followers[req_id]
            new = request.all_token_ids[request.num_prompt_tokens + matcher.num_accepted :]
            if (why := matcher.accept(new)) is not None:
                misfits[req_id] = why
        return misfits

    def sampling(self, schedule: SchedulerOutput) -> list[Follower]:
        """Whose tokens ``schedule`` samples; to be asked right behind it, before the next one."""
        counts = schedule.num_scheduled_tokens
        return [
            (request, matcher)
            for req_id, (request, matcher) in self._followers.items()
            if req_id in counts and not request.finished and not request.is_prefill_chunk
        ]

    @staticmethod
    def waiting(followers: Sequence[Follower], schedule: SchedulerOutput) -> bool:
        """Whether a step in flight still owes one of them the token that its mask depends on."""
        drafts = schedule.scheduled_draft_tokens
        return any(
            request.num_output_placeholders > 1 + len(drafts.get(request.req_id, ()))
            for request, _ in followers
            if not request.finished
        )

    def output(self, followers: Sequence[Follower], schedule: SchedulerOutput) -> GrammarOutput | None:
        """The masks of those that have not ended since; None if all have. What they sampled must be known."""
        alive = [(request, matcher) for request, matcher in followers if not request.finished]
        if not alive:
            return None
        self._turn = (self._turn + 1) % len(self._masks)
        if len(self._masks[self._turn]) < len(alive):
            self._masks[self._turn] = np.empty((len(alive), self._width, self._words), np.int32)
        mask = self._masks[self._turn][: len(alive)]
        for rows, (request, matcher) in zip(mask, alive, strict=True):
            matcher.fill(rows, schedule.scheduled_draft_tokens.get(request.req_id, ()))
        return GrammarOutput([request.req_id for request, _ in alive], mask)


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ValueError("structured_output needs llguidance: pip install -e '.[grammar]'") from error
    return llguidance


def _one_line(message: str) -> str:
    """The library's sentence without the dump of its state."""
    return " ".join(message.partition("<state>")[0].split())
