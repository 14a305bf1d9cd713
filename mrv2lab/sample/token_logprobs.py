"""Log-probabilities of some logits rows: the launches that sampled and prompt tokens share, and where they write."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mrv2lab.ops.logprobs import row_logprobs, token_logprobs
from mrv2lab.ops.top_k_top_p import find_cut
from mrv2lab.ops.topk_ids import topk_ids
from mrv2lab.protocol import Logprobs
from mrv2lab.runtime.base import Runtime
from mrv2lab.sample.cut_buffers import CutBuffers

Array = np.ndarray[Any, Any]


class LogprobsBuffers:
    """Device buffers of one step's log-probabilities and their pinned copies. Whoever sends them owns them."""

    def __init__(self, rt: Runtime, name: str, *, max_rows: int, max_top: int) -> None:
        self.rt = rt
        self.max_top = max_top
        size = max_rows * (1 + max_top)

        def both(part: str, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
            device = rt.zeros(size, dtype, name=f"{name}.{part}")
            return device, rt.empty(size, dtype, name=f"{name}.{part}.host", place="pinned")

        # Flat, so that m rows of any number of columns are one contiguous copy.
        self._ids, self._ids_host = both("ids", size, torch.int32)
        self._values, self._values_host = both("values", size, torch.float32)
        self._ranks, self._ranks_host = both("ranks", max_rows, torch.int32)

    def views(self, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Device ids int32[rows, columns], values float32[rows, columns] and ranks int32[rows]."""
        size, shape = rows * columns, (rows, columns)
        return self._ids[:size].view(shape), self._values[:size].view(shape), self._ranks[:rows]

    def copy(self, rows: int, columns: int) -> None:
        """Queue the copies to the host on the current stream, behind whatever waits for the launches."""
        size = rows * columns
        self.rt.d2h(self._ids_host[:size], self._ids[:size])
        self.rt.d2h(self._values_host[:size], self._values[:size])
        self.rt.d2h(self._ranks_host[:rows], self._ranks[:rows])

    def read(self, rows: int, columns: int) -> tuple[Array, Array, Array]:
        """The pinned copies as arrays of the shapes of :meth:`views`, once the copies are done. They are overwritten
        when the buffers are used again."""
        size, shape = rows * columns, (rows, columns)
        ids, values = self._ids_host.numpy()[:size], self._values_host.numpy()[:size]
        return ids.reshape(shape), values.reshape(shape), self._ranks_host.numpy()[:rows]


class TokenLogprobs:
    """Queues the work for up to ``max_rows`` logits rows at a time: one pass over them and three small kernels, with
    about V / 32 bytes of memory a row. One object may serve sampled and prompt tokens, since a stream runs in order."""

    def __init__(self, rt: Runtime, *, max_rows: int, vocab_size: int, max_top: int = 32) -> None:
        self.rt = rt
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        self.max_top = min(max_top, vocab_size)
        # A group more than tokens, since the last one may hold a tie that came too late, and room for ties: bfloat16
        # has few values, and a row that overflows is searched whole.
        room = 4 * (self.max_top + 1)
        self.buffers = CutBuffers.make(rt, "logprobs", max_rows, vocab_size, listed=room, candidates=room, narrow=False)
        # [n] int32 and [n] float32: every row is its own, and none has a top-p
        self.rows = rt.adopt(torch.arange(max_rows, dtype=torch.int32), "logprobs.rows")
        self._ones = rt.adopt(torch.ones(max_rows), "logprobs.ones")

    def launch(
        self,
        out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        logits: torch.Tensor,
        logits_rows: torch.Tensor,
        tokens: torch.Tensor,
        tops: torch.Tensor,
        as_logits: bool,
    ) -> None:
        """Write ``out`` = ids int32[m, 1 + K], values float32[m, 1 + K], ranks int32[m] of the rows ``logits_rows``
        int32[m] of ``logits`` [N, V]: its token (``tokens`` int64[N]) and its ``tops`` int32[m] <= K likeliest ones."""
        ids, values, ranks = out
        m = ids.shape[0]
        b, ones = self.buffers.first(m), self._ones[:m]
        find_cut(self.rt, b, logits, logits_rows, self.rows[:m], tokens, True, tops, ones, False)
        topk_ids(
            self.rt, ids, b.listed, b.candidates, logits, logits_rows, tokens, tops, b.group_max, b.cut_value, b.cut_id
        )
        token_logprobs(
            self.rt, values, ranks, ids, logits, logits_rows, b.block_max, b.block_sum, b.block_count, as_logits
        )

    def launch_rows(
        self, out: torch.Tensor, logits: torch.Tensor, logits_rows: torch.Tensor, which: torch.Tensor, as_logits: bool
    ) -> None:
        """Behind :meth:`launch`: the whole vocabulary of entries ``which`` int32[w] of ``logits_rows`` into ``out``
        float32[w, V], which may be host memory that kernels reach, so that the device keeps nothing of it."""
        b = self.buffers.first(logits_rows.shape[0])
        row_logprobs(self.rt, out, logits, logits_rows, which, b.block_max, b.block_sum, as_logits)


def widen(ids: Array, values: Array, ranks: Array, tops: Array, whole: dict[int, Array], top: int) -> Logprobs:
    """Rows as they came from the device, those in ``whole`` (row -> float32[V], by token id) ordered here, as fresh
    arrays of 1 + top columns. ``tops`` int32[m]: what each row asked for, at most ``top``; -1 nothing."""
    columns = 1 + top
    m, given = len(ids), min(ids.shape[1], columns)
    all_ids = np.full((m, columns), -1, np.int32)
    all_values = np.full((m, columns), -np.inf, np.float32)
    all_ids[:, :given], all_values[:, :given] = ids[:, :given], values[:, :given]
    for row, by_token in whole.items():
        order = np.argsort(-by_token, kind="stable")[: int(tops[row])]
        order = order[by_token[order] > -np.inf]
        all_ids[row, 1 : 1 + len(order)] = order
        all_values[row, 1 : 1 + len(order)] = by_token[order]
    return Logprobs(all_ids, all_values, np.array(ranks, np.int32))
