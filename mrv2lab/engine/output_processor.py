"""From what the scheduler and the runner say of a step to what the user reads.

Counterpart in vLLM: ``v1/engine/output_processor.py``, OutputProcessor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from mrv2lab.engine.logprobs import LogprobRows
from mrv2lab.engine.outputs import RequestOutput
from mrv2lab.engine.records import RequestUpdate
from mrv2lab.engine.steady import SteadyUpdates
from mrv2lab.engine.steady_outputs import SteadyOutputs
from mrv2lab.engine.text import TextStream
from mrv2lab.protocol import ModelRunnerOutput, SamplingParams


class OutputProcessor:
    """Every request's outcome so far; those of the latest ``keep_finished`` finished ones stay."""

    def __init__(self, keep_finished: int) -> None:
        self.requests: dict[str, RequestOutput] = {}
        """Unfinished requests and the latest finished ones, by id."""
        self.texts: dict[str, TextStream] = {}
        """Of unfinished requests, where there is a tokenizer."""
        self.ended_by_text: list[str] = []
        """Who ended in the latest step by a stop string, which only the text shows."""
        self._keep_finished = keep_finished
        self._finished: deque[str] = deque()
        self._started_at: dict[str, int] = {}
        self._prompt_wanted: set[str] = set()
        """Whose prompt's log-probabilities have not come."""
        self._steady_ids: list[str] = []
        self._steady: SteadyOutputs | None = None
        """The outputs of the latest steady batch, whose ids those are; None if somebody in it wants log-probabilities,
        and (ids too) while another kind of step was the latest."""

    def add(self, output: RequestOutput, params: SamplingParams, text: TextStream | None, step: int) -> None:
        """Expect a request that is submitted before ``step``. A finished one of the same id is forgotten."""
        request_id = output.request_id
        if request_id in self.requests:
            self._finished.remove(request_id)
        self.requests[request_id] = output
        self._started_at[request_id] = step
        if params.logprobs is not None:
            output.logprobs = LogprobRows()
        if params.prompt_logprobs is not None:
            self._prompt_wanted.add(request_id)
        if text is not None:
            self.texts[request_id] = text

    def step(
        self, updates: Iterable[RequestUpdate], produced: ModelRunnerOutput | None, step: int
    ) -> list[RequestOutput]:
        """Apply a step's updates; ``produced`` is the runner's output that they came from."""
        self.ended_by_text = []
        starts = _logprob_starts(produced) if produced is not None else {}
        is_plain = not self.texts and not self._prompt_wanted and (produced is None or not produced.num_nans)
        if is_plain and isinstance(updates, SteadyUpdates):
            steady = self._look_up(updates.req_ids)
            if steady is not None:
                return steady.step(updates.tokens, step)
        self._end_steady()
        outputs: list[RequestOutput] = []
        requests, started_at = self.requests, self._started_at
        for update in updates:
            request_id, tokens, reason = update
            output = requests[request_id]
            if is_plain and reason is None and output.logprobs is None:
                # The steady decode: what the calls below come to, without them.
                output.new_text = ""
                output.new_token_ids = tokens
                output.token_ids.extend(tokens)
                output.steps = step - started_at[request_id]
            else:
                self._add_tokens(output, update)
                if produced is not None:
                    self._add_figures(output, produced, starts.get(request_id))
                self._settle(output, step)
            outputs.append(output)
        return outputs

    def _look_up(self, req_ids: list[str]) -> SteadyOutputs | None:
        """The batch of which tokens are all that there is to add, if it is one; another list is another batch."""
        if req_ids is not self._steady_ids:
            self._end_steady()
            self._steady_ids = req_ids
            outputs = [self.requests[req_id] for req_id in req_ids]
            if all(output.logprobs is None for output in outputs):
                self._steady = SteadyOutputs(outputs, [self._started_at[req_id] for req_id in req_ids])
        return self._steady

    def _end_steady(self) -> None:
        if self._steady is not None:
            self._steady.close()
            self._steady, self._steady_ids = None, []

    def end(self, update: RequestUpdate, step: int) -> RequestOutput:
        """Apply an end that no step brought: an abort."""
        self._end_steady()
        output = self.requests[update.req_id]
        self._add_tokens(output, update)
        return self._settle(output, step)

    def _add_tokens(self, output: RequestOutput, update: RequestUpdate) -> None:
        tokens, reason, text = update.new_token_ids, update.finish_reason, self.texts.get(update.req_id)
        output.new_text = ""
        if reason == "stop":
            output.stop_reason = tokens[-1]
        if text is not None:
            output.new_text, kept, stop = text.add(tokens)
            if stop is not None and reason != "error":
                # It wins over a length or a stop token that came with it: the text ends there.
                if reason is None:
                    self.ended_by_text.append(update.req_id)
                tokens, reason, output.stop_reason = tokens[:kept], "stop", stop
            if reason is not None:
                output.new_text += text.flush()
            output.text += output.new_text
        output.new_token_ids = tokens
        output.token_ids += tokens
        output.finish_reason = reason

    def _add_figures(self, output: RequestOutput, produced: ModelRunnerOutput, start: int | None) -> None:
        request_id = output.request_id
        if output.finish_reason == "error":
            output.error = produced.errors[request_id]
        if produced.num_nans:
            output.num_nans += produced.num_nans.get(request_id, 0)
        if output.logprobs is not None and output.new_token_ids:
            if produced.logprobs is None or start is None:
                raise RuntimeError(f"step {produced.step}: the runner left out the logprobs of {request_id!r}")
            output.logprobs.extend(produced.logprobs, start, len(output.new_token_ids))
        if request_id in self._prompt_wanted and output.new_token_ids:
            self._prompt_wanted.remove(request_id)
            output.prompt_logprobs = LogprobRows(prompt=True)
            if request_id in produced.prompt_logprobs:
                output.prompt_logprobs.extend(produced.prompt_logprobs[request_id])
            if len(output.prompt_logprobs) != len(output.prompt_token_ids):
                raise RuntimeError(
                    f"step {produced.step}: the runner gave {len(output.prompt_logprobs) - 1} prompt logprobs of "
                    f"{request_id!r}, whose prompt has {len(output.prompt_token_ids)} tokens"
                )

    def _settle(self, output: RequestOutput, step: int) -> RequestOutput:
        output.steps = step - self._started_at[output.request_id]
        if output.finished:
            self._retire(output)
        return output

    def _retire(self, output: RequestOutput) -> None:
        """A finished output stays as long as it is among the latest ``keep_finished``."""
        request_id = output.request_id
        self.texts.pop(request_id, None)
        self._started_at.pop(request_id, None)
        self._prompt_wanted.discard(request_id)
        self._finished.append(request_id)
        if len(self._finished) > self._keep_finished:
            del self.requests[self._finished.popleft()]

    def drop_unfinished(self) -> None:
        """End every unfinished request with the reason ``"abort"``."""
        self._end_steady()
        for output in list(self.requests.values()):
            if not output.finished:
                output.finish_reason = "abort"
                self._retire(output)


def _logprob_starts(produced: ModelRunnerOutput) -> dict[str, int]:
    """The first of each request's rows in ``produced.logprobs``, which has one for every sampled token."""
    starts: dict[str, int] = {}
    if produced.logprobs is not None:
        total = 0
        for req_id, tokens in zip(produced.req_ids, produced.sampled_token_ids, strict=True):
            starts[req_id] = total
            total += len(tokens)
        if total != len(produced.logprobs.ranks):
            raise RuntimeError(
                f"step {produced.step}: {total} tokens, but {len(produced.logprobs.ranks)} rows of logprobs"
            )
    return starts
