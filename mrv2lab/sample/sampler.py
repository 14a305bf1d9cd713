"""From logits to tokens. Counterpart in vLLM: ``sample/sampler.py``.

The order of the stages can be seen in the result (a bias adds, a penalty scales):

| stage | launches only where a request of the batch has | on |
|---|---|---|
| grammar's mask | structured output | raw logits, in place |
| NaN count | (``RunnerConfig.count_nans``) | raw logits |
| float32 copy, NaN as -inf | any stage down to the processors; see below | |
| allowed ids, bias, min_tokens | allowed_token_ids, logit_bias, min_tokens | the copy, as all below |
| penalties | a repetition, frequency or presence penalty | |
| bad words | bad_words | |
| custom processors | a function of its own | |
| temperature | a temperature other than 0 and 1 | |
| min-p | min_p | |
| top-k, then top-p of what it keeps | top_k, top_p | |
| Gumbel argmax | a temperature; else the argmax alone | |

Where nobody reads processed logits, temperature and cut are left to the draw, which divides what it looks at and skips
what the cut drops: the cut is found in the logits as they are, and [n, V] is not written for it. A batch that uses both
min-p and top-k or top-p has them in place on the copy, since top-p is a share of what min-p keeps.

Ties go to the lowest token ids everywhere: the argmax takes the lowest, top-k keeps exactly k, top-p no more than it
needs to reach p. A batch in which every temperature is 0 leaves out temperature, min-p, top-k and top-p: none of them
moves the argmax.
"""

from __future__ import annotations

import torch

from mrv2lab.ops.argmax import argmax_rows, num_blocks
from mrv2lab.ops.cast_logits import cast_logits
from mrv2lab.ops.gumbel import gumbel_sample, num_slices
from mrv2lab.ops.gumbel_cut import gumbel_cut_sample
from mrv2lab.ops.temperature import apply_temperature
from mrv2lab.protocol import RequestData
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.transfer import TransferPolicy
from mrv2lab.sample.bad_words import BadWords
from mrv2lab.sample.custom import CustomProcessors
from mrv2lab.sample.logit_bias import LogitBias
from mrv2lab.sample.min_p import MinP
from mrv2lab.sample.penalties import Penalties
from mrv2lab.sample.sampling_state import SamplingState
from mrv2lab.sample.stage import CuttingStage, Int32, SampleContext, Stage
from mrv2lab.sample.top_k_top_p import TopKTopP
from mrv2lab.state.request_state import RequestState

Uses = tuple[bool, list[Stage], list[CuttingStage], bool]
"""Whether a batch is greedy, its stages in front of the temperature and behind it, and whether it divides by one."""


