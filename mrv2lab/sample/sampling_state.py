"""Sampling parameters by row; kernels read them through ``expanded_idx_mapping``. Counterpart: ``sample/states.py``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from mrv2lab.memory.uva_backed import UvaBackedTensor
from mrv2lab.protocol import RequestData
from mrv2lab.runtime.transfer import TransferPolicy

GREEDY_BELOW = 1e-5
"""Temperatures below it count as 0, as in vLLM: a quotient by a much smaller one overflows float32."""
_LEAST = float(np.finfo(np.float32).tiny)
"""Behind the last float32 above 0 lies 0, which no top_p is."""


class SamplingState:
    """One row a request. Every table is overwritten when a row gets a new owner."""

    def __init__(self, transfers: TransferPolicy, *, max_num_reqs: int, vocab_size: int = 2**31 - 1) -> None:
        self.vocab_size = vocab_size
        # [R] float32: 0 = greedy
        self.temperature = UvaBackedTensor(transfers, "temperature", max_num_reqs, torch.float32)
        # [R] int64: the request's seed, for its whole life
        self.seeds = UvaBackedTensor(transfers, "seeds", max_num_reqs, torch.int64)
        # [R] int32: 1..V, V = all
        self.top_k = UvaBackedTensor(transfers, "top_k", max_num_reqs, torch.int32)
        # [R] float32: (0, 1], 1 = all
        self.top_p = UvaBackedTensor(transfers, "top_p", max_num_reqs, torch.float32)
        # [R] float32: log(min_p), -inf = all. The logarithm is the host's, so that every device has the same threshold
        self.log_min_p = UvaBackedTensor(transfers, "log_min_p", max_num_reqs, torch.float32)
        self._cuts = (self.top_k, self.top_p, self.log_min_p)
        for table, off in zip(self._cuts, (vocab_size, 1.0, -math.inf), strict=True):
            table.np.fill(off)
        self._added = False
        self._cuts_changed = True

    def add_request(self, row: int, request: RequestData) -> None:
        """Overwrite ``row`` with the parameters of ``request``."""
        sampling = request.sampling
        self.temperature.np[row] = sampling.temperature if sampling.temperature >= GREEDY_BELOW else 0.0
        self.seeds.np[row] = request.seed
        before = [table.np[row] for table in self._cuts]
        self.top_k.np[row] = min(sampling.top_k or self.vocab_size, self.vocab_size)
        self.top_p.np[row] = max(sampling.top_p, _LEAST)
        self.log_min_p.np[row] = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
        self._cuts_changed |= before != [table.np[row] for table in self._cuts]
        self._added = True

    def apply_staged_writes(self) -> None:
        """Republish the tables if a request was added since the last step; those of cuts that nobody uses never."""
        if self._added:
            self._added = False
            self.temperature.publish()
            self.seeds.publish()
            if self._cuts_changed:
                self._cuts_changed = False
                for table in self._cuts:
                    table.publish()

    def reset(self) -> None:
        """Publish the tables at the next step: queued copies of them may have been dropped."""
        self._added = self._cuts_changed = True

    def tables(self) -> dict[str, torch.Tensor]:
        """The tables that recordings carry, by name."""
        return {"temperature": self.temperature.gpu, "seeds": self.seeds.gpu}

    def host_tables(self) -> dict[str, np.ndarray[Any, Any]]:
        """The host's truth of the same tables, by name."""
        return {"temperature": self.temperature.np, "seeds": self.seeds.np}

    def all_greedy(self, rows: np.ndarray[Any, np.dtype[np.int32]]) -> bool:
        """Whether no request of the batch draws noise."""
        return not self.temperature.np[rows].any()

    def uses_temperature(self, rows: np.ndarray[Any, np.dtype[np.int32]]) -> bool:
        """Whether a request of the batch has a temperature other than 0 and 1, by which logits must be divided."""
        temperature = self.temperature.np[rows]
        return bool(((temperature != 0) & (temperature != 1)).any())

    def uses_top_k(self, rows: np.ndarray[Any, np.dtype[np.int32]]) -> bool:
        """Whether a request of the batch cuts by rank."""
        return bool((self.top_k.np[rows] < self.vocab_size).any())

    def uses_top_p(self, rows: np.ndarray[Any, np.dtype[np.int32]]) -> bool:
        """Whether a request of the batch cuts by probability."""
        return bool((self.top_p.np[rows] < 1).any())

    def uses_min_p(self, rows: np.ndarray[Any, np.dtype[np.int32]]) -> bool:
        """Whether a request of the batch cuts by its best logit."""
        return bool((self.log_min_p.np[rows] > -math.inf).any())
