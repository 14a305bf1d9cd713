"""The last stage in front of the choice: top-k, then top-p of what it keeps. Counterpart: ``sample/states.py``."""

from __future__ import annotations

import torch

from mrv2lab.memory.uva_backed import UvaBackedTensor
from mrv2lab.ops.top_k_top_p import apply_cut, find_cut
from mrv2lab.protocol import RequestData
from mrv2lab.runtime.base import Runtime
from mrv2lab.sample.cut_buffers import CutBuffers
from mrv2lab.sample.stage import Cut, Int32, SampleContext


class TopKTopP:
    """Exactly k survive top-k, ties to the lowest ids; rows with at most k finite logits are left alone. Top-p keeps
    the smallest set of most likely survivors that reaches p of their probability, ties alike, and never nothing.

    Reads the tables of ``SamplingState``: ``top_k`` int32[R] (V = all), ``top_p`` float32[R] (1 = all) and, for
    ``cut``, ``temperature``. ``cut`` leaves the rows' cuts for a draw that applies them itself; ``apply`` writes -inf
    behind them.
    """

    def __init__(
        self,
        rt: Runtime,
        top_k: UvaBackedTensor,
        top_p: UvaBackedTensor,
        temperature: UvaBackedTensor,
        *,
        max_num_logits: int,
        vocab_size: int,
        listed: int = 512,
        candidates: int = 1024,
    ) -> None:
        self.rt = rt
        self.top_k = top_k
        self.top_p = top_p
        self.temperature = temperature
        self.vocab_size = vocab_size
        self.buffers = CutBuffers.make(
            rt, "top_k_top_p", max_num_logits, vocab_size, listed=listed, candidates=candidates, narrow=True
        )
        # [n] int32: logits row i is row i
        self._rows = rt.adopt(torch.arange(max_num_logits, dtype=torch.int32), "top_k_top_p.rows")
        # [n] int64: nobody's rank is wanted
        self._tokens = rt.zeros(max_num_logits, torch.int64, name="top_k_top_p.tokens")

    def add_request(self, row: int, request: RequestData) -> None:
        """Nothing: ``SamplingState`` keeps the parameters."""

    def apply_staged_writes(self) -> None:
        """Nothing."""

    def reset(self) -> None:
        """Nothing."""

    def used(self, rows: Int32) -> bool:
        """See :meth:`Stage.used`."""
        return bool((self.top_k.np[rows] < self.vocab_size).any() or (self.top_p.np[rows] < 1).any())

    def find(
        self, logits: torch.Tensor, rows: Int32, idx_mapping: torch.Tensor, temperature: torch.Tensor | None = None
    ) -> CutBuffers:
        """Queue the search; the buffers' ``cut_value`` and ``cut_id`` will hold the cut of each of n logits rows.

        ``logits`` [n, V] of any float type and row stride, after the temperature, or before it if ``temperature``
        float32[R] is given; ``rows`` int32[r] the batch's rows on the host; ``idx_mapping`` int32[n] the logits rows',
        on the device, negative for padding.
        """
        n = logits.shape[0]
        buffers = self.buffers.first(n)
        narrow = bool(((self.top_p.np[rows] < 1) & (self.top_k.np[rows] >= self.vocab_size)).any())
        find_cut(
            self.rt, buffers, logits, self._rows[:n], idx_mapping, self._tokens[:n], False, self.top_k.gpu,
            self.top_p.gpu, narrow, temperature,
        )  # fmt: skip
        return buffers

    def apply(self, logits: torch.Tensor, context: SampleContext) -> None:
        """See :meth:`Stage.apply`."""
        found = self.find(logits, context.rows, context.batch.expanded_idx_mapping)
        rows = self._rows[: logits.shape[0]]
        apply_cut(self.rt, logits, rows, found.group_max, found.cut_value, found.cut_id)

    def cut(self, logits: torch.Tensor, context: SampleContext) -> Cut:
        """See :meth:`CuttingStage.cut`."""
        found = self.find(logits, context.rows, context.batch.expanded_idx_mapping, self.temperature.gpu)
        return found.cut_value, found.cut_id, found.group_max
