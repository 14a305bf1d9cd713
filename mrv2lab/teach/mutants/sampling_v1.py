"""Bugs in V1's sampler and around it. They show only where requests use sampling parameters.

Numbers are those of public reports in vLLM whose kind of fault a mutant repeats.
"""

from __future__ import annotations

from typing import Any

import torch

import mrv2lab.runner_v1.extras as v1_extras
from mrv2lab.runner_v1.logits_stages import LogitsStages
from mrv2lab.runner_v1.model_runner import ModelRunnerV1
from mrv2lab.runner_v1.prompt_logprobs import PromptLogprobs
from mrv2lab.runner_v1.sampler import Sampler
from mrv2lab.runner_v1.sampling_rows import SamplingRows
from mrv2lab.runner_v1.top_k_top_p import apply_top_k_top_p
from mrv2lab.teach.mutants.mutant import Patch, mutant


@mutant(
    "v1",
    "twin",
    breaks="Nobody waits for the previous step's tokens, so that penalties and bad words meet a placeholder in their "
    "place and do not see the latest word.",
)
def placeholder_in_penalties(patch: Patch) -> None:
    patch.set(ModelRunnerV1, "_repair_outputs", lambda self: None)


@mutant(
    "v1",
    "twin",
    breaks="Condense moves a row without its sampling tables: it is cut and punished as its hole's former owner was.",
)
def condense_forgets_sampling_tables(patch: Patch) -> None:
    def move(original: Any, self: SamplingRows, src: int, dst: int) -> int:
        kept = {name: table.np[dst].copy() for name, table in self.tables.items()}
        moved: int = original(self, src, dst)
        for name, values in kept.items():
            self.tables[name].np[dst] = values
        return moved

    patch.around(SamplingRows, "move_row", move)


@mutant(
    "v1",
    "twin",
    breaks="Seeds are ignored in a mixed batch (vLLM #51226): beside a greedy request everybody draws from the shared "
    "generator.",
)
def seeds_ignored_in_a_mixed_batch(patch: Patch) -> None:
    def sample(original: Any, self: Sampler, sampled: Any, logits: Any, batch: Any, discarded: Any = ()) -> None:
        generators = batch.generators
        try:
            if not batch.all_random:
                batch.generators = {}
            original(self, sampled, logits, batch, discarded)
        finally:
            batch.generators = generators

    patch.around(Sampler, "sample", sample)


@mutant(
    "v1",
    "twin",
    breaks="The least length holds back the request's own stop tokens and forgets EOS: it ends too early.",
)
def v1_eos_escapes_min_tokens(patch: Patch) -> None:
    def fill(original: Any, self: SamplingRows, row: int, request: Any) -> None:
        given = request.stop_token_ids
        request.stop_token_ids = request.sampling.stop_token_ids
        original(self, row, request)
        request.stop_token_ids = given

    patch.around(SamplingRows, "fill_row", fill)


@mutant(
    "v1",
    "twin",
    "sampler",
    breaks="The bias is added behind the penalties, as vLLM's V1 does: a repetition penalty does not scale it.",
)
def v1_bias_behind_penalties(patch: Patch) -> None:
    late: list[Any] = []

    def apply(original: Any, self: LogitsStages, logits: Any, batch: Any, metadata: Any, *rest: Any) -> Any:
        vars(self)["_has_penalties"] = metadata.penalties is not None
        return original(self, logits, batch, metadata, *rest)

    def run(original: Any, self: LogitsStages, name: str, x: Any, *args: Any) -> None:
        if name == "logit_bias" and vars(self)["_has_penalties"]:
            late.append(args)
            return
        original(self, name, x, *args)
        if name == "penalties" and late:
            original(self, "logit_bias", x, *late.pop())

    patch.around(LogitsStages, "apply", apply)
    patch.around(LogitsStages, "_run", run)


def _v1_cut(patch: Patch, cut: Any) -> None:
    """``cut(logits, top_k, top_p)`` in the place of V1's sort."""

    def make(original: Any, self: LogitsStages, rt: Any) -> None:
        original(self, rt)
        rt.register("mutant.top_k_top_p", cut)

    def run(original: Any, self: LogitsStages, name: str, x: Any, *args: Any) -> None:
        if name == "top_k_top_p":
            tensors = tuple(arg for arg in args if arg is not None)
            self.rt.run("mutant.top_k_top_p", x, *args, reads=(x, *tensors), writes=(x,))
        else:
            original(self, name, x, *args)

    patch.around(LogitsStages, "__init__", make)
    patch.around(LogitsStages, "_run", run)


@mutant(
    "v1",
    "sampler",
    breaks="Top-k keeps every token that ties with the k-th, as vLLM's V1 does: more than k survive.",
)
def v1_top_k_keeps_ties(patch: Patch) -> None:
    def cut(x: Any, top_k: Any, top_p: Any) -> None:
        if top_k is not None:
            k = top_k[: len(x)].long().unsqueeze(1)
            least = x.sort(dim=-1, descending=True).values.gather(1, k - 1)
            x.masked_fill_(x < least, -torch.inf)
        apply_top_k_top_p(x, None, top_p)

    _v1_cut(patch, cut)


@mutant(
    "v1",
    "twin",
    "sampler",
    breaks="Top-p adds up probabilities of all tokens, not of those that top-k kept: too many of these survive.",
)
def v1_top_p_without_renormalisation(patch: Patch) -> None:
    def cut(x: Any, top_k: Any, top_p: Any) -> None:
        apply_top_k_top_p(x, None, top_p)
        apply_top_k_top_p(x, top_k, None)

    _v1_cut(patch, cut)


@mutant(
    "v1",
    "twin",
    breaks="Log-probabilities are gathered from a neighbour's row.",
)
def v1_logprobs_of_a_neighbour(patch: Patch) -> None:
    def gather(original: Any, ids: Any, values: Any, ranks: Any, logits: Any, *rest: Any) -> None:
        original(ids, values, ranks, logits.roll(1, 0), *rest)

    patch.around(v1_extras, "gather_logprobs", gather)


@mutant(
    "v1",
    "twin",
    breaks="Prompt log-probabilities are off by one: each row is asked about the token before its own.",
)
def v1_prompt_logprobs_off_by_one(patch: Patch) -> None:
    def chunk(
        original: Any, self: PromptLogprobs, progress: Any, start: int, first: int, targets: list[int], *rest: Any
    ) -> None:
        original(self, progress, start, first, [targets[0], *targets[:-1]], *rest)

    patch.around(PromptLogprobs, "_chunk", chunk)
