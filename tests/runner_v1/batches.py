"""What the tests of V1's batch share: a table without a device, made-up requests, and a batch over two KV groups."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from mrv2lab.protocol import SamplingParams
from mrv2lab.runner_v1.cached_request import CachedRequestState
from mrv2lab.runner_v1.persistent_batch import InputBatch

MAX_REQS, MAX_LEN, BLOCK_SIZES = 6, 24, (4, 8)


class PlainTable:
    """A host table whose device copy is another host tensor; remembers how many rows each publish sent."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.name = name
        self._host = torch.zeros(shape, dtype=dtype)
        self.np = self._host.numpy()
        self.gpu = torch.full(shape, 77, dtype=dtype)
        self.published: list[int | None] = []

    def publish(self, rows: int | None = None) -> None:
        self.published.append(rows)
        self.gpu[:rows] = self._host[:rows]


def make_batch(max_num_reqs: int = MAX_REQS) -> InputBatch:
    """A batch whose arrays are full of nonsense, as rows are recycled without clearing."""
    batch = InputBatch(max_num_reqs, MAX_LEN, 50, BLOCK_SIZES, PlainTable)
    batch.token_ids_cpu.fill(-999)
    for array in (batch.num_tokens_no_spec, batch.num_prompt_tokens, batch.num_computed_tokens.np):
        array.fill(19)
    batch.temperature.np.fill(-9.0)
    return batch


def request(req_id: str, prompt: int | list[int] = 3, outputs: list[int] | None = None, **fields: Any) -> Any:
    """A request of V1's worker; ``prompt`` may be just a length."""
    values: dict[str, Any] = {
        "prompt_token_ids": list(range(10, 10 + prompt)) if isinstance(prompt, int) else prompt,
        "output_token_ids": [] if outputs is None else outputs,
        "sampling": SamplingParams(temperature=fields.pop("temperature", 0.0), **fields.pop("params", {})),
        "seed": 0,
        "seed_given": False,
        "generator": None,
        "block_ids": [[1], [2]],
        "num_computed_tokens": 0,
    }
    return CachedRequestState(req_id=req_id, **(values | fields))


def random_request(req_id: str, draw: random.Random) -> CachedRequestState:
    """Any request that fits, distinct in every field with high probability."""
    prompt = [draw.randrange(50) for _ in range(draw.randint(1, 12))]
    outputs = [draw.choice([-1, draw.randrange(50)]) for _ in range(draw.randint(0, 6))]
    seeded = draw.random() < 0.5
    return request(
        req_id,
        prompt,
        outputs,
        temperature=draw.choice([0.0, 0.5, 1.25, 2.0]),
        seed_given=seeded,
        generator=torch.Generator() if seeded else None,
        block_ids=[[draw.randint(1, 99) for _ in range(draw.randint(0, 3))] for _ in BLOCK_SIZES],
        num_computed_tokens=draw.randint(0, len(prompt) + len(outputs) - 1),
        params=random_params(draw),
        stop_token_ids=tuple(draw.sample(range(50), 2)),
        processors=((draw.randrange(10**9), abs),) if draw.random() < 0.2 else (),
    )


def random_params(draw: random.Random) -> dict[str, Any]:
    """Some sampling parameters beyond the temperature; none in half of the requests."""
    if draw.random() < 0.5:
        return {}
    choices = {
        "top_k": draw.randint(1, 60),
        "top_p": draw.randint(1, 100) / 100,
        "min_p": draw.randint(0, 100) / 100,
        "repetition_penalty": draw.choice([0.5, 1.5]),
        "frequency_penalty": draw.choice([-1.0, 0.25]),
        "presence_penalty": draw.choice([0.5, 2.0]),
        "logit_bias": {draw.randrange(50): 1.5},
        "allowed_token_ids": tuple(draw.sample(range(50), 5)),
        "min_tokens": draw.randint(1, 9),
        "bad_words": ((draw.randrange(50),), (draw.randrange(50), 3)),
        "logprobs": draw.choice([-1, 0, 3, 99]),
    }
    return {name: value for name, value in choices.items() if draw.random() < 0.4}


def ints(*values: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)
