"""min-p: drop what is much less likely than the most likely token. Counterpart: ``v1/worker/gpu/sample/min_p.py``."""

from __future__ import annotations

import torch

from mrv2lab.ops.argmax import num_blocks
from mrv2lab.ops.min_p import apply_min_p, min_p_cut
from mrv2lab.protocol import RequestData
from mrv2lab.runtime.base import Runtime
from mrv2lab.sample.sampling_state import SamplingState
from mrv2lab.sample.stage import Int32, SampleContext


class MinP:
    """A stage of the sampler, behind the temperature. Its parameter is a table of :class:`SamplingState`."""

    def __init__(self, rt: Runtime, state: SamplingState, *, max_num_logits: int, vocab_size: int) -> None:
        self.rt = rt
        self.state = state
        # [n, blocks] float32: each block's best logit
        self._local_max = rt.zeros((max_num_logits, num_blocks(vocab_size)), torch.float32, name="min_p.local_max")

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
        local_max = self._local_max[: logits.shape[0]]
        apply_min_p(self.rt, logits, local_max, context.batch.expanded_idx_mapping, self.state.log_min_p.gpu)

    def cut(self, cut: torch.Tensor, logits: torch.Tensor, context: SampleContext) -> None:
        """Write cut float32[n], the least logit that each row keeps, and leave ``logits`` [n, V] as they are: for a
        sampling pass that compares by itself, which saves one write of [n, V]."""
        local_max = self._local_max[: logits.shape[0]]
        min_p_cut(self.rt, cut, local_max, logits, context.batch.expanded_idx_mapping, self.state.log_min_p.gpu)
