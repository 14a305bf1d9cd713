"""What a runner's device had in a step, cloned by queued work: nothing is read early and nothing waits.

Two segments more a step: one behind the step's own logits copies the model's inputs and the logits, one behind the
sampler what was chosen from. Both run where the device's work runs, so that what a race would corrupt is corrupt in the
copy too. They are read once the step's own output was waited for. Both runners give the model the same
:class:`ForwardInputs`, so this knows neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mrv2lab.check.compare import Captured
from mrv2lab.protocol import ForwardInputs, ModelRunnerOutput
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.transfer import PinnedCopy

CAPTURE = "twin.capture"
PROCESSED = "twin.processed"
FORCE = "twin.force"
LEAVE = -1
"""In place of a forced token: the runner's own stays."""


class Capture:
    """Stands between a runner and its model, and overwrites its tokens where it is told to.

    Once a runtime: it binds three names there.
    """

    def __init__(self, rt: Runtime, runner: Any, max_num_reqs: int) -> None:
        self.rt = rt
        self.runner = runner
        self.model = runner.model
        self.inputs: ForwardInputs | None = None
        self._steps: deque[tuple[torch.Tensor, ...]] = deque()
        self._processed: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        """Chosen tokens [r] and the logits they were chosen from [r, V], of every captured step."""
        self._scaled: deque[bool] = deque()
        self._tokens = PinnedCopy(rt).upload("twin.forced", max_num_reqs, torch.int64)
        self._forced: Mapping[str, int] = {}
        rt.register(CAPTURE, self._capture)
        rt.register(PROCESSED, self._keep_processed)
        rt.register(FORCE, self._force)
        runner.model = self
        runner.force = self._behind_the_sampler
        runner.sampler.observed = True

    # -- the model's two calls -----------------------------------------------------------------------------------------

    def forward(self, inputs: ForwardInputs) -> torch.Tensor:
        """As the model's; hidden states [t, H]."""
        self.inputs = inputs
        hidden: torch.Tensor = self.model.forward(inputs)
        return hidden

    def compute_logits(self, logits_indices: torch.Tensor, n: int, **order: bool) -> torch.Tensor:
        """As the model's, logits [n, V], with the capturing segment behind it; prompts' rows, which a step may compute
        besides, are nobody's choice and pass."""
        logits: torch.Tensor = self.model.compute_logits(logits_indices, n, **order)
        if logits_indices is not self.runner.batch.logits_indices:
            return logits
        # A replayed graph calls no forward; its runner says what the graph reads, padding and all.
        inputs = getattr(self.runner, "forward_inputs", None) or self.inputs
        assert inputs is not None
        groups, tokens = inputs.attn_metadata, self.runner.batch.host.num_tokens
        reads = [logits, logits_indices, inputs.input_ids[:tokens], inputs.positions[:tokens]]
        reads += [groups[0].query_start_loc, groups[0].seq_lens]
        reads += [group.block_table for group in groups] + [group.slot_mapping[:tokens] for group in groups]
        self.rt.run(CAPTURE, *reads, reads=tuple(reads))
        return logits

    def _capture(self, logits: torch.Tensor, *rest: torch.Tensor) -> None:
        """Runs as queued work, perhaps in another thread."""
        self._steps.append((logits.to(torch.float32, copy=True), *(tensor.clone() for tensor in rest)))

    # -- the runner's hook ---------------------------------------------------------------------------------------------

    def force(self, tokens: Mapping[str, int]) -> None:
        """In the next ``sample_tokens``, write these tokens over the requests' own; {}: let all stand."""
        self._forced = tokens

    def _behind_the_sampler(self, req_ids: list[str], sampled: torch.Tensor) -> None:
        sampler = self.runner.sampler
        # A sampler that somebody replaced may not say: then the raw ones are the best that is known.
        processed = sampler.processed if sampler.processed is not None else self.runner.logits
        self._scaled.append(bool(sampler.scaled))
        self.rt.run(PROCESSED, sampled, processed, reads=(sampled, processed))
        if self._forced:
            values = np.array([self._forced.get(req_id, LEAVE) for req_id in req_ids], np.int64)
            forced = self._tokens.send(values)
            self.rt.run(FORCE, sampled, forced, reads=(forced,), writes=(sampled,))

    def _keep_processed(self, sampled: torch.Tensor, processed: torch.Tensor) -> None:
        self._processed.append((sampled[:, 0].clone(), processed.to(torch.float32, copy=True)))

    def _force(self, sampled: torch.Tensor, forced: torch.Tensor) -> None:
        first = sampled[:, 0]
        first.copy_(torch.where(forced >= 0, forced, first))

    # -- reading -------------------------------------------------------------------------------------------------------

    def take(self, output: ModelRunnerOutput, forced: bool) -> Captured:
        """The oldest captured step, whose output was waited for. ``forced``: whether its tokens were overwritten."""
        if not self._steps or not self._processed:
            # Only a runner that hands its output over too early gets here.
            self.rt.synchronize()
        logits, indices, ids, positions, starts, lens, *rest = [part.cpu().numpy() for part in self._steps.popleft()]
        own, processed = (part.cpu().numpy() for part in self._processed.popleft())
        groups = len(rest) // 2
        count = len(output.req_ids)
        chosen = [tokens[0] if tokens else LEAVE for tokens in output.sampled_token_ids]
        if forced:
            chosen = own.tolist()
        return Captured(
            step=output.step,
            req_ids=output.req_ids,
            sampled=list(output.sampled_token_ids),
            chosen=chosen,
            input_ids=ids,
            positions=positions,
            query_start_loc=starts[: count + 1],
            seq_lens=lens[:count],
            block_tables=tuple(table[:count] for table in rest[:groups]),
            slot_mappings=tuple(rest[groups:]),
            logits=logits,
            logits_indices=indices,
            processed=processed,
            scaled=self._scaled.popleft(),
            output=output,
        )

    def detach(self) -> None:
        """Give the runner its model back."""
        self.runner.model, self.runner.force = self.model, None
        self.runner.sampler.observed = False
