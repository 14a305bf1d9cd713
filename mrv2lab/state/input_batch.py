"""One step's batch: fixed buffers that kernels fill, and the values that describe it. Counterpart: ``input_batch.py``.

The batch order is the attention backend's wish, independent of rows; ``idx_mapping`` gives each batch index its row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from mrv2lab.protocol import MRV2SchedulerOutput
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.transfer import TransferPolicy
from mrv2lab.state.prefix import Prefix
from mrv2lab.state.request_state import RequestState

Int32 = np.ndarray[Any, np.dtype[np.int32]]


class InputBuffers:
    """Allocated once, at fixed addresses, so that a graph may read them."""

    def __init__(
        self,
        rt: Runtime,
        transfers: TransferPolicy,
        *,
        max_num_reqs: int,
        max_num_batched_tokens: int,
        num_speculative_tokens: int = 0,
        fused: bool = False,
    ) -> None:
        """``fused``: :meth:`send` will be asked for what ``prepare_batch`` reads."""
        self.max_num_reqs = max_num_reqs
        max_logits = min(max_num_reqs * (num_speculative_tokens + 1), max_num_batched_tokens)
        # [T] int32
        self.input_ids = rt.zeros(max_num_batched_tokens, torch.int32, name="input_ids")
        # [T] int64
        self.positions = rt.zeros(max_num_batched_tokens, torch.int64, name="positions")
        # [R] int32, zero behind the batch
        self.seq_lens = rt.zeros(max_num_reqs, torch.int32, name="seq_lens")
        # [n] int64: the tokens that get logits
        self.logits_indices = rt.zeros(max_logits, torch.int64, name="logits_indices")
        # [n] int32: row of each logits row, and which of its request's it is
        self.expanded_idx_mapping = rt.zeros(max_logits, torch.int32, name="expanded_idx_mapping")
        self.expanded_local_pos = rt.zeros(max_logits, torch.int32, name="expanded_local_pos")
        # [n] int32, zero: which of its request's logits rows each is where nobody has drafts
        self.first_pos = rt.zeros(max_logits, torch.int32, name="first_pos")
        # [r] int32: row of each batch index
        self.idx_mapping = transfers.upload("idx_mapping", max_num_reqs, torch.int32)
        # [R + 1] int32, non-decreasing: the tail repeats the number of tokens
        self.query_start_loc = transfers.upload("query_start_loc", max_num_reqs + 1, torch.int32)
        # [r + 1] int32
        self.cu_num_logits = transfers.upload("cu_num_logits", max_num_reqs + 1, torch.int32)
        # [R + 1] int32: cu_num_logits where nobody has drafts
        self.arange = rt.adopt(torch.arange(max_num_reqs + 1, dtype=torch.int32), "arange")
        self.first_input_ids = Prefix(self.input_ids)
        self.first_positions = Prefix(self.positions)
        self.first_seq_lens = Prefix(self.seq_lens)
        self.first_logits_indices = Prefix(self.logits_indices)
        self.first_arange = Prefix(self.arange)
        self._first_pos = Prefix(self.first_pos)
        self._first_rows = Prefix(self.idx_mapping.device)

        self._packed = _PackedBatch(transfers, max_num_reqs) if fused else None
        self.packed: tuple[torch.Tensor, torch.Tensor] | None = None
        """Rows [R] and query_start_loc [R + 1] as the latest fused :meth:`send` of a batch with prefills left them."""
        self._sent: Int32 | None = None
        """The rows that the device has, if nobody can have written them since."""

    def send(self, host: HostBatch, *, fused: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Send ``rows`` and ``query_start_loc`` of ``host``; idx_mapping [r] and query_start_loc [R + 1] on the device.

        ``fused``: for ``prepare_decode``, which makes query_start_loc; rows are not sent if they are the very array
        that was sent last. The rows of steps in a row are one array while nobody leaves (``RequestState.rows``). Or,
        if this is no plain decode, for ``prepare_batch``, which makes both of ``packed``.
        """
        rows, starts = host.rows, host.query_start_loc
        sent, self._sent = self._sent, None
        if fused and not host.is_plain_decode:
            assert self._packed is not None, "buffers that were made for it"
            self.packed = self._packed.send(rows, starts)
        elif not (fused and rows is sent):
            self.idx_mapping.send(rows)
        if not rows.flags.writeable:
            self._sent = rows
        starts_gpu = self.query_start_loc.first(len(starts)) if fused else self.query_start_loc.send(starts)
        return self._first_rows(len(rows)), starts_gpu

    def local_pos(self, host: HostBatch) -> torch.Tensor:
        """[n] int32: which of its request's logits rows each one is (0, then one for each draft)."""
        if host.num_logits > len(host.req_ids):
            return self.expanded_local_pos[: host.num_logits]
        return self._first_pos(host.num_logits)

    def tables(self) -> dict[str, torch.Tensor]:
        """What the input kernels read and write, by name, drafts' part apart."""
        return {
            "idx_mapping": self.idx_mapping.device,
            "query_start_loc": self.query_start_loc.device,
            "input_ids": self.input_ids,
            "positions": self.positions,
            "seq_lens": self.seq_lens,
            "logits_indices": self.logits_indices,
        }


