"""Encoding, decoding, and streaming without broken characters."""

from __future__ import annotations

import random

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from mrv2lab.model.errors import CheckpointError
from mrv2lab.model.tokenizer import StreamDecoder, Tokenizer

CORPUS = ["the cat sat on the mat and the dog sat on the log", "naïve café, déjà vu", "one two three 1234"] * 4
TEXTS = [
    "the cat sat on the dog",
    "naïve café",
    "日本語のテキスト",
    "emoji: 👩\u200d👩\u200d👧 and 🎉!",
    "tabs\tand\nnewlines  and  spaces ",
    "e\u0301 combining, \ufffd a real replacement character \ufffd\ufffd\ufffd\ufffd.",
    "",
]


def byte_level(vocab_size: int = 300) -> tokenizers.Tokenizer:
    """A byte-level BPE trained on three lines: most non-ASCII characters are several tokens."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
        ),
    )
    return made


def byte_fallback() -> tokenizers.Tokenizer:
    """SentencePiece style, as Llama 2's: a leading space is stripped, unknown characters are bytes."""
    vocab = {"<unk>": 0, **{f"<0x{i:02X}>": i + 1 for i in range(256)}}
    for piece in ("▁", "the", "▁the", "cat", "▁cat", "a", "é"):
        vocab[piece] = len(vocab)
    made = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


@pytest.fixture(scope="module", name="tokenizer")
def _tokenizer() -> Tokenizer:
    return Tokenizer(byte_level(), eos_token_ids=(0,))


def streamed(stream: StreamDecoder, ids: list[int], sizes: list[int]) -> list[str]:
    """What the stream gives out, fed in groups of ``sizes`` tokens (repeated)."""
    parts, at, turn = [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        parts.append(stream.add(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*parts, stream.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("sizes", [[1], [2], [1, 3, 0, 2]], ids=str)
@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_is_the_text(tokenizer, text, sizes):
    assert "".join(streamed(tokenizer.stream(), tokenizer.encode(text), sizes)) == text


def test_no_half_characters_are_given_out(tokenizer):
    ids = tokenizer.encode("日🎉é")
    assert len(ids) > 7
    parts = streamed(tokenizer.stream(), ids, [1])
    assert [part for part in parts if part] == ["日", "🎉", "é"]


def test_a_character_that_never_ends(tokenizer):
    ids = tokenizer.encode("ok 🎉")[:-1]
    parts = streamed(tokenizer.stream(), ids, [1])
    assert "".join(parts[:-1]) == "ok "
    assert parts[-1] == "\ufffd"
    assert tokenizer.decode(ids) == "ok \ufffd"


def test_any_tokens_stream_to_their_decoding(tokenizer):
    """Random ids, broken UTF-8 and special tokens included."""
    draw = random.Random(0)
    for _ in range(300):
        ids = [draw.randrange(tokenizer.vocab_size) for _ in range(draw.randrange(1, 12))]
        assert "".join(streamed(tokenizer.stream(), ids, [draw.randrange(1, 4)])) == tokenizer.decode(ids)


@pytest.mark.parametrize("text", ["the cat a cat", "日本 the 🎉🎉 é", "x  y"])
def test_byte_fallback_streams_valid_text(text):
    tokenizer = Tokenizer(byte_fallback())
    ids = tokenizer.encode(text.replace(" ", "▁"))
    assert "".join(streamed(tokenizer.stream(), ids, [1])) == tokenizer.decode(ids) == text


def test_a_stream_of_garbage_is_not_held_back_for_ever(tokenizer):
    lone = tokenizer.encode("é")[-1]  # a continuation byte
    stream = tokenizer.stream()
    given = "".join(stream.add([lone]) for _ in range(50))
    assert len(given) >= 47
    assert given + stream.flush() == tokenizer.decode([lone] * 50)


def test_a_stream_keeps_little(tokenizer):
    stream = tokenizer.stream()
    for _ in range(100):
        for token in tokenizer.encode("the cat "):
            stream.add([token])
    assert len(stream._ids) == 1


def test_special_tokens(tokenizer):
    ids = [0, *tokenizer.encode("the cat"), 0]
    assert tokenizer.decode(ids) == "the cat"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|end|>the cat<|end|>"
    assert "".join(streamed(tokenizer.stream(), ids, [1])) == "the cat"
    assert "".join(streamed(tokenizer.stream(skip_special_tokens=False), ids, [1])) == "<|end|>the cat<|end|>"


def test_files(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    tokenizer.backend.save(str(path))
    again = Tokenizer.from_file(path, eos_token_ids=[7])
    assert again.eos_token_ids == (7,)
    assert again.vocab_size == tokenizer.vocab_size
    assert again.encode("the cat") == tokenizer.encode("the cat")
    with pytest.raises(CheckpointError, match=r"nowhere\.json"):
        Tokenizer.from_file(tmp_path / "nowhere.json")