class Sampler:
    """Chooses one token for each logits row."""

    def __init__(
        self,
        rt: Runtime,
        transfers: TransferPolicy,
        states: RequestState,
        state: SamplingState,
        *,
        max_num_logits: int,
        vocab_size: int,
        keep_processed: bool = False,
    ) -> None:
        self.rt = rt
        self.state = state
        self.keep_processed = keep_processed
        """Whether somebody reads the processed logits besides the choice (log-probabilities of them, say)."""
        reqs = states.max_num_reqs
        self.penalties = Penalties(rt, transfers, states, max_num_reqs=reqs, vocab_size=vocab_size)
        self.custom = CustomProcessors(rt, transfers, max_num_reqs=reqs, vocab_size=vocab_size)
        self.min_p = MinP(rt, state, max_num_logits=max_num_logits, vocab_size=vocab_size)
        self.top_k_top_p = TopKTopP(
            rt, state.top_k, state.top_p, state.temperature, max_num_logits=max_num_logits, vocab_size=vocab_size
        )
        self._edits: tuple[Stage, ...] = (
            LogitBias(rt, transfers, max_num_reqs=reqs),
            self.penalties,
            BadWords(rt, transfers, max_num_reqs=reqs),
            self.custom,
        )
        """The stages in front of the temperature, in order."""
        self._cuts: tuple[CuttingStage, ...] = (self.min_p, self.top_k_top_p)
        """Those behind it."""
        self._shape = (max_num_logits, vocab_size)
        # [n, V] float32, allocated by the first batch that needs it
        self._processed: torch.Tensor | None = None
        size = max(n * self._columns(n, greedy) for n in range(1, max_num_logits + 1) for greedy in (False, True))
        # [n * columns]: the best score of each block of the vocabulary, and its token
        self._local_max = rt.zeros(size, torch.float32, name="local_max")
        self._local_arg = rt.zeros(size, torch.int32, name="local_arg")
        self._views: dict[tuple[int, bool], tuple[torch.Tensor, torch.Tensor]] = {}
        self._known: tuple[Int32, Uses] | None = None
        self.observed = False
        """Whether somebody looks at ``processed``: then a step makes it, though its draw has no need of it."""
        self.processed: torch.Tensor | None = None
        """[n, V]: what the latest step chose from, and whether it is divided by the temperatures; for observers."""
        self.scaled = False

    def add_request(self, row: int, request: RequestData) -> None:
        """Overwrite ``row`` in every stage."""
        self._known = None
        self.state.add_request(row, request)
        for stage in (*self._edits, *self._cuts):
            stage.add_request(row, request)

    def apply_staged_writes(self) -> None:
        """Send what requests that were added brought; behind the request state's own."""
        self.state.apply_staged_writes()
        for stage in (*self._edits, *self._cuts):
            stage.apply_staged_writes()

    def reset(self) -> None:
        """Forget every request."""
        self._known = None
        self.state.reset()
        for stage in (*self._edits, *self._cuts):
            stage.reset()
        self.processed = None

    def sample(self, out: torch.Tensor, logits: torch.Tensor, context: SampleContext) -> torch.Tensor:
        """Write ``out`` int64[n] from ``logits`` [n, V], which stay as they are; returns the logits that were chosen
        from: float32[n, V], or ``logits`` where no stage of the batch edits any. Temperature and cut are in what it
        returns only with ``keep_processed``, or if the batch uses both min-p and top-k or top-p."""
        batch, rows, state = context.batch, context.rows, self.state
        n = out.shape[0]
        greedy, edits, cuts, tempered = self._uses(rows)
        local_max, local_arg = self._local(n, greedy)
        # Top-p of what min-p keeps is no cut of the whole row's logits.
        in_draw = len(cuts) == 1 and not self.keep_processed
        scaled = not in_draw and (bool(cuts) or self.keep_processed)
        if edits or (cuts and not in_draw) or (self.keep_processed and tempered):
            logits = self._copy(logits, batch.expanded_idx_mapping)
            for stage in edits:
                stage.apply(logits, context)
            if scaled:
                self._shape_in_place(logits, tempered, cuts, context)
        self.processed, self.scaled = logits, scaled
        draw = (
            logits, batch.expanded_idx_mapping, state.temperature.gpu, state.seeds.gpu, batch.positions,
            batch.logits_indices,
        )  # fmt: skip
        if greedy:
            argmax_rows(self.rt, out, local_max, local_arg, logits, batch.expanded_idx_mapping)
        elif in_draw:
            gumbel_cut_sample(self.rt, out, local_max, local_arg, *draw, cuts[0].cut(logits, context))
            if self.observed:
                shown = logits if edits else self._copy(logits, batch.expanded_idx_mapping)
                self._shape_in_place(shown, tempered, cuts, context)
                self.processed, self.scaled = shown, True
        else:
            gumbel_sample(self.rt, out, local_max, local_arg, *draw, not scaled)
        return logits

    def _shape_in_place(
        self, logits: torch.Tensor, tempered: bool, cuts: list[CuttingStage], context: SampleContext
    ) -> None:
        """Temperature and cuts, on the float32 copy."""
        if tempered:
            mapping = context.batch.expanded_idx_mapping
            apply_temperature(self.rt, logits, mapping, self.state.temperature.gpu)
        for stage in cuts:
            stage.apply(logits, context)

    def _uses(self, rows: Int32) -> Uses:
        """What the batch of ``rows`` needs. The rows of steps in a row are one array while nobody comes or goes, and
        what a row uses is fixed for its owner's life: then it is looked up once, not by ten gathers a step."""
        if self._known is not None and self._known[0] is rows:
            return self._known[1]
        state = self.state
        greedy = state.all_greedy(rows)
        edits = [stage for stage in self._edits if stage.used(rows)]
        cuts = [] if greedy and not self.keep_processed else [stage for stage in self._cuts if stage.used(rows)]
        uses = greedy, edits, cuts, not greedy and state.uses_temperature(rows)
        self._known = (rows, uses) if not rows.flags.writeable else None
        return uses

    def _columns(self, n: int, greedy: bool) -> int:
        vocab = self._shape[1]
        return num_blocks(vocab) if greedy else num_slices(n, vocab)

    def _local(self, n: int, greedy: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The scratch of a batch of ``n`` rows, [n, columns] twice."""
        found = self._views.get((n, greedy))
        if found is None:
            shape = (n, self._columns(n, greedy))
            size = shape[0] * shape[1]
            found = self._views[n, greedy] = (self._local_max[:size].view(shape), self._local_arg[:size].view(shape))
        return found

    def _copy(self, logits: torch.Tensor, expanded_idx_mapping: torch.Tensor) -> torch.Tensor:
        if self._processed is None:
            self._processed = self.rt.empty(self._shape, torch.float32, name="processed_logits")
        copy = self._processed[: logits.shape[0]]
        cast_logits(self.rt, copy, logits, expanded_idx_mapping)
        return copy
