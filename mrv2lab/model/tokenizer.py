"""Text <-> token ids, by the ``tokenizers`` package; from ``tokenizer.json`` or from a GGUF's metadata."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from mrv2lab.model.errors import CheckpointError

_REPLACEMENT = "\ufffd"

_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL, _USER_DEFINED = 3, 4


class Tokenizer:
    """A fast tokenizer and the ids that end a text."""

    def __init__(self, backend: tokenizers.Tokenizer, eos_token_ids: Sequence[int] = ()) -> None:
        self.backend = backend
        self.eos_token_ids = tuple(eos_token_ids)

    @classmethod
    def from_file(cls, path: Path, eos_token_ids: Sequence[int] = ()) -> Tokenizer:
        """Read ``tokenizer.json``. Raises :class:`CheckpointError` naming the file."""
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)), eos_token_ids)
        except Exception as error:  # tokenizers raises plain Exception
            raise CheckpointError(f"{path} is no readable tokenizer.json: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Tokens with a text, added ones included; the model's vocabulary may be larger (padding)."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``, with what the tokenizer's own post-processor adds (a BOS, say).

        Raises ``ValueError`` for lone surrogates (bytes of a command line that are no UTF-8, say).
        """
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError(f"the text {text!r} is not valid Unicode; it holds lone surrogates")
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``. An unfinished character at the end becomes U+FFFD; a stream holds it back instead."""
        text: str = self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def stream(self, skip_special_tokens: bool = True) -> StreamDecoder:
        """A decoder that is fed tokens as they come."""
        return StreamDecoder(self, skip_special_tokens)


class StreamDecoder:
    """Text of a growing token sequence: what ``add`` and ``flush`` return, joined, is the decoded whole.

    A character is held back until its last byte has come. The work of an ``add`` does not grow with the text: once all
    is given out, only the tokens since the last such point stay, as context (some decoders strip a leading space).
    Invalid UTF-8 streams exactly too, but for byte-fallback tokenizers, whose decoder spoils earlier valid bytes.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        # An unfinished character is one U+FFFD to a byte-level decoder. A byte-fallback one makes the whole run of
        # bytes before it U+FFFD too.
        byte_level = isinstance(tokenizer.backend.decoder, decoders.ByteLevel)
        self._longest_tail = 1 if byte_level else sys.maxsize
        self._ids: list[int] = []
        self._context = 0
        """How many of ``_ids`` are context: their text is given out."""
        self._given = 0
        """Characters of the text of ``_ids`` that are given out."""

    def add(self, token_ids: Iterable[int]) -> str:
        """Add tokens; returns the text that is certain now and was not given out before (possibly empty)."""
        self._ids.extend(token_ids)
        text = self._tokenizer.decode(self._ids, self._skip)
        tail = 0
        while tail < min(self._longest_tail, len(text)) and text[-1 - tail] == _REPLACEMENT:
            tail += 1
        new = text[self._given : len(text) - tail]
        self._given += len(new)
        if tail == 0 and new:
            self._ids = self._ids[self._context :]
            self._context = len(self._ids)
            self._given = len(self._tokenizer.decode(self._ids, self._skip))
        return new

    def flush(self) -> str:
        """The text that is still held back: U+FFFD for a character that never got its last byte."""
        text = self._tokenizer.decode(self._ids, self._skip)
        new = text[self._given :]
        self._given = len(text)
        return new


def gguf_tokenizer(file: Any, eos_token_ids: Sequence[int]) -> Tokenizer:
    """The tokenizer inside an open :class:`GGUFFile`. Raises :class:`CheckpointError` for a kind it does not know."""
    kind, pre = file.value("tokenizer.ggml.model"), file.value("tokenizer.ggml.pre", "default")
    splitters = {
        "smollm": [pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)],
        "gpt-2": [_byte_level(use_regex=True)],
        "default": [_byte_level(use_regex=True)],
        "qwen2": [
            pre_tokenizers.Split(tokenizers.Regex(_QWEN2_PATTERN), behavior="isolated"),
            _byte_level(use_regex=False),
        ],
    }
    if kind != "gpt2" or pre not in splitters:
        raise CheckpointError(
            f"{file.path}: tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported; "
            f"supported: 'gpt2' with {', '.join(splitters)}. The model can still be fed token ids"
        )
    tokens = file.required("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in file.required("tokenizer.ggml.merges")]
    types = file.value("tokenizer.ggml.token_type", [1] * len(tokens))
    made = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(splitters[pre])
    made.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in (_CONTROL, _USER_DEFINED):
            added = tokenizers.AddedToken(token, special=token_type == _CONTROL, normalized=False)
            (made.add_special_tokens if token_type == _CONTROL else made.add_tokens)([added])
    return Tokenizer(made, eos_token_ids)


def _byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
