"""Sequences of tokens that no output may contain. Counterpart in vLLM: ``v1/worker/gpu/sample/bad_words.py``."""

from __future__ import annotations

import numpy as np
import torch

from mrv2lab.memory.staged_write import StagedWriteTensor
from mrv2lab.memory.uva_backed import UvaBackedTensor
from mrv2lab.ops.bad_words import bad_words
from mrv2lab.protocol import RequestData
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.transfer import TransferPolicy
from mrv2lab.sample.stage import Int32, SampleContext
from mrv2lab.sample.users import UserRows
from mrv2lab.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS


class BadWords:
    """A stage of the sampler. Words are token ids here: texts were encoded at submit."""

    def __init__(self, rt: Runtime, transfers: TransferPolicy, *, max_num_reqs: int) -> None:
        self.rt = rt
        # [R, 1024] int32: a row's words, one behind the other
        self.word_ids = StagedWriteTensor(
            rt, transfers, "bad_word_ids", (max_num_reqs, MAX_BAD_WORD_TOKENS), torch.int32
        )
        # [R, 129] int32: word w is word_ids[offsets[w] : offsets[w + 1]]
        self.word_offsets = StagedWriteTensor(
            rt, transfers, "bad_word_offsets", (max_num_reqs, MAX_BAD_WORDS + 1), torch.int32
        )
        # [R] int32
        self.num_words = UvaBackedTensor(transfers, "num_bad_words", max_num_reqs, torch.int32)
        self._users = UserRows(max_num_reqs)
        self._changed = True

    def add_request(self, row: int, request: RequestData) -> None:
        """See :meth:`Stage.add_request`. Raises ``TypeError`` for a text, ``ValueError`` for too many."""
        words = _token_words(request)
        if not self._users.set(row, bool(words)):
            return
        self.word_ids.unstage(row)
        self.word_offsets.unstage(row)
        self.num_words.np[row] = len(words)
        if words:
            self.word_ids.stage_write(row, 0, [token for word in words for token in word])
            self.word_offsets.stage_write(row, 0, np.cumsum([0, *map(len, words)], dtype=np.int32))
        self._changed = True

    def apply_staged_writes(self) -> None:
        """See :meth:`Stage.apply_staged_writes`."""
        if self._changed:
            self._changed = False
            self.num_words.publish()
            self.word_ids.apply_write()
            self.word_offsets.apply_write()

    def reset(self) -> None:
        """See :meth:`Stage.reset`. The counts are published anew: a queued copy of them may have been dropped."""
        self.word_ids.drop_pending()
        self.word_offsets.drop_pending()
        self._changed = True

    def used(self, rows: Int32) -> bool:
        """See :meth:`Stage.used`."""
        return self._users.any_of(rows)

    def apply(self, logits: torch.Tensor, context: SampleContext) -> None:
        """See :meth:`Stage.apply`."""
        batch, states = context.batch, context.states
        bad_words(
            self.rt,
            logits,
            batch.expanded_idx_mapping,
            context.local_pos,
            batch.logits_indices,
            batch.input_ids,
            states.all_token_ids.gpu,
            states.prompt_len.gpu,
            states.total_len.gpu,
            self.word_ids.gpu,
            self.word_offsets.gpu,
            self.num_words.gpu,
            int(self.num_words.np[context.rows].max()),
        )


def _token_words(request: RequestData) -> list[tuple[int, ...]]:
    words: list[tuple[int, ...]] = []
    for word in request.sampling.bad_words:
        if isinstance(word, str):
            raise TypeError(f"request {request.req_id!r}: bad word {word!r} is a text; submit encodes texts")
        words.append(word)
    tokens = sum(map(len, words))
    if len(words) > MAX_BAD_WORDS or tokens > MAX_BAD_WORD_TOKENS:
        raise ValueError(
            f"request {request.req_id!r}: {len(words)} bad words of {tokens} tokens; at most {MAX_BAD_WORDS} words and "
            f"{MAX_BAD_WORD_TOKENS} tokens"
        )
    return words
