"""Small requests through the runner before the first real one, so that it meets no compilation. Counterpart in vLLM:
``warmup_kernels`` in ``v1/worker/gpu/warmup.py``.

Every stage of the sampler, prefill, decode and both in one step, one request and several, run on a scheduler of their
own. Rows are given back in the order in which they were free, and the tables and KV blocks that were written get their
contents back, so that nothing but compiled kernels and buffers of first use is left behind.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm.auto import tqdm

from mrv2lab.config import EngineConfig, SchedulerConfig
from mrv2lab.engine.async_scheduler import AsyncScheduler
from mrv2lab.engine.core import EngineCore
from mrv2lab.engine.projections import V1Projection, project_mrv2
from mrv2lab.engine.request import Request
from mrv2lab.engine.scheduler import Scheduler
from mrv2lab.observer import NULL_OBSERVER
from mrv2lab.protocol import AsyncModelRunnerOutput, GrammarOutput, LogitsFunction, SamplingParams
from mrv2lab.runner import ModelRunner
from mrv2lab.runner.dummy import unobserved

if TYPE_CHECKING:
    from mrv2lab.engine.worker import Worker

COUNTS = (1, 3, 16)
"""Requests of a step: Triton compiles anew for an integer that is 1, or a multiple of 16."""
PROMPT, OUTPUT = 6, 3
BLOCKS = 64
"""KV blocks that are used, and restored, at most."""


@dataclass(frozen=True, slots=True)
class Mix:
    """One kind of batch."""

    name: str
    params: tuple[SamplingParams, ...]
    """Dealt to its requests in turn."""
    processors: tuple[LogitsFunction, ...] = ()
    grammar: bool = False


def _unchanged(output_token_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return logits


_EVERY_CUT: dict[str, Any] = {
    "temperature": 0.7, "seed": 1, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1
}  # fmt: skip


def mixes(vocab_size: int, max_logprobs: int = 20) -> tuple[Mix, ...]:
    """Every kind of batch that has launches of its own."""

    def params(**wishes: Any) -> SamplingParams:
        return SamplingParams(max_tokens=OUTPUT, ignore_eos=True, **wishes)

    last = vocab_size - 1
    plain, noisy = params(), params(temperature=0.7, seed=1)
    tops = sorted({min(top, vocab_size - 1) for top in (0, 1, 5, 15, max_logprobs) if 0 <= top <= max(max_logprobs, 0)})
    every = params(**_EVERY_CUT, logprobs=1, bad_words=((last,),))
    return (
        Mix("greedy", (plain,)),
        Mix("seeded", (noisy,)),
        Mix("unscaled", (params(temperature=1.0, seed=1),)),
        Mix("top-k", (params(temperature=0.7, top_k=5),)),
        Mix("top-k 20, top-p", (params(temperature=1.0, top_k=20, top_p=0.95, seed=1),)),
        Mix("wide top-k", (params(temperature=0.7, top_k=max(1, vocab_size // 2)),)),
        Mix("top-p", (params(temperature=0.7, top_p=0.9),)),
        Mix("top-k and top-p", (params(temperature=0.7, top_k=5, top_p=0.9),)),
        Mix("min-p", (params(temperature=0.7, min_p=0.1),)),
        Mix("penalties", (params(repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1),)),
        Mix("logit bias", (params(logit_bias={0: 1.0}),)),
        Mix("allowed ids", (params(allowed_token_ids=(0, last)),)),
        Mix("min tokens", (params(stop_token_ids=(last,), min_tokens=1),)),
        Mix("bad words", (params(bad_words=((last,), (0, last))),)),
        *(Mix(f"{top} logprobs", (params(logprobs=top), plain)) for top in tops),
        Mix("all logprobs", (params(logprobs=-1),)),
        *(Mix(f"{top} prompt logprobs", (params(prompt_logprobs=top),)) for top in tops[:2]),
        Mix("custom processor", (plain,), processors=(_unchanged,)),
        Mix("grammar", (plain, noisy), grammar=True),
        Mix("everything", (every, plain, noisy)),
    )


def first_use_mix(vocab_size: int) -> Mix:
    """One batch with every wish whose first user has tables or buffers allocated."""
    last = vocab_size - 1
    every = SamplingParams(
        max_tokens=OUTPUT,
        ignore_eos=True,
        **_EVERY_CUT,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        logit_bias={0: 1.0},
        allowed_token_ids=(0, last),
        stop_token_ids=(last,),
        min_tokens=1,
        bad_words=((0, last),),
        logprobs=-1,
        prompt_logprobs=1,
    )
    return Mix("first use", (every,), processors=(_unchanged,), grammar=True)


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What it took."""

    seconds: float
    steps: int
    """Of requests."""
    dummy_runs: int


