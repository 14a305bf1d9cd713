"""V1's input preparation: NumPy over the batch on the host, whole-array copies, and device fix-ups behind them.

Counterpart in vLLM: ``GPUModelRunner._prepare_inputs`` and ``_prepare_input_ids`` in ``v1/worker/gpu_model_runner.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mrv2lab.ops.flat_pos_seq_lens import flat_pos_seq_lens
from mrv2lab.ops.scatter_sampled import scatter_sampled
from mrv2lab.ops.slot_mapping import slot_mapping
from mrv2lab.protocol import V1SchedulerOutput
from mrv2lab.runner_v1.buffers import AsyncBarrier, CpuGpuBuffer
from mrv2lab.runner_v1.cached_request import CachedRequestState
from mrv2lab.runner_v1.persistent_batch import InputBatch
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.transfer import PinnedCopy, TransferPolicy

Int32 = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class HostBatch:
    """What the host knows of a step's batch, in batch order. Its own copies: the persistent batch moves on."""

    req_ids: list[str]
    # [r] int32
    num_scheduled_tokens: Int32
    # [r + 1] int32
    query_start_loc: Int32
    # [r] int32, upper bounds
    seq_lens_upper_bound: Int32
    num_tokens: int
    discarded: list[int]
    """Rows whose sampled token is thrown away: prefill chunks that do not reach the end."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step's batch: the host's part and views of the fixed device buffers that go with it."""

    step: int
    host: HostBatch
    # [r + 1] int32
    query_start_loc: torch.Tensor
    # [r] int64: the tokens that get logits
    logits_indices: torch.Tensor
    # [t] int32
    input_ids: torch.Tensor
    # [t] int64
    positions: torch.Tensor
    # [r] int32
    seq_lens: torch.Tensor
    # G x [r, B_g] int32
    block_tables: tuple[torch.Tensor, ...]
    # G x [t] int64
    slot_mappings: tuple[torch.Tensor, ...]
    num_holes: int
    """Input ids that the host did not know and the device filled in."""

    @property
    def num_reqs(self) -> int:
        """Requests in this step."""
        return len(self.host.req_ids)

    @property
    def req_ids(self) -> list[str]:
        """Their ids, in batch order."""
        return self.host.req_ids


