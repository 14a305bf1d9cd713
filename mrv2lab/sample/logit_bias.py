"""Allowed token ids, logit bias and min_tokens, in this order. Counterpart: ``v1/worker/gpu/sample/logit_bias.py``."""

from __future__ import annotations

import torch

from mrv2lab.memory import StagedWriteTensor, Values
from mrv2lab.memory.uva_backed import UvaBackedTensor
from mrv2lab.ops.logit_bias import ALLOWED, BIASED, KEEP_STOPS, MIN_LEN, STOPS, logit_bias
from mrv2lab.protocol import RequestData
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.transfer import TransferPolicy
from mrv2lab.sample.stage import Int32, SampleContext
from mrv2lab.sample.users import UserRows
from mrv2lab.sampling_params import MAX_ALLOWED_TOKENS, MAX_STOP_TOKENS


class LogitBias:
    """A stage of the sampler. min_tokens holds back every stop token, EOS included (vLLM #32634 left it out)."""

    def __init__(self, rt: Runtime, transfers: TransferPolicy, *, max_num_reqs: int) -> None:
        self.rt = rt

        def table(name: str, columns: int, dtype: torch.dtype) -> StagedWriteTensor:
            return StagedWriteTensor(rt, transfers, name, (max_num_reqs, columns), dtype)

        # [R, 1024] int32
        self.allowed_ids = table("allowed_ids", MAX_ALLOWED_TOKENS, torch.int32)
        # [R, 1024] int32 and float32
        self.bias_ids = table("bias_ids", MAX_ALLOWED_TOKENS, torch.int32)
        self.bias_values = table("bias_values", MAX_ALLOWED_TOKENS, torch.float32)
        # [R, 128] int32, ascending
        self.stop_ids = table("stop_ids", MAX_STOP_TOKENS, torch.int32)
        # [R, 5] int32: how many of each, prompt_len + min_tokens, and whether the row may fall back to its stops
        self.edits = UvaBackedTensor(transfers, "logit_edits", (max_num_reqs, 5), torch.int32)
        self._users = UserRows(max_num_reqs)
        self._tables = (self.allowed_ids, self.bias_ids, self.bias_values, self.stop_ids)
        self._changed = True

    def add_request(self, row: int, request: RequestData) -> None:
        """See :meth:`Stage.add_request`. Raises ``ValueError`` for more stop ids than min_tokens can hold back."""
        sampling = request.sampling
        stops: list[int] = []
        if sampling.min_tokens > 0:
            stops = sorted({*request.stop_token_ids, *sampling.stop_token_ids})
        if len(stops) > MAX_STOP_TOKENS:
            raise ValueError(
                f"request {request.req_id!r}: min_tokens can hold back {MAX_STOP_TOKENS} stop tokens at most, it has "
                f"{len(stops)}"
            )
        self.edits.np[row, KEEP_STOPS] = sampling.structured_output is not None
        allowed: Values = sampling.allowed_token_ids or ()
        if not self._users.set(row, bool(allowed) or bool(sampling.logit_bias) or bool(stops)):
            return
        for table in self._tables:
            table.unstage(row)
        self.allowed_ids.stage_write(row, 0, allowed)
        self.bias_ids.stage_write(row, 0, tuple(sampling.logit_bias))
        self.bias_values.stage_write(row, 0, tuple(sampling.logit_bias.values()))
        self.stop_ids.stage_write(row, 0, stops)
        edits = self.edits.np[row]
        edits[ALLOWED], edits[BIASED], edits[STOPS] = len(allowed), len(sampling.logit_bias), len(stops)
        edits[MIN_LEN] = request.prompt_len + sampling.min_tokens if stops else 0
        self._changed = True

    def apply_staged_writes(self) -> None:
        """See :meth:`Stage.apply_staged_writes`."""
        if self._changed:
            self._changed = False
            self.edits.publish()
            for table in self._tables:
                table.apply_write()

    def reset(self) -> None:
        """See :meth:`Stage.reset`. The counts are published anew: a queued copy of them may have been dropped."""
        for table in self._tables:
            table.drop_pending()
        self._changed = True

    def used(self, rows: Int32) -> bool:
        """See :meth:`Stage.used`. A row counts as long as its request lives: how far it is, the device knows."""
        return self._users.any_of(rows)

    def apply(self, logits: torch.Tensor, context: SampleContext) -> None:
        """See :meth:`Stage.apply`."""
        batch = context.batch
        logit_bias(
            self.rt,
            logits,
            batch.expanded_idx_mapping,
            batch.positions,
            batch.logits_indices,
            self.edits.gpu,
            self.allowed_ids.gpu,
            self.bias_ids.gpu,
            self.bias_values.gpu,
            self.stop_ids.gpu,
        )