def warm_up(worker: Worker, config: EngineConfig, *, progress: bool = True) -> WarmUp:
    """Run every mix, and dummy steps of every size, on an idle worker. Waits for the device.

    A KV cache too small for one request of two tokens is left alone.
    """
    start, steps = time.perf_counter(), 0
    small, longest = _small(worker, config)
    made = mixes(config.model.vocab_size) if longest > 1 else ()
    counts = [count for count in COUNTS if count <= config.scheduler.max_num_reqs]
    shapes = list(_dummy_shapes(config))
    bar = tqdm(total=len(made) * len(counts) + len(shapes), desc="warm-up", unit="batch", disable=not progress)
    with bar, unobserved(worker.rt), unchanged(worker, small.cache.num_blocks or 0):
        for mix in made:
            for count in counts:
                bar.set_postfix_str(f"{mix.name}, {count}")
                steps += _run(worker, small, mix, count, longest)
                bar.update()
        for tokens, reqs, context in shapes:
            bar.set_postfix_str(f"{tokens} tokens")
            worker.runner.dummy_run(tokens, reqs, context=context)
            # Nobody fetches an output, and whoever plans on the host has buffers for the steps that may be in flight.
            worker.rt.synchronize()
            bar.update()
    return WarmUp(time.perf_counter() - start, steps, len(shapes))


def first_use(worker: Worker, config: EngineConfig) -> None:
    """Have everything allocated that the first request with a wish allocates, by one batch of requests with all wishes:
    what a memory profile must count, whether kernels are warmed up or not. An idle worker's; waits for the device."""
    small, longest = _small(worker, config)
    if longest > 1:
        with unobserved(worker.rt), unchanged(worker, small.cache.num_blocks or 0):
            most = min(max(COUNTS), config.scheduler.max_num_reqs)
            _run(worker, small, first_use_mix(config.model.vocab_size), most, longest)


def _small(worker: Worker, config: EngineConfig) -> tuple[EngineConfig, int]:
    """``config`` with the KV blocks that the requests may use, and their longest length; up to 1: there is no room."""
    cache = config.cache
    num_blocks = min(len(worker.kv_caches[0][0]), 1 + BLOCKS)
    in_each_group = (num_blocks - 1) // len(config.model.kv_groups)
    longest = min(PROMPT + OUTPUT, config.scheduler.max_model_len, in_each_group * cache.block_size)
    small = dataclasses.replace(cache, num_blocks=num_blocks, enable_prefix_caching=False)
    return dataclasses.replace(config, cache=small), longest


def _run(worker: Worker, config: EngineConfig, mix: Mix, count: int, longest: int) -> int:
    """All but one of ``count`` requests from the first step on, the last from the second; returns the steps."""
    kind = AsyncScheduler if config.scheduler.async_scheduling else Scheduler
    windows = tuple(group.window for group in config.model.kv_groups)
    scheduler = kind(config.scheduler, config.cache, config.spec, windows)
    project: Callable[..., Any] = project_mrv2
    if config.runner.runner == "v1":
        project = V1Projection(scheduler.requests)
    runs = _Masked(worker, config.model.vocab_size) if mix.grammar else worker
    core = EngineCore(scheduler, runs, NULL_OBSERVER, config.scheduler.max_concurrent_steps, project)
    output = min(OUTPUT, longest - 1)
    waiting = [
        Request(
            f"warm-up.{i}",
            [(i + k) % config.model.vocab_size for k in range(longest - output)],
            dataclasses.replace(mix.params[i % len(mix.params)], max_tokens=output),
            seed=i,
            processors=mix.processors,
        )
        for i in range(count)
    ]
    steps = 0
    while waiting or core.has_work():
        late = 1 if count > 1 and not steps else 0
        while len(waiting) > late:
            scheduler.add_request(waiting.pop(0))
        core.step()
        steps += 1
        if config.runner.transfer == "unsafe":
            worker.rt.synchronize()  # wrong tokens are the lesson of it, not of a warm-up, which need not end with them
    return steps


