"""Small V1 engines with graphs, and what must hold of a padded step's tails."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mrv2lab.engine.engine import Engine
from mrv2lab.protocol import ForwardInputs
from mrv2lab.runner_v1 import ModelRunnerV1
from mrv2lab.runner_v1.graph_wrapper import GraphWrapper
from tests.runner_v1.small import v1

OPTIONS: dict[str, Any] = {
    "max_num_reqs": 8,
    "num_blocks": 97,
    "max_num_batched_tokens": 64,
    "cudagraph_mode": "full_and_piecewise",
    "cudagraph_capture_sizes": (1, 2, 4, 8),
    "progress": False,
}
POISON = "test.poison"


def engine_of(**options: Any) -> Engine:
    """Eight rows, sequences of at most 48 tokens, graphs of up to 8 tokens whose inputs' addresses are checked."""
    engine = v1(**OPTIONS | options)
    wrapper = engine.worker.runner.graphs.wrapper
    assert isinstance(wrapper, GraphWrapper)
    wrapper.debug = True
    return engine


def mode_of(engine: Engine) -> str:
    """What the latest step did."""
    mode: str = engine.worker.runner.graphs.stats.recent[-1].decision.mode
    return mode


def check_tails(engine: Engine) -> None:
    """Raises ``AssertionError`` where the latest step, a padded one, left something behind its batch."""
    runner, read = engine.worker.runner, engine.rt.read
    key = runner.graphs.stats.recent[-1].decision.key
    assert key is not None
    inputs, count, total = runner.inputs, runner.batch.num_reqs, runner.batch.host.num_tokens
    assert (read(inputs.slot_mappings)[:, total:] == -1).all(), "slot_mapping: padding writes somebody's KV"
    assert (read(inputs.seq_lens)[count:] == 0).all(), "seq_lens: padding has a sequence"
    assert (read(inputs.query_start_loc.gpu)[count:] == total).all(), "query_start_loc: padding owns tokens"
    assert (read(inputs.positions)[total : key.num_tokens] == 0).all(), "positions: padding has places"
    for table in runner.input_batch.block_table.gpu if key.num_reqs else ():
        assert (read(table)[count : key.num_reqs] == 0).all(), "block rows: padding points into blocks"


class Poison:
    """In front of every forward: NaN hidden states, random ids and random positions behind the batch's own tokens."""

    def __init__(self, engine: Engine) -> None:
        self.runner: ModelRunnerV1 = engine.worker.runner
        self.decoder = engine.worker.decoder
        self.model, self.runner.model = self.runner.model, self
        self.vocab, self.length = engine.config.model.vocab_size, engine.config.scheduler.max_model_len
        self.steps = 0
        engine.rt.register(POISON, self._poison)

    def forward(self, inputs: ForwardInputs) -> torch.Tensor:
        """As the model's."""
        assert self.runner.batch is not None
        self.steps += 1
        total, prepared = self.runner.batch.host.num_tokens, self.runner.inputs
        tails = (prepared.input_ids.gpu[total:], prepared.positions[total:], self.decoder.hidden[total:])
        self.runner.rt.run(POISON, self.steps, *tails, writes=tails)
        return self.model.forward(inputs)

    def compute_logits(self, logits_indices: torch.Tensor, n: int) -> torch.Tensor:
        """As the model's."""
        return self.model.compute_logits(logits_indices, n)

    def _poison(self, step: int, ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> None:
        rng = np.random.default_rng(step)
        ids.copy_(torch.from_numpy(rng.integers(0, self.vocab, len(ids), np.int32)))
        positions.copy_(torch.from_numpy(rng.integers(0, self.length, len(positions))))
        hidden.fill_(float("nan"))
