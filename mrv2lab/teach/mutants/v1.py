"""Bugs of V1: rows that move with one table forgotten, tokens that the host does not know yet, buffers that the barrier
forgets. MRV2 removes the first two families by design, which is what these are for.

Numbers are those of public reports in vLLM whose kind of fault a mutant repeats.
"""

from __future__ import annotations

from typing import Any

import torch

import mrv2lab.runner_v1.bookkeeping as bookkeeping
import mrv2lab.runner_v1.model_runner as model_runner
from mrv2lab.runner_v1.block_table import MultiGroupBlockTable
from mrv2lab.runner_v1.buffers import BUFFERS, AsyncBarrier
from mrv2lab.runner_v1.model_runner import ModelRunnerV1
from mrv2lab.runner_v1.persistent_batch import InputBatch, MoveCounters
from mrv2lab.runner_v1.prepare import InputPreparation
from mrv2lab.runner_v1.sampler import Sampler
from mrv2lab.teach.mutants.mutant import Patch, mutant

# -- rows that move ----------------------------------------------------------------------------------------------------


def _move_forgets(patch: Patch, table: Any) -> None:
    """``table(batch)`` is an array by row; a move into a hole leaves what the hole's former owner had."""

    def move(original: Any, self: InputBatch, src: int, dst: int) -> None:
        kept = table(self)[dst].copy()
        original(self, src, dst)
        table(self)[dst] = kept

    patch.around(InputBatch, "_move_row", move)


@mutant("v1", "twin", breaks="Condense moves a row without its computed count: positions are its former owner's.")
def condense_forgets_computed_count(patch: Patch) -> None:
    _move_forgets(patch, lambda batch: batch.num_computed_tokens.np)


@mutant(
    "v1",
    "twin",
    breaks="Condense moves a row without its tokens: what is left of a prompt is its former owner's.",
)
def condense_forgets_tokens(patch: Patch) -> None:
    _move_forgets(patch, lambda batch: batch.token_ids_cpu)


@mutant("v1", "twin", breaks="Condense moves a row without its temperature: greedy text wanders after somebody's end.")
def condense_forgets_temperature(patch: Patch) -> None:
    _move_forgets(patch, lambda batch: batch.temperature.np)


@mutant(
    "v1", "twin", breaks="Condense moves a row without its blocks, and the request reads and writes the null block."
)
def condense_forgets_blocks(patch: Patch) -> None:
    def move(original: Any, self: MultiGroupBlockTable, src: int, dst: int) -> int:
        self.clear_row(src)
        moved: int = original(self, src, dst)
        return moved

    patch.around(MultiGroupBlockTable, "move_row", move)


@mutant(
    "v1",
    "twin",
    breaks="Condense moves a row without its generator, which is kept by row: a seeded request goes on with the draws "
    "of those that gave no seed.",
)
def condense_forgets_generator(patch: Patch) -> None:
    def move(original: Any, self: InputBatch, src: int, dst: int) -> None:
        original(self, src, dst)
        self.generators.pop(dst, None)

    patch.around(InputBatch, "_move_row", move)


@mutant(
    "v1",
    "twin",
    breaks="A reorder exchanges two rows but not their blocks: each request attends to the other's context.",
    reorder="mrv2",
)
def swap_forgets_blocks(patch: Patch) -> None:
    patch.set(MultiGroupBlockTable, "swap_row", lambda self, i, j: 0)


@mutant(
    "v1",
    "twin",
    breaks="Sampling arrays are sent again when requests come or go, but not when rows only change places.",
    reorder="mrv2",
)
def swap_does_not_count_as_change(patch: Patch) -> None:
    patch.set(MoveCounters, "changed", property(lambda self: bool(self.adds or self.removes)))


# -- the token that the host does not know -----------------------------------------------------------------------------


@mutant(
    "v1",
    "twin",
    breaks="Last step's tokens are taken by row, though rows have moved since (vLLM #38556): a request goes on with "
    "another one's token.",
)
def last_tokens_by_row(patch: Patch) -> None:
    def prepare(original: Any, self: InputPreparation, *args: Any) -> int:
        batch, right = self.batch, self.batch.prev_req_id_to_index
        if right is not None:
            assert batch.prev_sampled_token_ids is not None
            last = len(batch.prev_sampled_token_ids) - 1
            batch.prev_req_id_to_index = {req_id: min(batch.req_id_to_index.get(req_id, 0), last) for req_id in right}
        try:
            holes: int = original(self, *args)
            return holes
        finally:
            batch.prev_req_id_to_index = right

    patch.around(InputPreparation, "_prepare_input_ids", prepare)


@mutant(
    "v1",
    "twin",
    breaks="A placeholder leaks (vLLM #37159, #40768): the device's token is not put in its place, and the model "
    "embeds token 0, to which placeholders are clamped.",
)
def placeholder_leaks(patch: Patch) -> None:
    patch.set(bookkeeping, "PLACEHOLDER", 0)
    patch.set(InputPreparation, "_scatter_prev_sampled", lambda self, *args: None)

    def copy(original: Any, self: InputPreparation, sampled: torch.Tensor, count: int) -> None:
        self.input_ids.copy_to_gpu(count)

    patch.around(InputPreparation, "_copy_prev_sampled", copy)