class InputPreparation:
    """The per-step buffers, and what fills them."""

    def __init__(
        self,
        rt: Runtime,
        transfers: TransferPolicy,
        barrier: AsyncBarrier,
        batch: InputBatch,
        *,
        max_num_batched_tokens: int,
        exposed: bool = False,
    ) -> None:
        self.rt = rt
        self.exposed = exposed
        """Races are on purpose: keep what a race may make of ids and counters inside the tables, in two more launches,
        since an index out of range ends a CUDA process where wrong tokens are wanted."""
        self.barrier = barrier
        self.batch = batch
        reqs, tokens = batch.max_num_reqs, max_num_batched_tokens

        def buffer(name: str, size: int, dtype: torch.dtype) -> CpuGpuBuffer:
            return CpuGpuBuffer(transfers, barrier, name, size, dtype)

        # [T] int32; -1 where the token is on the device alone
        self.input_ids = buffer("input_ids", tokens, torch.int32)
        # [R + 1] int32, non-decreasing: the tail repeats the number of tokens
        self.query_start_loc = buffer("query_start_loc", reqs + 1, torch.int32)
        # [T] int64: each token's row, and which of its request's tokens in this step it is
        self.req_indices = buffer("req_indices", tokens, torch.int64)
        self.query_pos = buffer("query_pos", tokens, torch.int64)
        # [R] int32
        self.num_scheduled_tokens = buffer("num_scheduled_tokens", reqs, torch.int32)
        # [R] bool. For a drafter, which has to know whose token is none; copied in every step, as V1 does
        self.discard_request_mask = buffer("discard_request_mask", reqs, torch.bool)
        # [T] int64
        self.positions = rt.zeros(tokens, torch.int64, name="positions")
        # [R] int32, zero behind the batch
        self.seq_lens = rt.zeros(reqs, torch.int32, name="seq_lens")
        # [R] int64
        self.logits_indices = rt.zeros(reqs, torch.int64, name="logits_indices")
        # [G, T] int64: where each token's KV goes, -1 = nowhere
        self.slot_mappings = rt.zeros((len(batch.block_table), tokens), torch.int64, name="slot_mappings")

        # Index arrays of the scatter go through fresh pinned memory in V1, whatever the policy: they are made behind
        # the point up to which a barrier protects.
        fresh = PinnedCopy(rt)
        self._token_indices = fresh.upload("token_indices", reqs, torch.int64)
        self._prev_rows = fresh.upload("prev_rows", reqs, torch.int64)
        # [R] int32 and [R] int64: the batch's row is its place, so the mapping is the identity
        self._identity = rt.adopt(torch.arange(reqs, dtype=torch.int32), "identity")
        self._arange_np = np.arange(max(reqs, tokens), dtype=np.int64)
        tables = [group.np for group in batch.block_table.groups]
        self._strides = rt.adopt(torch.tensor([table.shape[1] for table in tables]), "block_table.strides")
        self._block_sizes = rt.adopt(torch.tensor(batch.block_table.block_sizes, dtype=torch.int32), "block_sizes")
        self._pointers: dict[tuple[int, ...], torch.Tensor] = {}
        """Addresses of the groups' tables -> the same on the device; one entry, or one a slot under `uva_pool`."""
        # [R * L] int32 and [T] int32, host: source and target of the flat gather
        self._token_ids_flat = batch.token_ids_cpu_tensor.view(-1)
        self._input_ids_cpu = torch.from_numpy(self.input_ids.np)
        # [T] int64: scratch
        self._positions_np = np.zeros(tokens, np.int64)
        self._flat_np = np.zeros(tokens, np.int64)
        self._flat_cpu = torch.from_numpy(self._flat_np)
        self._views: tuple[Any, ...] = ()
        """What they are for, and the views of the fixed buffers: kept, since a steady step asks for the same ones."""
        rt.register("v1.logits_indices", _last_tokens)
        rt.register("v1.copy_prev_sampled", _copy_sampled)
        if exposed:
            rt.register("v1.bound_positions", _bound_positions)
            rt.register("v1.bound_ids", _bound_ids)

    # -- the step ------------------------------------------------------------------------------------------------------

    def prepare(self, requests: Mapping[str, CachedRequestState], output: V1SchedulerOutput) -> StepBatch:
        """Fill and send every buffer for the rows of the batch, and queue the kernels behind them."""
        batch = self.batch
        count, total = batch.num_reqs, output.total_num_scheduled_tokens
        # First, so that the largest copy overlaps the NumPy below.
        batch.block_table.commit(count)
        host = self._fill(requests, output, count, total)
        self.query_start_loc.copy_to_gpu(len(self.query_start_loc.np))
        self.discard_request_mask.copy_to_gpu(count)
        batch.num_computed_tokens.publish(count)
        self.req_indices.copy_to_gpu(total)
        self.query_pos.copy_to_gpu(total)
        self.num_scheduled_tokens.copy_to_gpu(count)
        self.barrier.then(self._compute_positions, count, total)
        num_holes = self._prepare_input_ids(host.query_start_loc, total)
        if self.exposed:
            self.barrier.then(self._bound_ids, total)
        return self._step_batch(output.step, host, num_holes)

    def _fill(
        self, requests: Mapping[str, CachedRequestState], output: V1SchedulerOutput, count: int, total: int
    ) -> HostBatch:
        """NumPy's part: per-token arrays, input ids gathered from the token table, lengths, who is discarded."""
        batch = self.batch
        req_ids = batch.req_ids.copy()
        scheduled = np.array([output.num_scheduled_tokens[req_id] for req_id in req_ids], np.int32)
        self.num_scheduled_tokens.np[:count] = scheduled
        starts = self.query_start_loc.np
        starts[0] = 0
        np.cumsum(scheduled, out=starts[1 : count + 1])
        starts[count + 1 :] = total
        arange = self._arange_np
        rows = self.req_indices.np[:total]
        rows[:] = arange[:count] if total == count else np.repeat(arange[:count], scheduled)
        query_pos = self.query_pos.np[:total]
        if total == count:
            query_pos.fill(0)
        else:
            np.subtract(arange[:total], np.repeat(starts[:count], scheduled), out=query_pos)
        computed = batch.num_computed_tokens.np[:count]
        positions, flat = self._positions_np[:total], self._flat_np[:total]
        np.add(computed[rows], query_pos, out=positions)
        np.multiply(rows, batch.max_model_len, out=flat)
        flat += positions
        # torch's gather, since NumPy's take is the slower one for many tokens.
        torch.index_select(self._token_ids_flat, 0, self._flat_cpu[:total], out=self._input_ids_cpu[:total])
        seq_lens = computed + scheduled
        num_tokens = np.array([requests[req_id].num_tokens for req_id in req_ids], np.int32)
        discard = seq_lens < num_tokens
        self.discard_request_mask.np[:count] = discard
        return HostBatch(
            req_ids=req_ids,
            num_scheduled_tokens=scheduled,
            query_start_loc=starts[: count + 1].copy(),
            seq_lens_upper_bound=seq_lens,
            num_tokens=total,
            discarded=discard.nonzero()[0].tolist(),
        )

    def _compute_positions(self, count: int, total: int) -> None:
        """Positions and lengths from the counters, slots from the block tables, and which tokens get logits."""
        batch = self.batch
        flat_pos_seq_lens(
            self.rt,
            self.req_indices.gpu,
            self.query_pos.gpu,
            batch.num_computed_tokens.gpu,
            self.num_scheduled_tokens.gpu,
            self.positions,
            self.seq_lens,
            total,
            count,
        )
        starts = self.query_start_loc.gpu
        if self.exposed:
            written = (self.positions, self.seq_lens, starts)
            self.rt.run("v1.bound_positions", *written, batch.max_model_len, total, reads=written, writes=written)
        self.rt.run(
            "v1.logits_indices", self.logits_indices, starts, count, reads=(starts,), writes=(self.logits_indices,)
        )
        tables = batch.block_table.gpu
        slot_mapping(
            self.rt,
            self._identity,
            starts,
            self.positions,
            tables,
            self._pointers_to(tables),
            self._strides,
            self._block_sizes,
            self.slot_mappings,
            count,
        )

    def _pointers_to(self, tables: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """uint64[G] on the device: the tables' addresses, made once for each set of them."""
        key = tuple(table.data_ptr() for table in tables)
        if key not in self._pointers:
            self._pointers[key] = self.rt.adopt(torch.tensor(key, dtype=torch.uint64), "block_table.pointers")
        return self._pointers[key]

    # -- input ids -----------------------------------------------------------------------------------------------------

    def _prepare_input_ids(self, query_start_loc: Int32, total: int) -> int:
        """Bring the input ids to the device: from the host, from the previous step's tokens there, or both. Returns
        how many came from the device."""
        batch = self.batch
        sampled, prev_rows_of = batch.prev_sampled_token_ids, batch.prev_req_id_to_index
        if sampled is None or not prev_rows_of:
            self.input_ids.copy_to_gpu(total)
            return 0
        # As V1 does, a loop over the requests in every step: rows may have moved since the tokens were sampled.
        ends = query_start_loc.tolist()
        prev_rows: list[int] = []
        token_indices: list[int] = []
        in_place, highest = True, -1
        for req_id, row in batch.req_id_to_index.items():
            prev = prev_rows_of.get(req_id)
            if prev is not None:
                index = ends[row + 1] - 1
                prev_rows.append(prev)
                token_indices.append(index)
                in_place &= prev == index
                highest = max(highest, index)
        holes = len(prev_rows)
        if holes < total:
            self.input_ids.copy_to_gpu(total)
        if not holes:
            return 0
        if in_place and highest == holes - 1:
            # The same requests in the same rows, all decodes: one copy within the device, nothing from the host.
            self.barrier.then(self._copy_prev_sampled, sampled, holes)
        else:
            self.barrier.then(self._scatter_prev_sampled, token_indices, prev_rows, sampled)
        return holes

    def _copy_prev_sampled(self, sampled: torch.Tensor, count: int) -> None:
        ids = self.input_ids.gpu
        self.rt.run("v1.copy_prev_sampled", ids, sampled, count, reads=(sampled,), writes=(ids,))

    def _scatter_prev_sampled(self, token_indices: list[int], prev_rows: list[int], sampled: torch.Tensor) -> None:
        at = self._token_indices.send(np.array(token_indices, np.int64))
        source = self._prev_rows.send(np.array(prev_rows, np.int64))
        scatter_sampled(self.rt, at, source, sampled, self.input_ids.gpu, len(prev_rows))

    def _bound_ids(self, total: int) -> None:
        ids = self.input_ids.gpu
        self.rt.run("v1.bound_ids", ids, total, reads=(ids,), writes=(ids,))

    # -- results -------------------------------------------------------------------------------------------------------

    def _step_batch(self, step: int, host: HostBatch, num_holes: int) -> StepBatch:
        count, total = len(host.req_ids), host.num_tokens
        tables = self.batch.block_table.gpu
        key = (count, total, *map(id, tables))
        if not self._views or self._views[0] != key:
            slots = tuple(self.slot_mappings[g, :total] for g in range(len(tables)))
            rows = tuple(table[:count] for table in tables)
            parts = (self.logits_indices[:count], self.positions[:total], self.seq_lens[:count], rows, slots)
            self._views = (key, parts, tables)  # kept alive: an id names one of them only as long
        logits_indices, positions, seq_lens, rows, slots = self._views[1]
        return StepBatch(
            step=step,
            host=host,
            query_start_loc=self.query_start_loc.first(count + 1),
            logits_indices=logits_indices,
            input_ids=self.input_ids.first(total),
            positions=positions,
            seq_lens=seq_lens,
            block_tables=rows,
            slot_mappings=slots,
            num_holes=num_holes,
        )

    def _buffers(self) -> tuple[CpuGpuBuffer, ...]:
        return (
            self.input_ids,
            self.query_start_loc,
            self.req_indices,
            self.query_pos,
            self.num_scheduled_tokens,
            self.discard_request_mask,
        )

    def tables(self) -> dict[str, torch.Tensor]:
        """Every per-step array on the device, by name."""
        return {buffer.name: buffer.gpu for buffer in self._buffers()} | {
            "positions": self.positions,
            "seq_lens": self.seq_lens,
            "logits_indices": self.logits_indices,
            "slot_mappings": self.slot_mappings,
        }

    def host_tables(self) -> dict[str, np.ndarray[Any, Any]]:
        """The host sides of the per-step buffers, by name."""
        return {buffer.name: buffer.np for buffer in self._buffers()}


def _last_tokens(logits_indices: torch.Tensor, query_start_loc: torch.Tensor, count: int) -> None:
    """A request's last token of the step gets logits."""
    torch.sub(query_start_loc[1 : count + 1], 1, out=logits_indices[:count])


def _bound_positions(
    positions: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor, max_model_len: int, total: int
) -> None:
    """Counters of two steps mixed up."""
    positions[:total].clamp_(max=max_model_len - 1)
    seq_lens.clamp_(max=max_model_len)
    query_start_loc.clamp_(max=total)


def _bound_ids(input_ids: torch.Tensor, total: int) -> None:
    """A placeholder that nobody filled in."""
    input_ids[:total].clamp_(min=0)


def _copy_sampled(input_ids: torch.Tensor, sampled: torch.Tensor, count: int) -> None:
    input_ids[:count].copy_(sampled[:count, 0])
