"""V1's persistent batch: a request's row is its place in the batch, so rows move. Counterpart in vLLM: ``InputBatch``
in ``v1/worker/gpu_input_batch.py``."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from mrv2lab.runner_v1.block_table import MakeTable, MultiGroupBlockTable
from mrv2lab.runner_v1.cached_request import CachedRequestState
from mrv2lab.runner_v1.sampling_metadata import SamplingMetadata
from mrv2lab.runner_v1.sampling_rows import SamplingRows

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy and stored as 0, as in vLLM (``_SAMPLING_EPS``)."""


@dataclass(slots=True)
class MoveCounters:
    """What keeping the batch dense and in order cost since the last reset."""

    row_moves: int = 0
    """Rows that condense moved into holes."""
    swaps: int = 0
    """Pairs of rows exchanged."""
    bytes_moved: int = 0
    """Bytes that moves and swaps wrote into rows of arrays: tokens, scalars, block ids. Python objects are not
    counted, nor is a swap's temporary."""
    adds: int = 0
    removes: int = 0

    @property
    def changed(self) -> bool:
        """Whether any row has another owner now, so that what is derived from rows must be made anew."""
        return bool(self.row_moves or self.swaps or self.adds or self.removes)

    def reset(self) -> None:
        """Zero all, at the start of a step."""
        self.row_moves = self.swaps = self.bytes_moved = self.adds = self.removes = 0


