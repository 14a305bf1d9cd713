"""Sampling parameters by row; kernels read them through ``expanded_idx_mapping``. Counterpart: ``sample/states.py``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mrv2lab.memory.uva_backed import UvaBackedTensor
from mrv2lab.protocol import RequestData
from mrv2lab.runtime.transfer import TransferPolicy

GREEDY_BELOW = 1e-5
"""Temperatures below it count as 0, as in vLLM: a quotient by a much smaller one overflows float32."""


class SamplingState:
    """One row a request. Every table is overwritten when a row gets a new owner."""

    def __init__(self, transfers: TransferPolicy, *, max_num_reqs: int) -> None:
        # [R] float32: 0 = greedy
        self.temperature = UvaBackedTensor(transfers, "temperature", max_num_reqs, torch.float32)
        # [R] int64: the request's seed, for its whole life
        self.seeds = UvaBackedTensor(transfers, "seeds", max_num_reqs, torch.int64)
        self._added = False

    def add_request(self, row: int, request: RequestData) -> None:
        """Overwrite ``row`` with the parameters of ``request``."""
        temperature = request.sampling.temperature
        self.temperature.np[row] = temperature if temperature >= GREEDY_BELOW else 0.0
        self.seeds.np[row] = request.seed
        self._added = True

    def apply_staged_writes(self) -> None:
        """Republish the tables if a request was added since the last step."""
        if self._added:
            self._added = False
            self.temperature.publish()
            self.seeds.publish()

    def reset(self) -> None:
        """Publish both tables at the next step: queued copies of them may have been dropped."""
        self._added = True

    def tables(self) -> dict[str, torch.Tensor]:
        """Every table that kernels read, by name."""
        return {"temperature": self.temperature.gpu, "seeds": self.seeds.gpu}

    def host_tables(self) -> dict[str, np.ndarray[Any, Any]]:
        """The host's truth of the published tables, by name."""
        return {"temperature": self.temperature.np, "seeds": self.seeds.np}

    def all_greedy(self, rows: np.ndarray[Any, np.dtype[np.int32]]) -> bool:
        """Whether no request of the batch draws noise."""
        return not self.temperature.np[rows].any()