class _PackedBatch:
    """Rows and query_start_loc in one staging upload, which the step may find in host memory: its kernel copies them.

    Each begins at a fixed place: where a policy lets a kernel read what a later step has written (``unsafe``, or a pool
    that is too shallow), rows must stay rows. It is a multiple of 16 bytes, by whose alignment Triton compiles a kernel
    anew.
    """

    def __init__(self, transfers: TransferPolicy, max_num_reqs: int) -> None:
        self._starts = -(-max_num_reqs // 4) * 4
        self._upload = transfers.staging("batch", self._starts + max_num_reqs + 1, torch.int32)
        # [words] int32: what is sent
        self._host: Int32 = np.zeros(self._starts + max_num_reqs + 1, np.int32)
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        """By slab, each of a few that are used in turn: the slab and its parts."""

    def send(self, rows: Int32, starts: Int32) -> tuple[torch.Tensor, torch.Tensor]:
        """int32[R], of which the first r are ``rows``, and int32[R + 1]: ``starts``."""
        host = self._host
        host[: len(rows)] = rows
        host[self._starts :] = starts
        slab = self._upload.send_whole(host)
        found = self._views.get(id(slab))
        if found is None:
            found = self._views[id(slab)] = slab, slab[: self._starts], slab[self._starts :]
        return found[1:]


@dataclass(frozen=True, slots=True)
class HostBatch:
    """What the host alone knows of a step's batch, in batch order."""

    req_ids: list[str]
    # [r] int32
    rows: Int32
    # [r] int32
    num_scheduled_tokens: Int32
    # [r] int32
    num_draft_tokens: Int32
    # [R + 1] int32
    query_start_loc: Int32
    # [r] int32, upper bounds: drafts in flight may be rejected
    seq_lens_upper_bound: Int32
    num_tokens: int
    num_logits: int
    has_prefill: bool
    all_sample: bool = False
    """Whether it is known that nobody leaves a part of its prefill for a later step."""

    @property
    def is_plain_decode(self) -> bool:
        """Whether every request has one token, its last sampled one, and gets one row of logits."""
        return self.num_tokens == self.num_logits == len(self.req_ids) and not self.has_prefill


@dataclass(frozen=True, slots=True)
class InputBatch:
    """A step's batch: the host's part and the device tensors that go with it (views of :class:`InputBuffers`)."""

    step: int
    host: HostBatch
    # [r] int32
    idx_mapping: torch.Tensor
    # [R + 1] int32
    query_start_loc: torch.Tensor
    # [r + 1] int32
    cu_num_logits: torch.Tensor
    # [n] int32
    expanded_idx_mapping: torch.Tensor
    # [n] int64
    logits_indices: torch.Tensor
    # [t] int32
    input_ids: torch.Tensor
    # [t] int64
    positions: torch.Tensor
    # [r] int32
    seq_lens: torch.Tensor

    @property
    def num_reqs(self) -> int:
        """Requests in this step."""
        return len(self.host.req_ids)


def gather_host_batch(state: RequestState, output: MRV2SchedulerOutput, decode_query_len: int = 1) -> HostBatch:
    """Order the scheduled requests and collect what the host knows of them; no per-request Python beyond dictionary
    look-ups.

    Batch order: verify rows, then plain decodes, then short extends, then prefills, i.e. ascending by (has no drafts,
    num_tokens != decode_query_len, num_tokens); ties keep the scheduler's order.
    """
    scheduled, cached = output.num_scheduled_tokens, output.cached_reqs.req_ids
    count = len(scheduled)
    ids = cached if len(cached) == count else list(scheduled)  # the same ones, and steps in a row bring the same list
    rows = state.rows(ids)
    if (
        output.total_num_scheduled_tokens == count == len(output.cached_reqs.req_ids)
        and not output.scheduled_draft_tokens
    ):
        # A token each: the order is the scheduler's.
        tokens, drafts, query_start_loc = _one_token_each(count, state.max_num_reqs)
        num_tokens = num_logits = count
    else:
        tokens = np.fromiter(scheduled.values(), np.int32, count)
        drafts = _draft_counts(ids, output.scheduled_draft_tokens)
        # Mostly newcomers stand behind those who decode, as they should: what ascends needs no sort.
        ascends = decode_query_len == 1 and not output.scheduled_draft_tokens and not (tokens[1:] < tokens[:-1]).any()
        if not ascends:
            order = np.lexsort((tokens, tokens != decode_query_len, drafts == 0))
            if (order[1:] < order[:-1]).any():
                ids = [ids[i] for i in order.tolist()]
                tokens, drafts, rows = tokens[order], drafts[order], rows[order]
        query_start_loc = np.empty(state.max_num_reqs + 1, np.int32)
        query_start_loc[0] = 0
        np.cumsum(tokens, out=query_start_loc[1 : count + 1])
        query_start_loc[count + 1 :] = query_start_loc[count]
        num_tokens, num_logits = int(query_start_loc[count]), count + int(drafts.sum())
    seq_lens, has_prefill = state.num_computed_tokens_np[rows] + tokens, state.any_prefilling(rows)
    return HostBatch(
        req_ids=ids,
        rows=rows,
        num_scheduled_tokens=tokens,
        num_draft_tokens=drafts,
        query_start_loc=query_start_loc,
        seq_lens_upper_bound=seq_lens,
        num_tokens=num_tokens,
        num_logits=num_logits,
        has_prefill=has_prefill,
        # The bound is exact for those that have a part of it before them.
        all_sample=not has_prefill or bool((seq_lens >= state.prefill_len.np[rows]).all()),
    )


@lru_cache(maxsize=8)
def _one_token_each(count: int, max_num_reqs: int) -> tuple[Int32, Int32, Int32]:
    """num_scheduled_tokens, num_draft_tokens and query_start_loc of ``count`` requests with one token each."""
    made = np.ones(count, np.int32), np.zeros(count, np.int32), np.arange(max_num_reqs + 1, dtype=np.int32)
    np.minimum(made[2], count, out=made[2])
    for array in made:
        array.flags.writeable = False
    return made


def _draft_counts(req_ids: list[str], drafts: Mapping[str, list[int]]) -> Int32:
    if not drafts:
        return np.zeros(len(req_ids), np.int32)
    return np.fromiter((len(drafts.get(req_id, ())) for req_id in req_ids), np.int32, len(req_ids))
