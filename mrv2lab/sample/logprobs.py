"""Log-probabilities of sampled tokens. Counterpart in vLLM: ``sample/logprob.py``.

A step's way: ``plan`` (inside the transfer policy's ``prepare``: it uploads) -> ``launch`` behind sampling -> ``copy``
on the copy stream -> ``read`` behind its event. Requests that ask for more than ``max_top`` tokens, or for the
vocabulary (-1), get their whole row written into host memory by the kernel, and the host orders it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch

from mrv2lab.protocol import Logprobs, RequestData
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.transfer import TransferPolicy
from mrv2lab.sample.token_logprobs import LogprobsBuffers, TokenLogprobs, widen
from mrv2lab.sample.users import UserRows
from mrv2lab.state.input_batch import HostBatch

Int32 = np.ndarray[Any, np.dtype[np.int32]]
LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
"""Of the model's logits or of the masked and scaled ones that were sampled from; log-softmax or as they are."""


@dataclass(frozen=True, slots=True)
class LogprobsPlan:
    """Which logits rows of a step need log-probabilities, and how many. m of its n logits rows, in their order."""

    # [r] int32: entry of each request's first logits row, -1 if it asked for nothing
    first_entry: Int32
    # [m] int32: what was asked for; V = everything
    asked: Int32
    # [w] int32: entries whose whole row goes to the host
    whole: Int32
    columns: int
    """1 + the greatest number of tokens that the device orders."""
    # [m] int32, device: logits row and number of tokens of each entry
    logits_rows: torch.Tensor
    tops: torch.Tensor
    # [w] int32, device
    whole_entries: torch.Tensor

    @property
    def num_rows(self) -> int:
        """m."""
        return len(self.asked)


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """One step's log-probabilities on their way."""

    plan: LogprobsPlan
    buffers: LogprobsBuffers
    # [w, V] float32, written by the kernel itself; None if nobody asked for whole rows
    whole: torch.Tensor | None

    def copy(self) -> None:
        """Queue the copies to the host on the current stream."""
        self.buffers.copy(self.plan.num_rows, self.plan.columns)

    def read(self, num_sampled: Int32) -> Logprobs:
        """Of all sampled tokens, in batch order: ``num_sampled`` int32[r] of each request, whose tokens belong to its
        first logits rows. Once the copies are done. Tokens of requests that asked for nothing have ids of -1."""
        plan = self.plan
        total = int(num_sampled.sum())
        request = np.repeat(np.arange(len(num_sampled)), num_sampled)
        nth = np.arange(total) - (np.cumsum(num_sampled) - num_sampled)[request]
        entry = plan.first_entry[request]
        rows = np.flatnonzero(entry >= 0)
        entry = entry[rows] + nth[rows]
        ids = np.full((total, plan.columns), -1, np.int32)
        values = np.full((total, plan.columns), -np.inf, np.float32)
        ranks, tops = np.zeros(total, np.int32), np.full(total, -1, np.int32)
        all_ids, all_values, all_ranks = self.buffers.read(plan.num_rows, plan.columns)
        ids[rows], values[rows], ranks[rows] = all_ids[entry], all_values[entry], all_ranks[entry]
        tops[rows] = plan.asked[entry]
        whole = {}
        if self.whole is not None:
            by_token, place = self.whole.numpy(), {e: w for w, e in enumerate(plan.whole.tolist())}
            at = zip(rows.tolist(), entry.tolist(), strict=True)
            whole = {row: by_token[place[e]] for row, e in at if e in place}
        return widen(ids, values, ranks, tops, whole, int(tops.max(initial=0)))


class SampleLogprobs:
    """Row-indexed wishes, and the launches for the rows of a batch that have one."""

    def __init__(
        self,
        rt: Runtime,
        transfers: TransferPolicy,
        kernels: TokenLogprobs,
        *,
        max_num_reqs: int,
        max_num_logits: int,
        mode: LogprobsMode = "raw_logprobs",
    ) -> None:
        if mode not in get_args(LogprobsMode):
            raise ValueError(f"logprobs mode must be one of {get_args(LogprobsMode)}, got {mode!r}")
        if kernels.max_rows < max_num_logits:
            raise ValueError(f"{max_num_logits} logits rows need kernels for as many, got {kernels.max_rows}")
        self.rt = rt
        self.kernels = kernels
        self.processed = mode.startswith("processed")
        """Whether :meth:`launch` wants the logits that were sampled from, rather than the model's."""
        self.as_logits = mode.endswith("logits")
        # [R] int32: -1 = nothing, V = the whole vocabulary
        self.num_logprobs: Int32 = np.full(max_num_reqs, -1, np.int32)
        self._users = UserRows(max_num_reqs)
        # logits_rows, tops and whole entries of one step, in one copy
        self._upload = transfers.upload("logprobs.plan", 3 * max_num_logits, torch.int32)

    def add_request(self, row: int, request: RequestData) -> None:
        """Overwrite ``row``."""
        wish, vocab = request.sampling.logprobs, self.kernels.vocab_size
        if self._users.set(row, wish is not None):
            self.num_logprobs[row] = -1 if wish is None else vocab if wish < 0 else min(wish, vocab)

    def plan(self, host: HostBatch) -> LogprobsPlan | None:
        """Which rows, uploaded; None if the batch asks for nothing, and then nothing is launched."""
        if not self._users.any_of(host.rows):
            return None
        wanted = self.num_logprobs[host.rows]
        mine = wanted >= 0
        counts = host.num_draft_tokens + 1
        first_entry = np.where(mine, np.cumsum(np.where(mine, counts, 0)) - counts, -1).astype(np.int32)
        logits_rows = np.flatnonzero(np.repeat(mine, counts)).astype(np.int32)
        asked = np.repeat(wanted, np.where(mine, counts, 0))
        tops = np.where(asked > self.kernels.max_top, 0, asked)
        whole = np.flatnonzero(asked > self.kernels.max_top).astype(np.int32)
        m, w = len(asked), len(whole)
        sent = self._upload.send(np.concatenate([logits_rows, tops, whole]).astype(np.int32))
        columns = 1 + int(tops.max())
        return LogprobsPlan(first_entry, asked, whole, columns, sent[:m], sent[m : 2 * m], sent[2 * m : 2 * m + w])

    def launch(
        self, plan: LogprobsPlan, buffers: LogprobsBuffers, logits: torch.Tensor, tokens: torch.Tensor
    ) -> StepLogprobs:
        """Queue the work. ``logits`` [n, V]: the model's or the processed ones, as ``processed`` says; ``tokens``
        int64[n] on the device: what was sampled from each logits row (with drafts: token j of a request belongs to its
        j-th logits row; rows behind the accepted ones may hold anything from -1 to V - 1)."""
        out = buffers.views(plan.num_rows, plan.columns)
        self.kernels.launch(out, logits, plan.logits_rows, tokens, plan.tops, self.as_logits)
        whole = None
        if len(plan.whole):
            shape = (len(plan.whole), self.kernels.vocab_size)
            whole = self.rt.empty(shape, torch.float32, name="logprobs.whole.tmp", place="pinned")
            self.kernels.launch_rows(whole, logits, plan.logits_rows, plan.whole_entries, self.as_logits)
        return StepLogprobs(plan, buffers, whole)
