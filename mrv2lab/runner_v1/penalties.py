"""Penalties from nothing in every step: all output ids of the batch, padded on the host, copied, and counted.

O(total output length) of Python, NumPy and copying a step, which is what MRV2's counts on the device do away with.
Counterparts in vLLM: ``v1/sample/ops/penalties.py`` and ``model_executor/layers/utils.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.transfer import PinnedCopy


class OutputTokenIds:
    """Brings the tokens generated so far to the device, through fresh pinned memory."""

    def __init__(self, rt: Runtime) -> None:
        self._upload = PinnedCopy(rt).upload("output_token_ids", 1, torch.int64)

    def send(self, outputs: Sequence[list[int] | None], vocab_size: int) -> torch.Tensor:
        """int64[r, longest], padded with V; so is a placeholder that nobody has filled in. ``outputs``: a list of ids
        for each row."""
        longest = max(1, max(len(ids or ()) for ids in outputs))
        padded = np.full((len(outputs), longest), vocab_size, np.int64)
        for row, ids in zip(padded, outputs, strict=True):
            if ids:
                row[: len(ids)] = ids
        padded[padded < 0] = vocab_size
        return self._upload.send(padded.reshape(-1)).view(padded.shape)


def apply_penalties(
    logits: torch.Tensor,
    output_token_ids: torch.Tensor,
    prompt_token_ids: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """Queued work, in place on ``logits`` float32[r, V]. Token ids int64[r, longest] padded with V; penalties
    float32[r], 1, 0 and 0 where a row uses none.

    Repetition divides a positive logit of a token of prompt or output and multiplies another; then frequency is taken
    off for each time that the output has the token, and presence if it has it.
    """
    rows = len(logits)
    repetition, frequency, presence = (
        penalty[:rows].to(logits.device, non_blocking=True).unsqueeze(1)
        for penalty in (repetition, frequency, presence)
    )
    counts = count_tokens(output_token_ids, logits.shape[1])
    generated = counts > 0
    seen = generated | (count_tokens(prompt_token_ids, logits.shape[1]) > 0)
    punished = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits.copy_(torch.where(seen, punished, logits))
    logits -= frequency * counts
    logits -= presence * generated


def count_tokens(token_ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """How often each row has each token: int64[r, V] from int64[r, longest] padded with V."""
    counts = torch.zeros((len(token_ids), vocab_size + 1), dtype=torch.int64, device=token_ids.device)
    counts.scatter_add_(1, token_ids, torch.ones_like(token_ids))
    return counts[:, :vocab_size]
