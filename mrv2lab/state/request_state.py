"""Permanent request rows: one row a live request, for its whole admission. Counterpart in vLLM: ``states.py``."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from mrv2lab.memory.diffs import StagedDiff
from mrv2lab.memory.staged_write import FusedStagedWriter, StagedWriteTensor
from mrv2lab.memory.uva_backed import UvaBackedTensor
from mrv2lab.protocol import RequestData
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.transfer import TransferPolicy


class RequestState:
    """Row-indexed state of up to R requests. Batch order is none of its business.

    Rows are recycled without clearing, so ``add_request`` overwrites every table; what lies past ``total_len`` in a row
    is stale and never read. Invariant between steps, for a decoding request: ``num_computed == total_len - 1`` and
    ``last_sampled[row] == all_token_ids[row, total_len - 1]``.
    """

    def __init__(
        self,
        rt: Runtime,
        transfers: TransferPolicy,
        *,
        max_num_reqs: int,
        max_model_len: int,
        num_speculative_tokens: int = 0,
    ) -> None:
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len
        self.req_id_to_index: dict[str, int] = {}
        self.index_to_req_id: dict[int, str] = {}
        self.free_indices: list[int] = list(range(max_num_reqs))
        """LIFO: the highest row is handed out first."""
        drafts = max(num_speculative_tokens, 1)

        # [R, L] int32: every known token. Large and cold, so it stays in host memory and kernels reach it through UVA
        self.all_token_ids = StagedWriteTensor(
            rt, None, "all_token_ids", (max_num_reqs, max_model_len), torch.int32, place="uva"
        )
        # [R] int32: the user's prompt, fixed for life
        self.prompt_len = UvaBackedTensor(transfers, "prompt_len", max_num_reqs, torch.int32)
        # [R] int32: tokens handed in at (re)admission; prompt + outputs after a preemption
        self.prefill_len = UvaBackedTensor(transfers, "prefill_len", max_num_reqs, torch.int32)
        # [R] int32: known tokens, advanced by post_update
        self.total_len = StagedWriteTensor(rt, None, "total_len", max_num_reqs, torch.int32)
        # [R] int32: tokens whose KV is valid, advanced by post_update. The exact one
        self.num_computed_tokens = StagedWriteTensor(rt, None, "num_computed_tokens", max_num_reqs, torch.int32)
        # [R] int64: what the next step's first decode token is
        self.last_sampled_tokens = rt.zeros(max_num_reqs, torch.int64, name="last_sampled_tokens")
        # [R, K] int64: drafts to verify next. Nobody reads them, and so nobody writes them, without speculation
        self.draft_tokens = StagedWriteTensor(rt, transfers, "draft_tokens", (max_num_reqs, drafts), torch.int64)
        # [lookahead, R] int32: prompt tokens behind this step's chunk, 0 past the end
        self.next_prefill_tokens = rt.zeros((drafts, max_num_reqs), torch.int32, name="next_prefill_tokens")

        # [R] int32, host: the scheduler's optimistic count, never below the device's exact one
        self.num_computed_tokens_np: np.ndarray[Any, np.dtype[np.int32]] = np.zeros(max_num_reqs, np.int32)
        # [R] int32, host: min(num_computed_tokens_np, prefill_len); exact, since prefill rejects nothing
        self.num_computed_prefill_tokens: np.ndarray[Any, np.dtype[np.int32]] = np.zeros(max_num_reqs, np.int32)
        self._tables = (self.all_token_ids, self.total_len, self.num_computed_tokens, self.draft_tokens)
        together = self.all_token_ids, self.total_len, self.num_computed_tokens
        self._writer = FusedStagedWriter(rt, transfers, "request_state", together)
        self._no_drafts = (0,) * num_speculative_tokens
        self._added = False
        self._batch_rows: tuple[list[str], np.ndarray[Any, np.dtype[np.int32]]] = [], np.empty(0, np.int32)
        """Ids of a batch and their rows, while nobody left."""
        self._decoding_rows: np.ndarray[Any, np.dtype[np.int32]] | None = None
        """The latest rows all of whose requests are known to have their prefill behind them."""

    @property
    def num_reqs(self) -> int:
        """Live requests."""
        return len(self.req_id_to_index)

    def rows(self, req_ids: list[str]) -> np.ndarray[Any, np.dtype[np.int32]]:
        """int32[r]: the row of each id; not to be written. Steps in a row ask for the same ids, which are compared by
        identity first: 2 us for 256 of them, where looking them up takes 12."""
        known, rows = self._batch_rows
        if req_ids is not known and req_ids != known:
            rows = self.rows_of(req_ids)
            rows.flags.writeable = False
            self._batch_rows = req_ids, rows
        return rows

    def any_prefilling(self, rows: np.ndarray[Any, np.dtype[np.int32]]) -> bool:
        """Whether a request of ``rows`` int32[r] has part of its prefill before it. Nobody goes back to it with the
        row it has, so the answer no holds for the same array (:meth:`rows`) from then on."""
        if rows is self._decoding_rows:
            return False
        prefilling = bool((self.num_computed_prefill_tokens[rows] < self.prefill_len.np[rows]).any())
        if not prefilling and not rows.flags.writeable:
            self._decoding_rows = rows
        return prefilling

    def rows_of(self, req_ids: Collection[str]) -> np.ndarray[Any, np.dtype[np.int32]]:
        """int32[r]: the row of each id, looked up."""
        return np.fromiter(map(self.req_id_to_index.__getitem__, req_ids), np.int32, len(req_ids))

    def add_request(self, request: RequestData) -> int:
        """Give ``request`` a row and overwrite all of it; returns the row. Raises before anything has changed."""
        if request.req_id in self.req_id_to_index:
            raise ValueError(f"request {request.req_id!r} has row {self.req_id_to_index[request.req_id]} already")
        if len(request.all_token_ids) > self.max_model_len:
            raise ValueError(
                f"request {request.req_id!r} has {len(request.all_token_ids)} tokens, "
                f"but max_model_len is {self.max_model_len}"
            )
        if not self.free_indices:
            raise RuntimeError(f"no free row for {request.req_id!r}: all {self.max_num_reqs} are taken")
        row = self.free_indices.pop()
        self.req_id_to_index[request.req_id] = row
        self.index_to_req_id[row] = request.req_id
        prefill_len = len(request.all_token_ids)
        self.prompt_len.np[row] = request.prompt_len
        self.prefill_len.np[row] = prefill_len
        self.num_computed_tokens_np[row] = request.num_computed_tokens
        self.num_computed_prefill_tokens[row] = request.num_computed_tokens
        self.total_len.stage_write_elem(row, prefill_len)
        self.num_computed_tokens.stage_write_elem(row, request.num_computed_tokens)
        self.all_token_ids.stage_write(row, 0, request.all_token_ids)
        if self._no_drafts:
            self.draft_tokens.stage_write(row, 0, self._no_drafts)
        self._added = True
        return row

    def remove_request(self, req_id: str) -> int:
        """Free the row of ``req_id`` (finished or preempted: the same here); returns it."""
        row = self.req_id_to_index.pop(req_id)
        self._batch_rows = [], np.empty(0, np.int32)
        del self.index_to_req_id[row]
        self.free_indices.append(row)
        for table in self._tables:
            table.unstage(row)
        return row

    def apply_staged_writes(self) -> None:
        """Flush what the requests added since the last step staged."""
        if not self._added:
            return
        self._added = False
        self.prompt_len.publish()
        self.prefill_len.publish()
        self._writer.apply_write()
        self.draft_tokens.apply_write()

    def reset(self) -> None:
        """Free every row and forget what is staged; tables keep their contents until rows get new owners."""
        # Made anew, not given back: an interrupt may have lost a row between the free list and the maps.
        self.req_id_to_index.clear()
        self._batch_rows = [], np.empty(0, np.int32)
        self.index_to_req_id.clear()
        self.free_indices[:] = range(self.max_num_reqs)
        for table in self._tables:
            table.drop_pending()
        self._added = True  # a queued copy of a published table may have been dropped, so all are published anew

    def staged(self) -> dict[str, list[StagedDiff]]:
        """The diffs that the next ``apply_staged_writes`` will apply, by table."""
        return {table.name: table.pending for table in self._tables if table.staged}

    def tables(self) -> dict[str, torch.Tensor]:
        """Every table that kernels read, by name."""
        return {table.name: table.gpu for table in self._tables} | {
            "prompt_len": self.prompt_len.gpu,
            "prefill_len": self.prefill_len.gpu,
            "last_sampled_tokens": self.last_sampled_tokens,
            "next_prefill_tokens": self.next_prefill_tokens,
        }

    def host_tables(self) -> dict[str, np.ndarray[Any, Any]]:
        """The host's truth of the published tables, by name."""
        return {"prompt_len": self.prompt_len.np, "prefill_len": self.prefill_len.np}