def largest_step(scheduler: SchedulerConfig) -> int:
    """Tokens of the largest step that the limits allow."""
    return min(scheduler.max_num_batched_tokens, scheduler.max_num_reqs * scheduler.max_model_len)


def _dummy_shapes(config: EngineConfig) -> Iterator[tuple[int, int, int | None]]:
    """(tokens, requests, host bound of lengths): around the sizes that part kernels, as decodes and as chunks."""
    scheduler = config.scheduler
    most, length = largest_step(scheduler), scheduler.max_model_len
    sizes = sorted(
        {size for k in range(14) for size in (2**k - 1, 2**k, 2**k + 1, 3 * 2**k) if 0 < size <= most} | {most}
    )
    for size in sizes:
        if size <= scheduler.max_num_reqs:
            yield size, size, None
            yield size, size, length
        few = -(-size // length)
        if few < size and few <= scheduler.max_num_reqs:
            yield size, few, None
            yield size, few, length


class _Masked:
    """A worker whose steps all sample behind a mask that allows everything."""

    def __init__(self, worker: Worker, vocab_size: int) -> None:
        self.worker, self.words = worker, -(-vocab_size // 32)
        self._ids: list[str] = []

    def execute_model(self, output: Any) -> bool:
        """See :class:`StepWorker`."""
        self._ids = list(output.num_scheduled_tokens)
        return self.worker.execute_model(output)

    def sample_tokens(self) -> AsyncModelRunnerOutput:
        """See :class:`StepWorker`."""
        masks = np.full((len(self._ids), 1, self.words), -1, np.int32)
        return self.worker.sample_tokens(GrammarOutput(self._ids, masks))


@contextmanager
def unchanged(worker: Worker, num_blocks: int) -> Iterator[None]:
    """Behind the ``with``, the runner's tables, its free rows and the first ``num_blocks`` blocks of the KV cache are
    what they were in front of it."""
    rt, runner = worker.rt, worker.runner
    rt.synchronize()
    caches = {id(cache): rt.raw(cache)[:num_blocks] for pair in worker.kv_caches for cache in pair}
    blocks = {key: cache.clone() for key, cache in caches.items()}
    mirrors = _mirrors(runner)
    tables = {name: rt.raw(table).clone() for name, table in _tables(runner).items()}
    values = [mirror.copy() for mirror in mirrors]
    free = list(runner.req_states.free_indices) if isinstance(runner, ModelRunner) else []
    stats, runner.graphs.stats = runner.graphs.stats, type(runner.graphs.stats)()
    try:
        yield
    finally:
        rt.synchronize()
        with torch.inference_mode():  # some of them may have been made in it
            for key, cache in caches.items():
                cache.copy_(blocks[key])
            for name, table in _tables(runner).items():
                if name in tables:
                    rt.raw(table).copy_(tables[name])
        for mirror, value in zip(mirrors, values, strict=True):
            mirror[...] = value
        runner.graphs.stats = stats
        if isinstance(runner, ModelRunner):
            runner.req_states.free_indices[:] = free
            runner.batch = runner.forward_inputs = runner.logits = None
        rt.synchronize()


def _tables(runner: Any) -> dict[str, torch.Tensor]:
    return dict(runner.tables()) if isinstance(runner, ModelRunner) else {}


def _mirrors(runner: Any) -> list[np.ndarray[Any, Any]]:
    if not isinstance(runner, ModelRunner):
        return []
    states = runner.req_states
    return [*runner.host_tables().values(), states.num_computed_tokens_np, states.num_computed_prefill_tokens]
