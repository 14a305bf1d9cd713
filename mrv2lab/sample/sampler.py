"""From logits to tokens. Counterpart in vLLM: ``sample/sampler.py``.

Order of stages: temperature, Gumbel argmax. A batch without sampled requests launches the argmax alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mrv2lab.ops.argmax import argmax_rows, num_blocks
from mrv2lab.ops.gumbel import gumbel_sample
from mrv2lab.runtime.base import Runtime
from mrv2lab.sample.sampling_state import SamplingState


class Sampler:
    """Chooses one token for each logits row."""

    def __init__(self, rt: Runtime, state: SamplingState, *, max_num_logits: int, vocab_size: int) -> None:
        self.rt = rt
        self.state = state
        blocks = num_blocks(vocab_size)
        # [n, blocks]: the best score of each block of the vocabulary, and its token
        self._local_max = rt.zeros((max_num_logits, blocks), torch.float32, name="local_max")
        self._local_arg = rt.zeros((max_num_logits, blocks), torch.int32, name="local_arg")

    def sample(
        self,
        out: torch.Tensor,
        logits: torch.Tensor,
        rows: np.ndarray[Any, np.dtype[np.int32]],
        expanded_idx_mapping: torch.Tensor,
        positions: torch.Tensor,
        logits_indices: torch.Tensor,
    ) -> None:
        """Write ``out`` int64[n] from ``logits`` [n, V].

        ``rows`` int32[r] are the batch's rows on the host, ``expanded_idx_mapping`` int32[n] the logits rows' on the
        device, ``positions`` int64[t] and ``logits_indices`` int64[n] locate each row's input token.
        """
        n = out.shape[0]
        local_max, local_arg = self._local_max[:n], self._local_arg[:n]
        if self.state.all_greedy(rows):
            argmax_rows(self.rt, out, local_max, local_arg, logits, expanded_idx_mapping)
        else:
            gumbel_sample(
                self.rt,
                out,
                local_max,
                local_arg,
                logits,
                expanded_idx_mapping,
                self.state.temperature.gpu,
                self.state.seeds.gpu,
                positions,
                logits_indices,
                True,
            )