class InputBatch:
    """Up to R requests, one a row. In a step: remove, add, ``condense``, reorder; then rows ``[:num_reqs]`` are the
    batch.

    What a row holds past its length is stale and never read (block rows apart, whose tail is the null block).
    ``num_tokens_no_spec`` counts prompt and outputs, placeholders included, drafts not.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        vocab_size: int,
        block_sizes: Sequence[int],
        make_table: MakeTable,
    ) -> None:
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._req_ids: list[str | None] = []
        self.req_id_to_index: dict[str, int] = {}
        self._holes: list[int] = []
        """Rows of removed requests until somebody takes them or condense closes them; a heap, lowest first."""

        # [R, L] int32, pageable: can be gigabytes, and is never copied whole
        self.token_ids_cpu: np.ndarray[Any, np.dtype[np.int32]] = np.zeros((max_num_reqs, max_model_len), np.int32)
        # [R, L] int32, the same memory
        self.token_ids_cpu_tensor = torch.from_numpy(self.token_ids_cpu)
        # [R] int32
        self.num_tokens_no_spec: np.ndarray[Any, np.dtype[np.int32]] = np.zeros(max_num_reqs, np.int32)
        # [R] int32
        self.num_prompt_tokens: np.ndarray[Any, np.dtype[np.int32]] = np.zeros(max_num_reqs, np.int32)
        # [R] int32: before the present step
        self.num_computed_tokens = make_table("num_computed_tokens", (max_num_reqs,), torch.int32)
        # [R] float32: 0 = greedy
        self.temperature = make_table("temperature", (max_num_reqs,), torch.float32)
        self.block_table = MultiGroupBlockTable(block_sizes, max_num_reqs, max_model_len, make_table)

        self.greedy_reqs: set[str] = set()
        self.random_reqs: set[str] = set()
        self.generators: dict[int, torch.Generator] = {}
        """By row, only rows whose user gave a seed."""
        self.sampling = SamplingRows(max_num_reqs, vocab_size, make_table)
        """What else rows ask of the sampler."""
        self.sampling_metadata: SamplingMetadata | None = None
        """The same for the rows as they stand, made anew when rows have changed; None = no row asks for anything."""
        self.req_output_token_ids: list[list[int] | None] = []
        """By row, references to ``CachedRequestState.output_token_ids``."""

        # [r', 1] int64, device: what the previous step sampled, in that step's batch order (async scheduling only)
        self.prev_sampled_token_ids: torch.Tensor | None = None
        self.prev_req_id_to_index: dict[str, int] | None = None
        """Rows of the previous step, since rows have moved by the time its tokens are needed."""
        self.moves = MoveCounters()

    @property
    def num_reqs(self) -> int:
        """Live requests."""
        return len(self.req_id_to_index)

    @property
    def req_ids(self) -> list[str]:
        """Ids by row; after ``condense`` there is no None in it."""
        return cast("list[str]", self._req_ids)

    @property
    def all_greedy(self) -> bool:
        """Whether no row draws."""
        return not self.random_reqs

    @property
    def all_random(self) -> bool:
        """Whether every row draws."""
        return not self.greedy_reqs

    def add_request(self, request: CachedRequestState) -> int:
        """Give ``request`` the lowest hole, or else the next row, and overwrite all of it; returns the row.

        Raises ``ValueError`` or ``RuntimeError``, before anything has changed, when the id has a row already, the
        tokens or blocks do not fit, or no row is free.
        """
        req_id, num_tokens = request.req_id, request.num_tokens
        if req_id in self.req_id_to_index:
            raise ValueError(f"request {req_id!r} has row {self.req_id_to_index[req_id]} already; remove it first")
        if num_tokens > self.max_model_len:
            raise ValueError(
                f"request {req_id!r} has {num_tokens} tokens, but max_model_len is {self.max_model_len}; "
                "raise max_model_len or shorten the request"
            )
        self.block_table.check(request.block_ids)
        if self._holes:
            row = heapq.heappop(self._holes)
        else:
            row = len(self._req_ids)
            if row == self.max_num_reqs:
                raise RuntimeError(f"no free row for {req_id!r}: all {self.max_num_reqs} are taken; raise max_num_reqs")
            self._req_ids.append(None)
            self.req_output_token_ids.append(None)
        self.req_id_to_index[req_id] = row
        self._fill_row(row, request)
        self.moves.adds += 1
        return row

    def _fill_row(self, row: int, request: CachedRequestState) -> None:
        """Overwrite every field of ``row``: it holds what its previous owner left."""
        num_prompt, num_tokens = request.num_prompt_tokens, request.num_tokens
        self._req_ids[row] = request.req_id
        self.req_output_token_ids[row] = request.output_token_ids
        self.token_ids_cpu[row, :num_prompt] = request.prompt_token_ids
        self.token_ids_cpu[row, num_prompt:num_tokens] = request.output_token_ids
        self.num_tokens_no_spec[row] = num_tokens
        self.num_prompt_tokens[row] = num_prompt
        self.num_computed_tokens.np[row] = request.num_computed_tokens
        if request.sampling.temperature < GREEDY_BELOW:
            self.temperature.np[row] = 0
            self.greedy_reqs.add(request.req_id)
        else:
            self.temperature.np[row] = request.sampling.temperature
            self.random_reqs.add(request.req_id)
        self._set_generator(row, request.generator)
        self.sampling.fill_row(row, request)
        self.block_table.add_row(request.block_ids, row)

    def remove_request(self, req_id: str) -> int | None:
        """Make a hole of the row of ``req_id``; returns the row, or None if it has none."""
        row = self.req_id_to_index.pop(req_id, None)
        if row is None:
            return None
        heapq.heappush(self._holes, row)
        self._req_ids[row] = None
        self.req_output_token_ids[row] = None
        self.greedy_reqs.discard(req_id)
        self.random_reqs.discard(req_id)
        self.generators.pop(row, None)
        self.sampling.remove(row, req_id)
        self.block_table.clear_row(row)
        self.moves.removes += 1
        return row

    def condense(self) -> None:
        """Close the holes: while there is one, move the highest live row into the lowest hole."""
        if not self._holes:
            return
        last = len(self._req_ids) - 1
        for hole in sorted(self._holes):
            while last > hole and self._req_ids[last] is None:
                last -= 1
            if last <= hole:
                break
            self._move_row(last, hole)
            last -= 1
        self._holes.clear()
        del self._req_ids[self.num_reqs :]
        del self.req_output_token_ids[self.num_reqs :]

    def _move_row(self, src: int, dst: int) -> None:
        """Move every field of row ``src`` into the hole ``dst``, and leave a hole."""
        req_id = self.req_ids[src]
        self._req_ids[dst], self._req_ids[src] = req_id, None
        self.req_id_to_index[req_id] = dst
        self.req_output_token_ids[dst], self.req_output_token_ids[src] = self.req_output_token_ids[src], None
        num_tokens = self.num_tokens_no_spec[src]
        self.token_ids_cpu[dst, :num_tokens] = self.token_ids_cpu[src, :num_tokens]
        self.num_tokens_no_spec[dst] = num_tokens
        self.num_prompt_tokens[dst] = self.num_prompt_tokens[src]
        self.num_computed_tokens.np[dst] = self.num_computed_tokens.np[src]
        self.temperature.np[dst] = self.temperature.np[src]
        self._set_generator(dst, self.generators.pop(src, None))
        other_bytes = self.sampling.move_row(src, dst) + self.block_table.move_row(src, dst)
        self.moves.row_moves += 1
        self.moves.bytes_moved += int(num_tokens) * self.token_ids_cpu.itemsize + _SCALAR_BYTES + other_bytes

    def swap_states(self, i: int, j: int) -> None:
        """Exchange everything of two live rows."""
        if i == j:
            return
        id_i, id_j = self.req_ids[i], self.req_ids[j]
        self._req_ids[i], self._req_ids[j] = id_j, id_i
        self.req_id_to_index[id_i], self.req_id_to_index[id_j] = j, i
        outputs = self.req_output_token_ids
        outputs[i], outputs[j] = outputs[j], outputs[i]
        len_i, len_j = int(self.num_tokens_no_spec[i]), int(self.num_tokens_no_spec[j])
        tokens_i = self.token_ids_cpu[i, :len_i].copy()
        self.token_ids_cpu[i, :len_j] = self.token_ids_cpu[j, :len_j]
        self.token_ids_cpu[j, :len_i] = tokens_i
        self.num_tokens_no_spec[i], self.num_tokens_no_spec[j] = len_j, len_i
        _swap(self.num_prompt_tokens, i, j)
        _swap(self.num_computed_tokens.np, i, j)
        _swap(self.temperature.np, i, j)
        generator_i, generator_j = self.generators.pop(i, None), self.generators.pop(j, None)
        self._set_generator(i, generator_j)
        self._set_generator(j, generator_i)
        other_bytes = self.sampling.swap_rows(i, j) + self.block_table.swap_row(i, j)
        self.moves.swaps += 1
        self.moves.bytes_moved += (len_i + len_j) * self.token_ids_cpu.itemsize + 2 * _SCALAR_BYTES + other_bytes

    def _set_generator(self, row: int, generator: torch.Generator | None) -> None:
        if generator is None:
            self.generators.pop(row, None)
        else:
            self.generators[row] = generator

    def reset(self) -> None:
        """Forget every request; arrays keep their contents until rows get new owners, block tables are cleared."""
        self._req_ids.clear()
        self.req_output_token_ids.clear()
        self.req_id_to_index.clear()
        self._holes.clear()
        self.greedy_reqs.clear()
        self.random_reqs.clear()
        self.generators.clear()
        self.sampling.reset()
        self.sampling_metadata = None
        self.block_table.reset()
        self.prev_sampled_token_ids = self.prev_req_id_to_index = None
        self.moves.reset()

    def tables(self) -> dict[str, torch.Tensor]:
        """The batch's tables that kernels read, by name, as of their last publish."""
        fixed = {"num_computed_tokens": self.num_computed_tokens.gpu, "temperature": self.temperature.gpu}
        return self.block_table.tables() | fixed | self.sampling.device_tables()

    def host_tables(self) -> dict[str, np.ndarray[Any, Any]]:
        """The host's truth by name: what is published, and what only the host has."""
        tables = self.block_table.host_tables() | self.sampling.host_tables()
        return tables | {
            "num_computed_tokens": self.num_computed_tokens.np,
            "temperature": self.temperature.np,
            "token_ids_cpu": self.token_ids_cpu,
            "num_tokens_no_spec": self.num_tokens_no_spec,
            "num_prompt_tokens": self.num_prompt_tokens,
        }


_SCALAR_BYTES = 4 * 4
"""num_tokens_no_spec, num_prompt_tokens, num_computed_tokens, temperature: four bytes each. Tables that only some
requests need are counted where they are moved."""


def _swap(array: np.ndarray[Any, Any], i: int, j: int) -> None:
    array[i], array[j] = array[j], array[i]
