"""What a request may ask of this engine: everything that needs its vocabulary, tokenizer or model, checked at submit.

What needs none of them is checked where :class:`SamplingParams` is made. A refusal harms nobody: nothing was queued.

Counterpart in vLLM: ``v1/engine/input_processor.py`` and ``sampling_params.py``, SamplingParams.verify.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mrv2lab.config import ModelConfig
from mrv2lab.engine.grammar import GrammarCompiler, Matcher
from mrv2lab.engine.prompt import Prompt, token_ids_of
from mrv2lab.engine.request import Request
from mrv2lab.model.tokenizer import Tokenizer
from mrv2lab.protocol import LogitsFunction, LogitsProcessor, SamplingParams
from mrv2lab.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_STOP_TOKENS


class Intake:
    """Makes requests of what users give, for one model. ``max_logprobs``: the most that one may ask for; -1 = all."""

    def __init__(self, model: ModelConfig, max_logprobs: int, processors: Sequence[LogitsProcessor]) -> None:
        if not isinstance(max_logprobs, int) or isinstance(max_logprobs, bool) or max_logprobs < -1:
            raise ValueError(f"max_logprobs must be an integer >= 0, or -1 (no limit), got {max_logprobs!r}")
        if not isinstance(processors, (list, tuple)):
            raise ValueError(f"logits_processors must be a list of logits processors, got {processors!r}")
        self.processors: tuple[LogitsProcessor, ...] = tuple(processors)
        for processor in self.processors:
            if isinstance(processor, type) or not callable(getattr(processor, "make", None)):
                raise ValueError(f"a logits processor is an object with a method make(params), got {processor!r}")
        self.vocab_size = model.vocab_size
        self.eos_token_ids = tuple(model.eos_token_ids)
        self.max_logprobs = max_logprobs
        self.compiler = GrammarCompiler(model.vocab_size, model.eos_token_ids)

    def tokens(self, prompt: Prompt, tokenizer: Tokenizer | None) -> tuple[list[int], str | None]:
        """Token ids of a prompt, inside the vocabulary, and its text if it was one. Raises ``ValueError``."""
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, str):
            if tokenizer is None:
                raise ValueError("this model has no tokenizer: give the prompt as token ids")
            if not prompt:  # though a tokenizer may put a token before it
                raise ValueError("the prompt is empty; give some text, or token ids")
            ids = tokenizer.encode(prompt)
        else:
            ids = token_ids_of(prompt)
        self._inside("the prompt", (min(ids, default=0), max(ids, default=0)))
        return ids, text

    def request(
        self,
        request_id: Any,
        token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        priority: Any = 0,
    ) -> tuple[Request, Matcher | None]:
        """The request, and its matcher if its output is structured; it is queued nowhere yet.

        Raises ``ValueError`` naming what is wrong, and both sides where two wishes contradict each other.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams or None, got {params!r}")
        _check_id(request_id)
        if not isinstance(priority, (int, np.integer)):
            raise ValueError(f"priority must be an integer (lower goes first), got {priority!r}")
        params = self._with_bad_words(params, tokenizer)
        self._check_ids(params)
        self._check_logprobs(params)
        if params.stop and tokenizer is None:
            raise ValueError(
                f"stop strings need a tokenizer, which this model lacks; use stop_token_ids: {params.stop}"
            )
        request = Request(
            request_id,
            token_ids,
            params,
            eos_token_ids=self.eos_token_ids,
            arrival_time=time.monotonic(),
            priority=int(priority),
        )
        if params.min_tokens and len(request.stop_set) > MAX_STOP_TOKENS:
            raise ValueError(
                f"min_tokens can hold back {MAX_STOP_TOKENS} stop tokens at most, EOS included; got "
                f"{len(request.stop_set)} in stop_token_ids"
            )
        matcher = None
        if params.structured_output is not None:
            if tokenizer is None:
                raise ValueError("structured_output needs a tokenizer, which this model lacks")
            if params.ignore_eos:
                raise ValueError("ignore_eos contradicts structured_output, which ends by an end-of-text token")
            matcher = self.compiler.matcher(params.structured_output, tokenizer)
        self._check_something_is_left(params, request.stop_set, matcher)
        request.processors = self._functions(params)
        return request, matcher

    def _inside(self, name: str, ids: Iterable[int]) -> None:
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"{name}: token id {token} is outside the vocabulary of {self.vocab_size} "
                    f"(ids 0..{self.vocab_size - 1})"
                )

    def _check_ids(self, params: SamplingParams) -> None:
        self._inside("stop_token_ids", params.stop_token_ids)
        self._inside("logit_bias", params.logit_bias)
        self._inside("allowed_token_ids", params.allowed_token_ids or ())
        for word in params.bad_words:
            self._inside("bad_words", (token for token in word if isinstance(token, int)))

    def _check_logprobs(self, params: SamplingParams) -> None:
        cap = self.vocab_size if self.max_logprobs == -1 else min(self.max_logprobs, self.vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            if asked is None or (asked if asked != -1 else self.vocab_size) <= cap:
                continue
            told = f"{asked} (all {self.vocab_size})" if asked == -1 else str(asked)
            if cap == self.vocab_size:
                raise ValueError(f"{name} must be at most the vocabulary's {cap}, or -1 for all; got {told}")
            raise ValueError(
                f"{name} must be at most max_logprobs = {cap}, got {told}; make the engine with a higher max_logprobs, "
                "or with -1 for no limit"
            )

    def _with_bad_words(self, params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
        """``params`` with every bad word as token ids.

        A text is forbidden as it stands at the beginning and behind a space: most tokenizers have other tokens for
        either. (vLLM adds the second only where it has as many tokens as the first.)
        """
        if not params.bad_words:
            return params
        words: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            for ids in [word] if isinstance(word, tuple) else _spellings(word, tokenizer):
                words[ids] = None
        if len(words) > MAX_BAD_WORDS:
            raise ValueError(
                f"bad_words may be {MAX_BAD_WORDS} token sequences at most, got {len(words)}; a text makes two, with "
                "and without a space before it"
            )
        total = sum(map(len, words))
        if total > MAX_BAD_WORD_TOKENS:
            raise ValueError(f"bad_words may have {MAX_BAD_WORD_TOKENS} tokens together, got {total}")
        return dataclasses.replace(params, bad_words=tuple(words))

    def _check_something_is_left(self, params: SamplingParams, stops: frozenset[int], matcher: Matcher | None) -> None:
        """Some token must be possible: first of all under the masks together, then, for a grammar, to end the text."""
        banned = {word[0] for word in params.bad_words if len(word) == 1}
        held = stops if params.min_tokens else frozenset()
        why = [name for name, on in (("bad_words", banned), (f"min_tokens {params.min_tokens}", held)) if on]
        if params.allowed_token_ids is not None:
            allowed = set(params.allowed_token_ids)
            if allowed <= banned | held:
                raise ValueError(f"allowed_token_ids {_few(allowed)} contradicts {' and '.join(why)}: no token is left")
            why.insert(0, "allowed_token_ids")
        else:
            allowed = None
            if len(banned | held) >= self.vocab_size:
                raise ValueError(f"{' and '.join(why)} forbid the whole vocabulary: no token is left")
        if matcher is None:
            return
        first = set(matcher.allowed(self.vocab_size).tolist())
        left = (first if allowed is None else first & allowed) - banned
        # Where the grammar allows nothing but the end, ending wins over min_tokens.
        if not left:
            raise ValueError(
                f"structured_output contradicts {' and '.join(why)}: none of the tokens that may come first is left "
                f"({_few(first)})"
            )
        ends = set(self.eos_token_ids) - banned
        if not (ends if allowed is None else ends & allowed):
            raise ValueError(
                f"structured_output contradicts {' and '.join(why)}: the end-of-text token {_few(self.eos_token_ids)} "
                "must be possible, since nothing else ends its text"
            )

    def _functions(self, params: SamplingParams) -> tuple[LogitsFunction, ...]:
        made = []
        for processor in self.processors:
            name = type(processor).__name__
            try:
                function = processor.make(params)
            except Exception as error:
                raise ValueError(
                    f"logits processor {name} refused the request: {type(error).__name__}: {error}"
                ) from error
            if function is not None and not callable(function):
                raise ValueError(f"logits processor {name}: make() must return a function or None, got {function!r}")
            if function is not None:
                made.append(function)
        return tuple(made)


def _check_id(request_id: Any) -> None:
    if not isinstance(request_id, str):  # ids of two types could not be sorted in the middle of a step
        raise ValueError(f"a request id is a string, got {request_id!r}")
    if not request_id:
        raise ValueError("a request id has at least one character; leave it out and the engine makes one")
    if any("\ud800" <= letter <= "\udfff" for letter in request_id):  # no file and no page could hold it
        raise ValueError(f"request id {request_id!r} holds half of a surrogate pair; give one of whole characters")


def _spellings(word: str, tokenizer: Tokenizer | None) -> list[tuple[int, ...]]:
    """Token ids of ``word`` at the beginning of a text, and behind a space."""
    if tokenizer is None:
        raise ValueError(f"bad_words given as text need a tokenizer, which this model lacks; give token ids: {word!r}")
    bare = word.lstrip()
    texts = (bare, f" {bare}") if bare else (word,)
    made = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    if not all(made):
        raise ValueError(f"bad_words: the text {word!r} has no tokens")
    return made


def _few(ids: Iterable[int]) -> str:
    """Some ids, ascending, and how many more there are."""
    ordered: Sequence[int] = sorted(ids)
    more = f", ... {len(ordered) - 8} more" if len(ordered) > 8 else ""
    return f"[{', '.join(map(str, ordered[:8]))}{more}]"
