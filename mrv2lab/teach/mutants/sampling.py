"""Bugs in MRV2's sampler and its stages: in what order, for whom, from which counts, with whose noise.

They show only where requests use sampling parameters. Numbers are those of public reports in vLLM whose kind of fault a
mutant repeats.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

import mrv2lab.sample.penalties as penalties
from mrv2lab.ops.count_tokens import count_sampled
from mrv2lab.ops.logit_bias import ALLOWED, logit_bias
from mrv2lab.ops.top_k_top_p import apply_cut
from mrv2lab.protocol import RequestData
from mrv2lab.runner.async_output import OutputRing
from mrv2lab.sample.logit_bias import LogitBias
from mrv2lab.sample.logprobs import SampleLogprobs
from mrv2lab.sample.prompt_logprobs import PromptLogprobs
from mrv2lab.sample.sampler import Sampler
from mrv2lab.sample.sampling_state import SamplingState
from mrv2lab.sample.top_k_top_p import TopKTopP
from mrv2lab.teach.mutants.mutant import Patch, mutant

# -- counts that live on the device ------------------------------------------------------------------------------


@mutant(
    "mrv2",
    "twin",
    breaks="A new owner of a row inherits its former owner's counts: it is punished for words that it never said.",
)
def counts_not_zeroed(patch: Patch) -> None:
    patch.around(penalties, "zero_counts", lambda original, *args: None)


@mutant(
    "mrv2",
    "twin",
    breaks="Sampled tokens are not counted: penalties know the tokens of a request's admission and no later ones.",
)
def counts_stand_still(patch: Patch) -> None:
    patch.around(penalties.Penalties, "count_sampled", lambda original, *args: None)


@mutant(
    "mrv2",
    "twin",
    breaks="A token that nobody accepted, behind an unfinished prefill chunk or a rejected draft, is counted all the "
    "same.",
)
def rejected_tokens_counted(patch: Patch) -> None:
    def spec(original: Any, idx_mapping: Any, sampled: Any, num_sampled: Any, *rest: Any) -> None:
        original(idx_mapping, sampled, np.full_like(num_sampled, sampled.shape[1]), *rest)

    patch.around(count_sampled, "spec", spec)


@mutant(
    "mrv2",
    "race",
    breaks="Tokens are counted behind the step's output, for which alone anybody waits: the host gives the pool's slot "
    "other contents while the counting has yet to read it. Only rows that nobody keeps show it in the text.",
)
def counted_behind_the_output(patch: Patch) -> None:
    queued: list[Any] = []

    def count(original: Any, *args: Any) -> None:
        queued.append((original, args))

    def send(original: Any, *args: Any) -> Any:
        output = original(*args)
        for late, its in queued:
            late(*its)
        queued.clear()
        return output

    patch.around(penalties.Penalties, "count_sampled", count)
    patch.around(OutputRing, "send", send)


# -- stages ------------------------------------------------------------------------------------------------------------


@mutant(
    "mrv2",
    "twin",
    "sampler",
    breaks="No barrier stands between saving the allowed logits and wiping the row: what is put back was wiped, and "
    "nothing is left to sample.",
)
def allowed_ids_without_barrier(patch: Patch) -> None:
    def spec(original: Any, logits: Any, mapping: Any, positions: Any, indices: Any, edits: Any, *rest: Any) -> None:
        original(logits, mapping, positions, indices, edits, *rest)
        for row, index in enumerate(mapping.tolist()):
            if index >= 0 and edits[index, ALLOWED]:
                logits[row] = -torch.inf

    patch.around(logit_bias, "spec", spec)


@mutant(
    "mrv2",
    "twin",
    "sampler",
    breaks="The least length holds back the request's own stop tokens and forgets EOS (vLLM #32634): it ends early.",
)
def eos_escapes_min_tokens(patch: Patch) -> None:
    def add(original: Any, self: LogitBias, row: int, request: RequestData) -> None:
        original(self, row, dataclasses.replace(request, stop_token_ids=request.sampling.stop_token_ids))

    patch.around(LogitBias, "add_request", add)


@mutant(
    "mrv2",
    "twin",
    "sampler",
    breaks="The bias is added behind the penalties (vLLM #54218): a repetition penalty no longer scales it.",
)
def bias_behind_penalties(patch: Patch) -> None:
    def make(original: Any, self: Sampler, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        bias, punish, *rest = self._edits
        self._edits = (punish, bias, *rest)

    patch.around(Sampler, "__init__", make)


@mutant(
    "mrv2",
    "twin",
    "sampler",
    breaks="The temperature is applied in front of the bias: the hotter a request, the more its bias weighs.",
)
def temperature_before_bias(patch: Patch) -> None:
    def add(original: Any, self: LogitBias, row: int, request: RequestData) -> None:
        sampling = request.sampling
        if sampling.temperature:
            # (x / t) + b is what (x + b * t) / t is.
            hot = {token: max(-100.0, min(100.0, b * sampling.temperature)) for token, b in sampling.logit_bias.items()}
            request = dataclasses.replace(request, sampling=dataclasses.replace(sampling, logit_bias=hot))
        original(self, row, request)

    patch.around(LogitBias, "add_request", add)


@mutant(
    "mrv2",
    "sampler",
    breaks="Top-k keeps every token that ties with the k-th, so that more than k survive where logits are coarse.",
)
def top_k_keeps_ties(patch: Patch) -> None:
    def spec(original: Any, logits: Any, rows: Any, group_max: Any, cut_value: Any, cut_id: Any) -> None:
        original(logits, rows, group_max, cut_value, torch.full_like(cut_id, logits.shape[1]))

    patch.around(apply_cut, "spec", spec)


class _Table:
    """A table of the sampling state, in the place of another."""

    def __init__(self, table: Any, gpu: Any) -> None:
        self.np = table
        self.gpu = gpu


@mutant(
    "mrv2",
    "twin",
    "sampler",
    breaks="Top-p adds up probabilities of all tokens, not of those that top-k kept: too many of these survive.",
)
def top_p_without_renormalisation(patch: Patch) -> None:
    def apply(original: Any, self: TopKTopP, logits: Any, context: Any) -> None:
        off = vars(self).get("_off")
        if off is None:
            rows = len(self.top_k.np)
            everything = torch.full((rows,), self.vocab_size, dtype=torch.int32)
            off = vars(self)["_off"] = (
                _Table(everything.numpy(), self.rt.adopt(everything, "mutant.top_k")),
                _Table(np.ones(rows, np.float32), self.rt.adopt(torch.ones(rows), "mutant.top_p")),
            )
        top_k, top_p = self.top_k, self.top_p
        try:
            self.top_k = off[0]  # type: ignore[assignment]
            original(self, logits, context)
            self.top_k, self.top_p = top_k, off[1]  # type: ignore[assignment]
            original(self, logits, context)
        finally:
            self.top_k, self.top_p = top_k, top_p

    patch.around(TopKTopP, "apply", apply)


@mutant(
    "mrv2",
    "twin",
    "sampler",
    breaks="All rows draw the same noise, since no seed goes into it: at the same position and with the same logits "
    "everybody says the same.",
)
def noise_shared_by_rows(patch: Patch) -> None:
    def add(original: Any, self: SamplingState, row: int, request: RequestData) -> None:
        original(self, row, request)
        self.seeds.np[row] = 0

    patch.around(SamplingState, "add_request", add)


@mutant(
    "mrv2",
    "twin",
    "sampler",
    breaks="Log-probabilities are those of the batch's first rows, not of the rows that asked for them.",
)
def logprobs_of_first_rows(patch: Patch) -> None:
    def launch(original: Any, self: SampleLogprobs, plan: Any, *rest: Any) -> Any:
        return original(self, dataclasses.replace(plan, logits_rows=self.kernels.rows[: plan.num_rows]), *rest)

    patch.around(SampleLogprobs, "launch", launch)


@mutant(
    "mrv2",
    "twin",
    breaks="Prompt log-probabilities are off by one: each row is asked about the token that it has read, not about the "
    "one that follows.",
)
def prompt_logprobs_off_by_one(patch: Patch) -> None:
    def add(original: Any, self: PromptLogprobs, row: int, request: RequestData) -> None:
        original(self, row, request)
        if row in self._progress:
            self._progress[row].targets = np.array(request.all_token_ids[: request.prompt_len - 1], np.int64)

    patch.around(PromptLogprobs, "add_request", add)
