"""Structured output's mask on raw logits, before every stage. Counterpart: ``v1/worker/gpu/structured_outputs.py``."""

from __future__ import annotations

import numpy as np
import torch

from mrv2lab.ops.grammar_mask import grammar_mask
from mrv2lab.protocol import GrammarOutput
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.transfer import TransferPolicy
from mrv2lab.state.input_batch import HostBatch


class GrammarMask:
    """Uploads a step's bitmask and applies it.

    The mask comes between ``execute_model`` and ``sample_tokens``, when the forward is queued already. So it goes over
    the copy stream, while the forward runs, and two events keep order: the mask's kernel waits for the copy, and the
    next step's copy, into the same buffers, for the kernel.
    """

    def __init__(self, rt: Runtime, transfers: TransferPolicy, *, max_num_logits: int, vocab_size: int) -> None:
        self.rt = rt
        self._transfers = transfers
        self.words = -(-vocab_size // 32)
        # [m * words] int32: one row a masked logits row
        self._bitmask = transfers.upload("grammar_bitmask", max_num_logits * self.words, torch.int32)
        # [m] int32: logits row of each
        self._mapping = transfers.upload("grammar_mapping", max_num_logits, torch.int32)
        self._uploaded = rt.event("grammar.uploaded")
        self._masked = rt.event("grammar.masked")

    def apply(self, logits: torch.Tensor, grammar: GrammarOutput, host: HostBatch) -> None:
        """Queue the mask on raw ``logits`` [n, V] of any float type, in place.

        Requests of ``grammar`` that are not in the batch are skipped, and so are its rows past a request's drafts.
        Raises ``ValueError`` if the mask's shape does not fit.
        """
        found = self._logits_rows(grammar, host)
        if found is None:
            return
        bitmask, mapping = found
        rt = self.rt
        rt.copy.wait_event(self._masked)
        with self._transfers.prepare():
            with rt.use(rt.copy):
                words = self._bitmask.send(bitmask.reshape(-1))
                rows = self._mapping.send(mapping)
                self._uploaded.record(rt.copy)
            rt.main.wait_event(self._uploaded)
        grammar_mask(rt, logits, words.view(-1, self.words), rows)
        self._masked.record(rt.main)

    def _logits_rows(
        self, grammar: GrammarOutput, host: HostBatch
    ) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.int32]], np.ndarray[tuple[int, ...], np.dtype[np.int32]]] | None:
        """The mask's rows that have a logits row, [m, words], and these rows, [m]; None if there are none."""
        shape = (len(grammar.req_ids), grammar.bitmask.shape[1], self.words)
        if grammar.bitmask.shape != shape or grammar.bitmask.dtype != np.int32:
            raise ValueError(
                f"the grammar's bitmask must be int32{list(shape)} for {shape[0]} requests, got "
                f"{grammar.bitmask.dtype}{list(grammar.bitmask.shape)}"
            )
        place = {req_id: i for i, req_id in enumerate(host.req_ids)}
        batch = np.fromiter((place.get(req_id, -1) for req_id in grammar.req_ids), np.int64, shape[0])
        count = np.where(batch >= 0, host.num_draft_tokens[batch] + 1, 0) if shape[0] else batch
        if count.size and count.max() > shape[1]:
            worst = grammar.req_ids[int(count.argmax())]
            raise ValueError(f"request {worst!r} has {count.max()} logits rows, its grammar's bitmask {shape[1]}")
        position = np.arange(shape[1])
        used = position < count[:, None]
        if not used.any():
            return None
        first = np.cumsum(host.num_draft_tokens + 1) - host.num_draft_tokens - 1
        rows = (first[batch][:, None] + position)[used]
        return grammar.bitmask[used], rows.astype(np.int32)
