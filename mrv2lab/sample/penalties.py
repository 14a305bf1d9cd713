"""Repetition, frequency and presence penalties. Counterpart in vLLM: ``v1/worker/gpu/sample/penalties.py``.

The counts live on the device and are advanced there, so a step costs the same however long an output is.
"""

from __future__ import annotations

import numpy as np
import torch

from mrv2lab.memory.uva_backed import UvaBackedTensor
from mrv2lab.ops.count_tokens import count_history, count_sampled, zero_counts
from mrv2lab.ops.penalties import apply_penalties
from mrv2lab.protocol import RequestData
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.transfer import TransferPolicy
from mrv2lab.sample.stage import Int32, SampleContext
from mrv2lab.sample.users import UserRows
from mrv2lab.state.input_batch import InputBatch
from mrv2lab.state.request_state import RequestState


class Penalties:
    """A stage of the sampler, and the counting behind it. Rows that use no penalty are neither counted nor read."""

    def __init__(
        self, rt: Runtime, transfers: TransferPolicy, states: RequestState, *, max_num_reqs: int, vocab_size: int
    ) -> None:
        self.rt = rt
        self.states = states
        # [R] float32 each; off at 1, 0 and 0
        self.repetition = UvaBackedTensor(transfers, "repetition_penalty", max_num_reqs, torch.float32)
        self.frequency = UvaBackedTensor(transfers, "frequency_penalty", max_num_reqs, torch.float32)
        self.presence = UvaBackedTensor(transfers, "presence_penalty", max_num_reqs, torch.float32)
        self.repetition.np.fill(1.0)
        self._shape = (max_num_reqs, vocab_size)
        self._counts: tuple[torch.Tensor, torch.Tensor] | None = None
        self._users = UserRows(max_num_reqs)
        self._rows = transfers.staging("penalties.rows", 64, torch.int32)
        self._to_count: dict[int, int] = {}
        """Rows of new users -> their known tokens."""
        self._changed = True

    @property
    def counts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``prompt_bin_mask`` [R, ceil(V / 32)] int32, tokens of the prompt, one bit each, and ``output_bin_counts``
        [R, V] int32, how often each token was generated. Allocated for the first user: 0.6 GB at 1,024 x 151,936."""
        if self._counts is None:
            rows, vocab = self._shape
            self._counts = (
                self.rt.zeros((rows, -(-vocab // 32)), torch.int32, name="prompt_bin_mask"),
                self.rt.zeros((rows, vocab), torch.int32, name="output_bin_counts"),
            )
        return self._counts

    def add_request(self, row: int, request: RequestData) -> None:
        """See :meth:`Stage.add_request`. A resumed request's outputs are counted anew."""
        sampling = request.sampling
        if not self._users.set(row, sampling.uses_penalties):
            return
        self.repetition.np[row] = sampling.repetition_penalty
        self.frequency.np[row] = sampling.frequency_penalty
        self.presence.np[row] = sampling.presence_penalty
        self._to_count.pop(row, None)
        if sampling.uses_penalties:
            self._to_count[row] = len(request.all_token_ids)
        self._changed = True

    def apply_staged_writes(self) -> None:
        """See :meth:`Stage.apply_staged_writes`. Behind that of the request state, whose tokens it counts."""
        if self._changed:
            self._changed = False
            self.repetition.publish()
            self.frequency.publish()
            self.presence.publish()
        if self._to_count:
            rows = self._rows.send(np.fromiter(self._to_count, np.int32, len(self._to_count)))
            longest = max(self._to_count.values())
            self._to_count.clear()
            zero_counts(self.rt, rows, *self.counts)
            count_history(
                self.rt,
                rows,
                self.states.all_token_ids.gpu,
                self.states.prompt_len.gpu,
                self.states.prefill_len.gpu,
                *self.counts,
                longest,
            )

    def reset(self) -> None:
        """See :meth:`Stage.reset`. The tables are published anew: queued copies of them may have been dropped."""
        self._to_count.clear()
        self._changed = True

    def used(self, rows: Int32) -> bool:
        """See :meth:`Stage.used`."""
        return self._users.any_of(rows)

    def apply(self, logits: torch.Tensor, context: SampleContext) -> None:
        """See :meth:`Stage.apply`."""
        batch = context.batch
        apply_penalties(
            self.rt,
            logits,
            batch.expanded_idx_mapping,
            context.local_pos,
            batch.logits_indices,
            batch.input_ids,
            self.repetition.gpu,
            self.frequency.gpu,
            self.presence.gpu,
            *self.counts,
        )

    def count_sampled(self, batch: InputBatch, sampled: torch.Tensor, num_sampled: torch.Tensor) -> None:
        """Count the tokens that this step accepted: of sampled int64[r, K + 1] the first num_sampled int32[r] a row.

        After sampling, once the numbers are final; launches nothing if no request of the batch uses a penalty.
        """
        if self.used(batch.host.rows):
            count_sampled(
                self.rt,
                batch.idx_mapping,
                sampled,
                num_sampled,
                self.repetition.gpu,
                self.frequency.gpu,
                self.presence.gpu,
                self.counts[1],
            )
