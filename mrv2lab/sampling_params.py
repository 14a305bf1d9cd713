"""How to choose tokens for one request, checked where it is made: plain values without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MAX_ALLOWED_TOKENS = 1024
"""Allowed ids, and biased ids, of one request: columns of their tables."""
MAX_STOP_TOKENS = 128
"""Stop ids (EOS included) that ``min_tokens`` can hold back."""
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 1024
"""All tokens of one request's bad words."""

_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class StructuredOutput:
    """What the text must conform to: exactly one of a JSON schema (text or dictionary), a regular expression, or a list
    of texts. Needs ``pip install -e '.[grammar]'`` and a model with a tokenizer."""

    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("json_schema", "regex", "choice") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"structured output is one of json_schema, regex, choice; got {given or 'none of them'}")
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        if self.regex is not None and not isinstance(self.regex, str):
            raise ValueError(f"regex must be a text, got {self.regex!r}")
        if self.choice is not None:
            choice: Any = self.choice
            texts = (choice,) if isinstance(choice, str) else tuple(choice)
            if not texts or not all(isinstance(text, str) and text for text in texts):
                raise ValueError(f"choice must be one or more texts that are not empty, got {self.choice!r}")
            object.__setattr__(self, "choice", texts)


def _schema_text(schema: Any) -> str:
    if not isinstance(schema, str):
        try:
            schema = json.dumps(dict(schema))
        except (TypeError, ValueError) as error:
            raise ValueError(f"json_schema must be a text or a dictionary of plain values: {error}") from error
    try:
        json.loads(schema)
    except ValueError as error:
        raise ValueError(f"json_schema is no JSON: {error}") from error
    return str(schema)


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens for one request. The stages that these feed, and their order: ``sample/sampler.py``.

    Raises ``ValueError`` naming the field, the value and the range when a value is out of range, and both fields where
    two contradict each other. What needs the vocabulary or a tokenizer is checked at submit.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    """0 = greedy (ties to the lowest id)."""
    seed: int | None = None
    """None: the engine draws one at submit. Same seed, position and logits give the same token, always."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_k: int = 0
    """Keep the k greatest logits, ties at the cut to the lowest ids, so exactly k; 0 = all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens (of those that top_k kept) whose probability reaches p; (0, 1]."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the most likely one; [0, 1]."""
    repetition_penalty: float = 1.0
    """Tokens of prompt and output: a positive logit is divided by it, a negative one multiplied; > 0."""
    frequency_penalty: float = 0.0
    """Taken off once for each time that the token was generated; [-2, 2]."""
    presence_penalty: float = 0.0
    """Taken off if the token was generated at all; [-2, 2]."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> what is added to its logit; [-100, 100]."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these; None = all."""
    min_tokens: int = 0
    """No stop token (EOS included) and no stop string before this many tokens; <= max_tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end the request where they appear."""
    include_stop_str_in_output: bool = False
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    """Texts, or sequences of token ids, that never appear in the output."""
    logprobs: int | None = None
    """Log-probabilities of this many most likely tokens and of the chosen one; -1 = of the whole vocabulary."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first; such a request takes no prefix hit."""
    structured_output: StructuredOutput | None = None
    extra_args: Mapping[str, Any] = field(default_factory=dict)
    """For custom processors; see ``protocol.LogitsProcessor``."""

    def __post_init__(self) -> None:
        self._check_ranges()
        if self.seed is not None and not (_is_int(self.seed) and -(2**63) <= self.seed < 2**63):
            raise ValueError(f"seed must be None or a 64-bit integer, got {self.seed!r}")
        _set(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            allowed = tuple(dict.fromkeys(_token_ids("allowed_token_ids", self.allowed_token_ids)))
            if not 1 <= len(allowed) <= MAX_ALLOWED_TOKENS:
                raise ValueError(
                    f"allowed_token_ids must be 1 to {MAX_ALLOWED_TOKENS} token ids or None (all); got {len(allowed)}"
                )
            _set(self, "allowed_token_ids", allowed)
        _set(self, "logit_bias", _bias(self.logit_bias))
        _set(self, "stop", _texts("stop", self.stop))
        _set(self, "bad_words", _bad_words(self.bad_words))
        if self.structured_output is not None and not isinstance(self.structured_output, StructuredOutput):
            raise ValueError(f"structured_output must be a StructuredOutput or None, got {self.structured_output!r}")
        if not isinstance(self.extra_args, Mapping) or not all(isinstance(key, str) for key in self.extra_args):
            raise ValueError(f"extra_args must be a dictionary with names as keys, got {self.extra_args!r}")
        _set(self, "extra_args", dict(self.extra_args))

    def _check_ranges(self) -> None:
        _integer("max_tokens", self.max_tokens, 1)
        _real("temperature", self.temperature, 0, _FLOAT32_MAX)
        _integer("top_k", self.top_k, 0)
        _real("top_p", self.top_p, 0, 1, above=True)
        _real("min_p", self.min_p, 0, 1)
        _real("repetition_penalty", self.repetition_penalty, 0, _FLOAT32_MAX, above=True)
        _real("frequency_penalty", self.frequency_penalty, -2, 2)
        _real("presence_penalty", self.presence_penalty, -2, 2)
        _integer("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), -1)

    @property
    def uses_penalties(self) -> bool:
        """Whether counts of earlier tokens matter."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


def _set(params: SamplingParams, name: str, value: object) -> None:
    object.__setattr__(params, name, value)


def _is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _integer(name: str, value: object, least: int) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")


def _real(name: str, value: object, low: float, high: float, above: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not (low < value if above else low <= value) or not value <= high or not math.isfinite(value):
        upper = "finite, as float32" if high == _FLOAT32_MAX else f"<= {high:g}"
        raise ValueError(f"{name} must be {'>' if above else '>='} {low:g} and {upper}, got {value!r}")


def _token_ids(name: str, ids: Any) -> tuple[int, ...]:
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        raise ValueError(f"{name} must be a sequence of token ids, got {ids!r}")
    # Any iterable is welcome, once: a generator would be empty when it is read again.
    found = tuple(ids)
    for token in found:
        if not _is_int(token) or token < 0:
            raise ValueError(f"{name} must be token ids >= 0, got {token!r}")
    return tuple(int(token) for token in found)


def _bias(bias: Any) -> Mapping[int, float]:
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias must be a dictionary of token id -> number, got {bias!r}")
    if len(bias) > MAX_ALLOWED_TOKENS:
        raise ValueError(f"logit_bias may name {MAX_ALLOWED_TOKENS} tokens at most, got {len(bias)}")
    _token_ids("logit_bias", bias)
    for token, value in bias.items():
        _real(f"logit_bias[{token}]", value, -100, 100)
    return {int(token): float(value) for token, value in bias.items()}


def _texts(name: str, texts: Any) -> tuple[str, ...]:
    found: tuple[Any, ...] = (texts,) if isinstance(texts, str) or not isinstance(texts, Iterable) else tuple(texts)
    for text in found:
        if not isinstance(text, str) or not text:
            raise ValueError(f"{name} must be texts that are not empty, got {text!r} in {texts!r}")
    return found


def _bad_words(words: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(words, str):
        words = (words,)
    if not isinstance(words, Iterable):
        raise ValueError(f"bad_words must be texts or sequences of token ids, got {words!r}")
    found: list[str | tuple[int, ...]] = []
    for word in words:
        one = word if isinstance(word, str) else _token_ids("bad_words", word)
        if not one:
            raise ValueError(f"bad_words must not hold an empty one, got {words!r}")
        found.append(one)
    if len(found) > MAX_BAD_WORDS:
        raise ValueError(f"bad_words may be {MAX_BAD_WORDS} at most, got {len(found)}")
    return tuple(found)
