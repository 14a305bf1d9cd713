"""The real sampler on one logits row, by its stages' definitions: the processed row in front of the draw."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.sample.sampler import Sampler
from mrv2lab.sample.sampling_state import SamplingState
from tests.sample.lives import Life, Lives
from tests.sample.oracle import Row


class _Whole:
    """The sampler as one stage, so that a :class:`Lives` can drive it."""

    def __init__(self, lives: Lives) -> None:
        state = SamplingState(lives.transfers, max_num_reqs=lives.rows, vocab_size=lives.vocab)
        shape = {"max_num_logits": lives.rows * (lives.drafts + 1), "vocab_size": lives.vocab}
        self.sampler = Sampler(lives.rt, lives.transfers, lives.states, state, **shape, keep_processed=True)
        self.add_request = self.sampler.add_request
        self.apply_staged_writes = self.sampler.apply_staged_writes


def process_row(logits: Any, row: Row) -> np.ndarray[Any, Any]:
    """float32[V]: ``logits`` float32[V] of a decoding request through the sampler that :class:`Engine` uses."""
    rt = CpuRuntime()
    lives = Lives(rt, _Whole, lambda rng, lives: Life("", row.params, []), vocab=len(logits), rows=2, drafts=0)
    life = Life("a", row.params, list(row.prompt), tuple(row.stop_ids), outputs=list(row.outputs))
    life.computed = len(life.known) - 1
    lives.add(life)
    context = lives.begin({"a": 1})
    out = rt.zeros(1, torch.int64, name="out")
    processed = lives.stage.sampler.sample(out, lives.logits(np.asarray(logits)[None]), context)
    return np.asarray(rt.read(processed)[0].numpy())
