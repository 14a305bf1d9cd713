"""Structured output: the grammars' bitmask, brought into batch order on the host and put on the raw logits.

Counterpart in vLLM: ``apply_grammar_bitmask`` in ``v1/structured_output/utils.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from mrv2lab.protocol import GrammarOutput
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.transfer import PinnedCopy


class GrammarMask:
    """One launch in front of everything else of the sampler, in batches with a structured request only."""

    def __init__(self, rt: Runtime) -> None:
        self.rt = rt
        fresh = PinnedCopy(rt)
        self._rows = fresh.upload("grammar.rows", 1, torch.int64)
        self._mask = fresh.upload("grammar.bitmask", 1, torch.int32)
        rt.register("v1.grammar", apply_bitmask)

    def apply(self, logits: torch.Tensor, rows: Mapping[str, int], grammar: GrammarOutput) -> None:
        """-inf in place on ``logits`` [r, V] of any float type for what the grammars forbid; ``rows`` are the batch's
        rows by request. Requests that are not in the batch any more are passed over.

        Raises ``ValueError`` where the mask is not of this vocabulary.
        """
        words = -(-logits.shape[1] // 32)
        if grammar.bitmask.shape[0] != len(grammar.req_ids) or grammar.bitmask.shape[2] != words:
            raise ValueError(
                f"the grammar's bitmask is {list(grammar.bitmask.shape)}, not [{len(grammar.req_ids)} requests, "
                f"drafts + 1, {words} words of 32 tokens]"
            )
        found = sorted((rows[req_id], i) for i, req_id in enumerate(grammar.req_ids) if req_id in rows)
        if not found:
            return
        # V1 has no drafts here: one logits row a request.
        mask = np.ascontiguousarray(grammar.bitmask[[i for _, i in found], 0], np.int32)
        at = self._rows.send(np.array([row for row, _ in found], np.int64))
        sent = self._mask.send(mask.reshape(-1)).view(mask.shape)
        self.rt.run("v1.grammar", logits, at, sent, reads=(logits, at, sent), writes=(logits,))


def apply_bitmask(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Queued work: rows int64[g] of ``logits`` [r, V], bitmask int32[g, ceil(V / 32)], bit 0 of a word its lowest
    token; a bit of 0 forbids."""
    shifts = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    bits = (bitmask.unsqueeze(2) >> shifts) & 1
    allowed = bits.flatten(1)[:, : logits.shape[1]] != 0
    logits[rows] = torch.where(allowed, logits[rows], float("-inf"))