@mutant(
    "v1",
    "twin",
    breaks="The row of an unfinished prefill chunk is not discarded from the map of last tokens: the next chunk ends "
    "with a token that was sampled in the middle of the prompt.",
)
def chunk_token_is_kept(patch: Patch) -> None:
    def bookkeep(
        original: Any, batch: Any, requests: Any, req_ids: list[str], sampled: torch.Tensor, discarded: list[int]
    ) -> int:
        count: int = original(batch, requests, req_ids, sampled, discarded)
        batch.prev_req_id_to_index.update({req_ids[row]: row for row in discarded})
        return count

    patch.around(model_runner, "bookkeep_async", bookkeep)


@mutant(
    "v1",
    "twin",
    breaks="An output keeps no copy of the batch's ids: by the time it is read rows have moved, and tokens go to the "
    "wrong requests.",
)
def output_by_live_rows(patch: Patch) -> None:
    def sample(original: Any, self: ModelRunnerV1, *masks: Any) -> Any:
        output = original(self, *masks)
        output.req_ids = self.input_batch.req_ids
        return output

    patch.around(ModelRunnerV1, "sample_tokens", sample)


@mutant(
    "v1",
    "twin",
    breaks="A seeded request draws for prefill chunks whose token is thrown away (vLLM #10097): its text depends on "
    "how its prompt was cut.",
)
def chunk_advances_generator(patch: Patch) -> None:
    def sample(
        original: Any, self: Sampler, sampled: torch.Tensor, logits: torch.Tensor, batch: Any, discarded: Any = ()
    ) -> None:
        original(self, sampled, logits, batch)

    patch.around(Sampler, "sample", sample)


# -- what is remembered ------------------------------------------------------------------------------------------------


@mutant(
    "v1",
    "twin",
    breaks="The blocks of a resumed request are appended to those it lost instead of replacing them: it reads blocks "
    "that belong to others by now.",
)
def resumed_blocks_appended(patch: Patch) -> None:
    def update(original: Any, self: ModelRunnerV1, output: Any) -> Any:
        lost = {
            req_id: [list(ids) for ids in self.requests[req_id].block_ids]
            for req_id in output.cached_reqs.resumed_req_ids
        }
        to_add = original(self, output)
        for req_id, groups in lost.items():
            mine = self.requests[req_id].block_ids
            for g, (old, new) in enumerate(zip(groups, mine, strict=True)):
                mine[g] = (old + new)[: self.input_batch.block_table[g].max_num_blocks]
        return to_add

    patch.around(ModelRunnerV1, "_update_cached", update)


@mutant(
    "v1",
    "twin",
    breaks="Block tables are copied only when the batch's size changes: a block that a request gets while it grows "
    "does not reach the device.",
)
def block_table_copied_seldom(patch: Patch) -> None:
    def commit(original: Any, self: MultiGroupBlockTable, num_reqs: int) -> None:
        if vars(self).get("_committed") != num_reqs:
            vars(self)["_committed"] = num_reqs
            original(self, num_reqs)

    patch.around(MultiGroupBlockTable, "commit", commit)


# -- the barrier -------------------------------------------------------------------------------------------------------


def _forgets_buffer(patch: Patch, name: str) -> None:
    def make(original: Any, self: AsyncBarrier, rt: Any, event: Any, protected: Any = None) -> None:
        original(self, rt, event, tuple(one for one in BUFFERS if one != name))

    patch.around(AsyncBarrier, "__init__", make)


@mutant(
    "v1",
    "twin",
    "race",
    breaks="Input ids are copied outside the barrier, behind its event (the kind of vLLM #28706): the host gathers the "
    "next step's into them first.",
    transfer="barrier",
)
def input_ids_unprotected(patch: Patch) -> None:
    _forgets_buffer(patch, "input_ids")


@mutant(
    "v1",
    "twin",
    "race",
    breaks="Block tables are copied outside the barrier, behind its event: a row moves before its blocks have left.",
    transfer="barrier",
)
def block_table_unprotected(patch: Patch) -> None:
    _forgets_buffer(patch, "block_table")


@mutant(
    "v1",
    "twin",
    "race",
    breaks="Temperatures are copied outside the barrier, behind its event (vLLM #25279): requests are sampled at the "
    "next batch's.",
    transfer="barrier",
)
def temperature_unprotected(patch: Patch) -> None:
    _forgets_buffer(patch, "temperature")


@mutant(
    "v1",
    "twin",
    "race",
    breaks="The host does not wait at the barrier, as if its event had passed.",
    transfer="barrier",
)
def barrier_not_entered(patch: Patch) -> None:
    patch.set(AsyncBarrier, "__enter__", lambda self: None)
    # As the runner does for a buffer that is left unprotected: what a race makes of an id stays inside the vocabulary.
    patch.set(ModelRunnerV1, "_races_on_purpose", lambda self, config: True)
