"""The shipped tokenizer: byte-level BPE with 2048 tokens, trained on the stories."""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 2048
END = "<|endoftext|>"  # id 0: ends a document, and so also stands before the next
END_ID = 0
TRAIN_CHARS = 24_000_000


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """Trains on the first documents up to TRAIN_CHARS characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    total, some = 0, []
    for text in documents:
        some.append(text)
        total += len(text)
        if total > TRAIN_CHARS:
            break
    tokenizer.train_from_iterator(some, trainer)
    assert tokenizer.token_to_id(END) == END_ID
    return tokenizer


def encode_stream(tokenizer: Tokenizer, documents: list[str], chunk: int = 20_000) -> np.ndarray:
    """[num_tokens] int16: every document behind one END, one END after the last."""
    parts: list[np.ndarray] = []
    for start in range(0, len(documents), chunk):
        for e in tokenizer.encode_batch_fast(documents[start : start + chunk], add_special_tokens=False):
            parts.append(np.array([END_ID, *e.ids], dtype=np.int16))
    parts.append(np.array([END_ID], dtype=np.int16))
    return np.concatenate(parts)
