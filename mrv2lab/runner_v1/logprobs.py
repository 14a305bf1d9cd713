"""Log-probabilities by a log-softmax of everything, [r, V] float32, and a top-k of everything.

Counterpart in vLLM: ``Sampler.gather_logprobs`` in ``v1/sample/sampler.py``. MRV2 chooses first and computes only the
log-probabilities of the chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mrv2lab.protocol import Logprobs
from mrv2lab.runner_v1.logits_stages import clean
from mrv2lab.runtime.base import Runtime

NONE = -1
"""In place of a number of logprobs: the row asked for none."""


class LogprobsBuffers:
    """Device and pinned buffers for the log-probabilities of one step in flight; they grow to the largest asked for."""

    def __init__(self, rt: Runtime, name: str) -> None:
        self.rt = rt
        self.name = name
        self._size = 0
        self._rows = 0

    def reserve(self, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views for ids int32[rows, width], values float32[rows, width] and ranks int32[rows]."""
        if rows * width > self._size or rows > self._rows:
            self._size, self._rows = max(self._size, rows * width), max(self._rows, rows)
            self._device = [self._make(*shape, "device") for shape in self._shapes()]
            self._host = [self._make(*shape, "pinned") for shape in self._shapes()]
        self._shape = (rows, width)
        ids, values, ranks = self._views(self._device)
        return ids, values, ranks

    def _shapes(self) -> list[tuple[str, int, torch.dtype]]:
        return [
            ("ids", self._size, torch.int32),
            ("values", self._size, torch.float32),
            ("ranks", self._rows, torch.int32),
        ]

    def _make(self, part: str, size: int, dtype: torch.dtype, place: str) -> torch.Tensor:
        suffix = ".host" if place == "pinned" else ""
        return self.rt.empty(size, dtype, name=f"{self.name}.{part}{suffix}", place=place)

    def _views(self, buffers: list[torch.Tensor]) -> list[torch.Tensor]:
        rows, width = self._shape
        ids, values, ranks = buffers
        return [ids[: rows * width].view(rows, width), values[: rows * width].view(rows, width), ranks[:rows]]

    def copy_to_host(self) -> None:
        """Queue the copies of what :meth:`reserve` gave out last."""
        for host, device in zip(self._views(self._host), self._views(self._device), strict=True):
            self.rt.d2h(host, device)

    def take(self, wanted: Sequence[int], discarded: Sequence[int]) -> Logprobs:
        """What was copied, without discarded rows. ``wanted``: each row's number of most likely tokens, or NONE."""
        ids, values, ranks = (view.numpy() for view in self._views(self._host))
        kept = np.delete(np.arange(len(wanted)), list(discarded))
        return cut(ids[kept], values[kept], ranks[kept], np.array(wanted, np.int64)[kept])


def cut(ids: Any, values: Any, ranks: Any, wanted: Any) -> Logprobs:
    """Arrays of as many columns as the greediest row asked for, each row cut to its own ``wanted`` int64[m]."""
    # Column 0 is the token itself, and of a row that asked for nothing not even that is said.
    unasked = np.arange(ids.shape[1]) > wanted[:, None]
    return Logprobs(
        np.where(unasked, np.int32(-1), ids),
        np.where(unasked, np.float32("-inf"), values),
        np.where(wanted == NONE, np.int32(0), ranks),
    )


def gather_logprobs(
    ids: torch.Tensor,
    values: torch.Tensor,
    ranks: torch.Tensor,
    logits: torch.Tensor,
    tokens: torch.Tensor,
    logarithms: bool,
) -> None:
    """Queued work: write ids int32[n, 1 + k], values float32[n, 1 + k] and ranks int32[n] of ``tokens`` int64[n] and of
    the k greatest of ``logits`` [n, V]; the logits themselves if not ``logarithms``."""
    x = clean(logits)
    chosen = torch.cat([tokens.unsqueeze(1), top_ids(x, ids.shape[1] - 1)], dim=1)
    everything = x.log_softmax(dim=-1) if logarithms else x
    ids.copy_(chosen)
    # A row without any finite logit has no distribution: NaN there says nothing more than -inf.
    values.copy_(clean(everything.gather(1, chosen)))
    ranks.copy_((x >= x.gather(1, tokens.unsqueeze(1))).sum(dim=-1))


def top_ids(x: torch.Tensor, k: int) -> torch.Tensor:
    """int64[n, k]: ids of the k greatest of float32[n, V], ties to the lowest id.

    ``torch.topk`` leaves ties to chance, so it gets keys without any: the bits of a float, made to count upwards with
    it, and below them the id counted downwards: 8 bytes a logit, the price of a rule that vLLM's V1 does not have.
    """
    vocab = x.shape[1]
    bits = (x + 0.0).contiguous().view(torch.int32)  # + 0.0: one zero
    bits ^= (bits >> 31) & 0x7FFFFFFF  # negative ones count downwards
    keys = bits.long()
    keys <<= 32
    keys |= torch.arange(vocab - 1, -1, -1, device=x.device)
    return vocab - 1 - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)


def count_nans(counts: torch.Tensor, logits: torch.Tensor) -> None:
    """Queued work: counts int32[r] of NaN in each row of ``logits`` [r, V]."""
    counts.copy_(logits.isnan().sum(dim=-1))
