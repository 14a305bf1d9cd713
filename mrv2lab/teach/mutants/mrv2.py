"""Bugs in MRV2's rows, inputs and outputs: what is recycled, gathered, padded, counted.

Numbers are those of public reports in vLLM and its ports whose kind of fault a mutant repeats.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

import mrv2lab.runner.model_runner as model_runner
from mrv2lab.ops.combine_tokens import combine_tokens
from mrv2lab.ops.gather_block_tables import gather_block_tables
from mrv2lab.ops.num_sampled import num_sampled_and_rejected
from mrv2lab.ops.pos_seq_lens import pos_seq_lens
from mrv2lab.ops.post_update import post_update
from mrv2lab.ops.slot_mapping import slot_mapping
from mrv2lab.sample.sampler import Sampler
from mrv2lab.sample.sampling_state import SamplingState
from mrv2lab.sample.stage import SampleContext
from mrv2lab.state.block_tables import BlockTables
from mrv2lab.state.request_state import RequestState
from mrv2lab.teach.mutants.mutant import Patch, mutant

# -- rows: added, recycled, resumed, freed -----------------------------------------------------------------------------


@mutant(
    "mrv2",
    "twin",
    "invariants",
    breaks="A resumed request is taken for a decode, since its prefill is thought to end with the prompt (tt-plugin "
    "#52, gaudi #524): it samples in the middle of what it must compute again.",
)
def resume_boundary_at_prompt_len(patch: Patch) -> None:
    def add(original: Any, self: RequestState, request: Any) -> int:
        row: int = original(self, request)
        self.prefill_len.np[row] = request.prompt_len
        return row

    patch.around(RequestState, "add_request", add)


def _forgets(patch: Patch, table: str) -> None:
    """A row is written for its first owner only."""

    def add(original: Any, self: RequestState, request: Any) -> int:
        row: int = original(self, request)
        had_owner = vars(self).setdefault("_had_owner", set())
        if row in had_owner:
            getattr(self, table).unstage(row)
        had_owner.add(row)
        return row

    patch.around(RequestState, "add_request", add)


@mutant(
    "mrv2",
    "twin",
    "invariants",
    breaks="A new owner of a row inherits how many tokens its former owner computed: positions start too far right.",
)
def row_keeps_computed_count(patch: Patch) -> None:
    _forgets(patch, "num_computed_tokens")


@mutant(
    "mrv2",
    "twin",
    "invariants",
    breaks="A new owner of a row is prefilled with its former owner's prompt, which is still in the table.",
)
def row_keeps_tokens(patch: Patch) -> None:
    _forgets(patch, "all_token_ids")


@mutant(
    "mrv2",
    "invariants",
    breaks="A new owner of a row appends its tokens where its former owner's ended.",
)
def row_keeps_total_len(patch: Patch) -> None:
    _forgets(patch, "total_len")


def _keeps_sampling(patch: Patch, table: str) -> None:
    def add(original: Any, self: SamplingState, row: int, request: Any) -> None:
        kept = getattr(self, table).np[row].copy()
        original(self, row, request)
        getattr(self, table).np[row] = kept

    patch.around(SamplingState, "add_request", add)


@mutant(
    "mrv2", "twin", breaks="A new owner of a row draws with its former owner's seed, so its text cannot be repeated."
)
def row_keeps_seed(patch: Patch) -> None:
    _keeps_sampling(patch, "seeds")


@mutant(
    "mrv2", "twin", breaks="A new owner of a row is sampled at its former owner's temperature: greedy text wanders."
)
def row_keeps_temperature(patch: Patch) -> None:
    _keeps_sampling(patch, "temperature")


@mutant(
    "mrv2",
    "twin",
    breaks="A new owner of a row appends its blocks behind its former owner's, and writes into those of somebody else.",
)
def row_keeps_blocks(patch: Patch) -> None:
    def append(original: Any, self: BlockTables, row: int, ids: Any, *, overwrite: bool) -> None:
        room = self.num_blocks.np[0, row] + len(ids[0]) <= self.row_tables[0].row_len
        original(self, row, ids, overwrite=overwrite and not room)

    patch.around(BlockTables, "append_block_ids", append)


@mutant(
    "mrv2",
    "twin",
    breaks="A block that a request gets while it grows replaces its first one instead of following its last.",
)
def new_block_overwrites_first(patch: Patch) -> None:
    def extend(original: Any, self: BlockTables, rows: Any, block_ids: Any) -> None:
        had = self.num_blocks.np[:, rows]
        self.num_blocks.np[:, rows] = 0
        original(self, rows, block_ids)
        self.num_blocks.np[:, rows] += had

    patch.around(BlockTables, "extend_block_ids", extend)


@mutant(
    "mrv2",
    "invariants",
    breaks="The row of a request that ends is never given back (tenstorrent #463): after R of them nobody is admitted.",
)
def row_leaks(patch: Patch) -> None:
    def remove(original: Any, self: RequestState, req_id: str) -> int:
        row: int = original(self, req_id)
        if len(self.free_indices) > 1:
            self.free_indices.remove(row)
        return row

    patch.around(RequestState, "remove_request", remove)


# -- inputs ------------------------------------------------------------------------------------------------------------


@mutant(
    "mrv2",
    "twin",
    "invariants",
    breaks="The batch is sorted, the rows that go with it are not: a request computes with another's tokens and KV.",
)
def batch_order_without_rows(patch: Patch) -> None:
    def gather(original: Any, *args: Any) -> Any:
        host = original(*args)
        return dataclasses.replace(host, rows=host.rows[::-1].copy())

    patch.around(model_runner, "gather_host_batch", gather)


def _spec(patch: Patch, op: Any, replacement: Any) -> None:
    patch.around(op, "spec", replacement)


@mutant(
    "mrv2",
    "twin",
    breaks="The last sampled token is not put into the inputs, so a decode computes whatever lay in the buffer.",
)
def last_token_not_combined(patch: Patch) -> None:
    def spec(original: Any, *args: Any) -> None:
        input_ids = args[7].copy()
        original(*args)
        args[7][:] = input_ids

    _spec(patch, combine_tokens, spec)


@mutant(
    "mrv2",
    "twin",
    "recording",
    breaks="Lengths count the tokens before this step only, so that a token does not attend to itself.",
)
def seq_len_without_this_step(patch: Patch) -> None:
    def spec(original: Any, *args: Any) -> None:
        _, query_start_loc, _, _, seq_lens, count = args
        original(*args)
        seq_lens[:count] -= np.minimum(np.diff(query_start_loc[: count + 1]), seq_lens[:count] - 1)

    _spec(patch, pos_seq_lens, spec)


@mutant(
    "mrv2",
    "invariants",
    "recording",
    breaks="Slots behind the step's last token keep a longer step's values (vLLM #36580): a padded graph would write "
    "KV over somebody's.",
)
def stale_slot_tail(patch: Patch) -> None:
    def spec(original: Any, *args: Any) -> None:
        query_start_loc, slots, count = args[1], args[7], args[8]
        kept = slots.copy()
        original(*args)
        slots[:, query_start_loc[count] :] = kept[:, query_start_loc[count] :]

    _spec(patch, slot_mapping, spec)


@mutant(
    "mrv2",
    "invariants",
    "recording",
    breaks="Block-table rows of a larger batch stay behind a smaller one: a padded graph reads, or writes, blocks of "
    "requests that are not there.",
)
def dirty_rows(patch: Patch) -> None:
    def spec(original: Any, *args: Any) -> None:
        count = args[7]
        original(*args[:8], count)

    _spec(patch, gather_block_tables, spec)


@mutant(
    "mrv2",
    "invariants",
    breaks="The host forgets that the device moves on, so its count is no upper bound: a backend that plans by it cuts "
    "the context.",
)
def host_mirror_lags(patch: Patch) -> None:
    def execute(original: Any, self: Any, output: Any) -> bool:
        before = self.req_states.num_computed_tokens_np.copy()
        has_tokens: bool = original(self, output)
        if has_tokens:
            self.req_states.num_computed_tokens_np[self.batch.host.rows] = before[self.batch.host.rows]
        return has_tokens

    patch.around(model_runner.ModelRunner, "execute_model", execute)


# -- sampling and what follows -----------------------------------------------------------------------------------------


@mutant(
    "mrv2",
    "twin",
    "invariants",
    "recording",
    breaks="The token sampled behind an unfinished prefill chunk is kept: it lands in the middle of the prompt.",
)
def chunk_counts_as_sample(patch: Patch) -> None:
    def spec(original: Any, *args: Any) -> None:
        num_sampled, count = args[4], args[6]
        original(*args)
        num_sampled[:count] = 1

    _spec(patch, num_sampled_and_rejected, spec)


@mutant(
    "mrv2",
    "invariants",
    "recording",
    breaks="Sampled tokens are not added to the row's tokens. The text stays right, since the last token has its own "
    "table; penalties and n-gram drafts would read old ones.",
)
def history_not_appended(patch: Patch) -> None:
    def spec(original: Any, *args: Any) -> None:
        kept = args[5].copy()
        original(*args)
        args[5][:] = kept

    _spec(patch, post_update, spec)


@mutant(
    "mrv2",
    "twin",
    "invariants",
    "recording",
    breaks="The computed count stands still after a decode, so that every token is written over the one before.",
)
def computed_count_stands_still(patch: Patch) -> None:
    def spec(original: Any, *args: Any) -> None:
        idx_mapping, query_start_loc, computed, count = args[0], args[1], args[8], args[9]
        original(*args)
        decodes = np.diff(query_start_loc[: count + 1]) == 1
        computed[idx_mapping[:count][decodes]] -= 1

    _spec(patch, post_update, spec)


@mutant(
    "mrv2",
    "twin",
    breaks="Noise is drawn for the place in the batch, not for the position in the text: neighbours change the draw.",
)
def noise_by_batch_place(patch: Patch) -> None:
    def sample(original: Any, self: Sampler, out: Any, logits: Any, context: SampleContext) -> Any:
        places = vars(self).get("_places")
        if places is None:
            places = vars(self)["_places"] = self.rt.adopt(torch.arange(65536), "places")
        batch = dataclasses.replace(context.batch, positions=places)
        return original(self, out, logits, dataclasses.replace(context, batch=batch))

    patch.around(Sampler, "sample", sample)
