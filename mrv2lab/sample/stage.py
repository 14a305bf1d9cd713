"""What a stage of the sampler is: row-indexed state, and queued work on the logits of a batch that uses it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from mrv2lab.protocol import RequestData
from mrv2lab.state.input_batch import InputBatch
from mrv2lab.state.request_state import RequestState

Cut = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]
"""What a draw keeps of each of n rows: value float32[n], id int32[n] (None: every token of the value stays), and the
largest logits of groups of 128, float32[n, ceil(V / 128)]. See ``ops/gumbel_cut.py``."""

Int32 = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class SampleContext:
    """Where the logits rows of one step come from. n = logits rows, r = requests."""

    batch: InputBatch
    states: RequestState
    # [n] int32, device: which of its request's logits rows each one is (0, then one for each draft)
    local_pos: torch.Tensor

    @property
    def rows(self) -> Int32:
        """[r] int32, host: rows of the batch's requests."""
        return self.batch.host.rows

    @property
    def num_logits(self) -> int:
        """n."""
        return self.batch.host.num_logits


class Stage(Protocol):
    """One stage. Tables are overwritten when a row gets a new owner; a stage that no row of the batch uses launches
    nothing, which :meth:`used` decides on the host alone."""

    def add_request(self, row: int, request: RequestData) -> None:
        """Overwrite ``row``."""

    def apply_staged_writes(self) -> None:
        """Send what was staged since the last step, once a step, before the inputs are prepared."""

    def reset(self) -> None:
        """Forget every request; buffers stay where they are."""

    def used(self, rows: Int32) -> bool:
        """Whether any of ``rows`` uses the stage."""

    def apply(self, logits: torch.Tensor, context: SampleContext) -> None:
        """Queue its work on ``logits`` float32[n, V], in place."""


class CuttingStage(Stage, Protocol):
    """A stage behind the temperature, which only drops tokens."""

    def cut(self, logits: torch.Tensor, context: SampleContext) -> Cut:
        """Queue the search for what :meth:`apply` would drop of ``logits`` [n, V] divided by the temperatures; they are
        of any float type, nobody has divided them, and they stay as they are."""
