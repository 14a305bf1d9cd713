"""A V1 engine whose raw logits and outputs are kept, so that every token can be asked for its reasons afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mrv2lab.engine.engine import Engine
from mrv2lab.protocol import ModelRunnerOutput
from mrv2lab.runner_v1.prepare import HostBatch
from tests.runner_v1.small import v1
from tests.sample import oracle


@dataclass(frozen=True)
class Watched:
    """One step."""

    host: HostBatch
    # [r, V] float32: as the model gave them
    logits: torch.Tensor
    output: ModelRunnerOutput


class Watch:
    """The steps of an engine, in order."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.runner = engine.worker.runner
        self.outputs: list[ModelRunnerOutput] = []
        self._hosts: list[HostBatch] = []
        self._logits: list[torch.Tensor] = []
        self._model = self.runner.model
        self._sample = engine.worker.sample_tokens
        self.runner.model = self
        vars(engine.worker)["sample_tokens"] = self.sample_tokens
        engine.rt.register("watch.logits", lambda logits: self._logits.append(logits.float().clone()))

    def forward(self, inputs: Any) -> Any:
        return self._model.forward(inputs)

    def compute_logits(self, logits_indices: torch.Tensor, n: int) -> torch.Tensor:
        logits: torch.Tensor = self._model.compute_logits(logits_indices, n)
        if logits_indices is self.runner.batch.logits_indices:  # else they are a prompt's
            self._hosts.append(self.runner.batch.host)
            self.engine.rt.run("watch.logits", logits, reads=(logits,))
        return logits

    def sample_tokens(self, *args: Any) -> Any:
        inner, outputs = self._sample(*args), self.outputs

        class Future:
            def get_output(self) -> ModelRunnerOutput:
                outputs.append(inner.get_output())
                return outputs[-1]

        return Future()

    def steps(self) -> list[Watched]:
        self.engine.rt.synchronize()
        return [Watched(*one) for one in zip(self._hosts, self._logits, self.outputs, strict=True)]

    def chosen(self) -> Iterator[tuple[str, int, Any, int, ModelRunnerOutput, int]]:
        """(request, number of the token, raw logits row, token, output of its step, its index there), for every token
        that was kept."""
        for step in self.steps():
            index = 0
            for row, req_id in enumerate(step.host.req_ids):
                if row in step.host.discarded:
                    assert step.output.sampled_token_ids[row] == []
                    continue
                final = self.engine.requests[req_id]
                number = int(step.host.seq_lens_upper_bound[row]) - len(final.prompt_token_ids)
                if number < len(final.token_ids):  # else it was sampled behind the end
                    (token,) = step.output.sampled_token_ids[row]
                    yield req_id, number, step.logits[row].cpu().numpy(), token, step.output, index
                index += 1

    def check(self, params: dict[str, Any], processors: dict[str, Any] | None = None) -> int:
        """Every token is one that the oracle allows, and greedy ones are its best; how many there were."""
        count = 0
        for req_id, number, logits, token, _, _ in self.chosen():
            final = self.engine.requests[req_id]
            stop = set(params[req_id].stop_token_ids)
            if not params[req_id].ignore_eos:
                stop |= set(self.engine.config.model.eos_token_ids)
            fns = (processors or {}).get(req_id, ())
            row = oracle.Row(
                params[req_id], final.prompt_token_ids, final.token_ids[:number], (), sorted(stop), None, fns
            )
            want = oracle.process(logits, row)
            where = f"token {number} of {req_id}: {token}, of {params[req_id]}"
            if params[req_id].temperature == 0:
                assert want[token] >= want.max() - 1e-5 * max(1, abs(want.max())), where
            else:
                cut = oracle.process(logits, row, "top_k")
                hot = oracle.process(logits, row, "temperature")
                fair = oracle.excused(cut, row.params.top_p) | oracle.excused(hot, 1.0, row.params.min_p)
                assert want[token] > -np.inf or fair[token], where
            count += 1
        return count


@contextmanager
def watched(**options: Any) -> Iterator[Watch]:
    """A small V1 engine under watch."""
    with v1(**options) as engine:
        yield Watch(engine)
