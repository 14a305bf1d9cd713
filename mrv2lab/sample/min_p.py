"""min-p: drop what is much less likely than the most likely token. Counterpart: ``v1/worker/gpu/sample/min_p.py``."""

from __future__ import annotations

import torch

from mrv2lab.ops.argmax import num_blocks
from mrv2lab.ops.min_p import apply_min_p, min_p_cut, num_groups
from mrv2lab.protocol import RequestData
from mrv2lab.runtime.base import Runtime
from mrv2lab.sample.sampling_state import SamplingState
from mrv2lab.sample.stage import Cut, Int32, SampleContext


class MinP:
    """A stage of the sampler, behind the temperature. Its parameter is a table of :class:`SamplingState`."""

    def __init__(self, rt: Runtime, state: SamplingState, *, max_num_logits: int, vocab_size: int) -> None:
        self.rt = rt
        self.state = state
        # [n, blocks] float32: each block's best logit
        self._local_max = rt.zeros((max_num_logits, num_blocks(vocab_size)), torch.float32, name="min_p.local_max")
        # [n, groups] float32: likewise, of each 128
        groups = num_groups(vocab_size, num_blocks(vocab_size))
        self._group_max = rt.zeros((max_num_logits, groups), torch.float32, name="min_p.group_max")
        # [n] float32: the least quotient that each row keeps
        self._cut = rt.zeros(max_num_logits, torch.float32, name="min_p.cut")

    def add_request(self, row: int, request: RequestData) -> None:
        """See :meth:`Stage.add_request`. Nothing to do."""

    def apply_staged_writes(self) -> None:
        """See :meth:`Stage.apply_staged_writes`. Nothing to do."""

    def reset(self) -> None:
        """See :meth:`Stage.reset`. Nothing to do."""

    def used(self, rows: Int32) -> bool:
        """See :meth:`Stage.used`."""
        return self.state.uses_min_p(rows)

    def apply(self, logits: torch.Tensor, context: SampleContext) -> None:
        """See :meth:`Stage.apply`."""
        scratch = self._local_max[: logits.shape[0]], self._group_max[: logits.shape[0]]
        apply_min_p(self.rt, logits, *scratch, context.batch.expanded_idx_mapping, self.state.log_min_p.gpu)

    def cut(self, logits: torch.Tensor, context: SampleContext) -> Cut:
        """See :meth:`CuttingStage.cut`."""
        n = logits.shape[0]
        value, group_max = self._cut[:n], self._group_max[:n]
        min_p_cut(
            self.rt, value, self._local_max[:n], group_max, logits, context.batch.expanded_idx_mapping,
            self.state.log_min_p.gpu, self.state.temperature.gpu,
        )  # fmt: skip
        return value, None, group_max
