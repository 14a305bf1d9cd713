"""Exercises of the lesson on dummy runs and memory, checked against the engine itself.

check_num_blocks(size, 476)      # -> right. / not yet: ...
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch

from mrv2lab.check.memory_ledger import growth
from mrv2lab.config import EngineConfig
from mrv2lab.engine.engine import Engine
from mrv2lab.engine.kv_cache_config import KVCacheConfig
from mrv2lab.engine.kv_layout import kv_bytes_per_block
from mrv2lab.protocol import SamplingParams
from mrv2lab.runner.dummy import empty_message, fabricate
from mrv2lab.teach.memory_lesson import changed, integer_class, state_hash
from mrv2lab.teach.sampling_exercises import Verdict

_OPEN = Verdict(False, "write your answer in place of None")


def check_block_bytes(config: EngineConfig, answer: Any) -> Verdict:
    """Bytes of one KV block: keys and values of ``block_size`` tokens in every layer."""
    if answer is None:
        return _OPEN
    model, right = config.model, kv_bytes_per_block(config)
    group = model.num_attention_heads // model.num_key_value_heads
    width = torch.empty(0, dtype=getattr(torch, model.dtype)).element_size()
    slips: dict[float, str] = {
        right / width: "you counted numbers, not bytes",
        right / 2: f"half of it: keys and values are two tensors, and a {model.dtype} takes {width} bytes",
        right / model.num_hidden_layers: "that is one layer's; every layer has its own keys and values",
        right / config.cache.block_size: "that is one token's; a block holds block_size of them",
        right * group: f"queries have {group} times as many heads, but only keys and values are kept",
    }
    if answer == right:
        return Verdict(True, f"2 x layers x block_size x KV heads x head_dim x bytes of {model.dtype} = {right:,}.")
    return Verdict(False, slips.get(float(answer), "2 tensors x layers x block_size x KV heads x head_dim x ..."))


def check_num_blocks(size: KVCacheConfig, answer: Any) -> Verdict:
    """How many blocks a measured profile leaves room for."""
    profile = size.profile
    if profile is None:
        raise ValueError("this size was not measured; build the engine with num_blocks=None")
    if answer is None:
        return _OPEN
    if not _is_whole(answer):
        return Verdict(False, f"{answer!r} is no whole number: a part of a block is of no use")
    if answer == size.num_blocks:
        return Verdict(True, f"{size.num_blocks:,}, the null block counted in; one more would not fit.")
    one = size.bytes_per_block
    slips = {
        (profile.total - profile.needed) // one: "that is what all of the memory would leave; utilization is a share",
        profile.budget // one: "weights, tables and buffers are there already",
        -(-profile.available // one): "you have rounded up: the last one would not fit",
        size.num_blocks - 1: "the null block is one of the blocks, and it needs its bytes too",
    }
    return Verdict(False, slips.get(int(answer), "budget less what is needed, over the bytes of a block, rounded down"))


Fabricate = Callable[[int, int], tuple[Any, Any]]


def check_nobody(make: Fabricate) -> Verdict:
    """``make(num_tokens, num_reqs)`` -> (rows, counts): the rows of a dummy run's requests, and the tokens of each, so
    that nothing that outlives the step changes. Tried on an engine whose requests come and go."""
    sizes: dict[str, Any] = {"num_blocks": 8, "max_num_reqs": 4, "max_model_len": 128}
    shapes = ((1, 1), (8, 1), (4, 4), (7, 3))
    with Engine("tiny", device="cpu", progress=False, enable_prefix_caching=False, **sizes) as engine:
        engine.generate([[5, 6], [7, 8]], SamplingParams(max_tokens=36, ignore_eos=True))
        engine.submit([1, 2, 3], SamplingParams(max_tokens=80, ignore_eos=True))
        for tokens, reqs in shapes:
            for _ in range(4):
                engine.step()
            verdict = _try_nobody(engine, make, tokens, reqs)
            if verdict is not None:
                return verdict
    return Verdict(True, "Row -1: no slot is written, no block is read, and no table is asked.")


def _try_nobody(engine: Engine, make: Fabricate, tokens: int, reqs: int) -> Verdict | None:
    """What is wrong with one fabricated batch; None if nothing is."""
    what, limit = f"{tokens} tokens in {reqs} requests", engine.config.scheduler.max_num_reqs
    try:
        rows, counts = (np.asarray(one) for one in make(tokens, reqs))
    except Exception as error:
        return Verdict(False, f"{what}: your function raised {type(error).__name__}: {error}")
    for name, array in (("rows", rows), ("counts", counts)):
        if array.shape != (reqs,) or array.dtype.kind != "i":
            return Verdict(False, f"{what}: {name} should be {reqs} integers, got {array.tolist()!r}")
    if counts.min() < 1 or counts.sum() != tokens:
        return Verdict(False, f"{what}: counts {counts.tolist()} are not {tokens} tokens with one at least for each")
    if rows.min() < -1 or rows.max() >= limit:
        return Verdict(False, f"{what}: rows {rows.tolist()}; there are rows 0 to {limit - 1}, and -1 for nobody")
    made = fabricate(tokens, reqs, max_num_reqs=limit, max_model_len=engine.config.scheduler.max_model_len)
    starts = np.full_like(made.query_start_loc, tokens)
    starts[: reqs + 1] = np.concatenate([[0], np.cumsum(counts)])
    counts = counts.astype(np.int32)
    host = dataclasses.replace(
        made,
        rows=rows.astype(np.int32),
        num_scheduled_tokens=counts,
        query_start_loc=starts,
        seq_lens_upper_bound=counts,
        has_prefill=bool(counts.max() > 1),
    )
    before, runner = state_hash(engine), engine.worker.runner
    with torch.inference_mode(), engine.rt.active():
        runner.execute_model(empty_message(num_tokens=tokens), host)
        runner.forget_forward()
        engine.rt.end_step()
    tables = changed(before, state_hash(engine))
    if not tables:
        return None
    owners = {row: owner for owner, row in runner.req_states.req_id_to_index.items()}
    row = int(rows.max())
    whose = f"is {owners[row]}'s" if row in owners else "is free, but holds what its last owner left in it"
    return Verdict(False, f"{what}: {tables[0]} and {len(tables) - 1} tables more have changed; row {row} {whose}")


def check_counts(counts: Sequence[Any] | None, served: Iterable[int] = range(1, 257), most: int = 3) -> Verdict:
    """At most ``most`` numbers of requests to warm up with, so that no number in ``served`` compiles a kernel anew."""
    if counts is None:
        return _OPEN
    if not counts or not all(_is_whole(one) and one > 0 for one in counts):
        return Verdict(False, f"positive integers are wanted, got {counts!r}")
    if len(set(counts)) > most:
        return Verdict(False, f"{len(set(counts))} are more than {most}: each one is a round of every kind of batch")
    warm = {integer_class(one) for one in counts}
    cold = next((one for one in served if integer_class(one) not in warm), None)
    if cold is not None:
        return Verdict(False, f"the first step of {cold} requests compiles: {cold} is {integer_class(cold)}")
    return Verdict(True, "1, a multiple of 16, and one that is neither.")


def check_rows(config: EngineConfig, max_model_len: int, limit: int, answer: Any) -> Verdict:
    """The greatest R (``max_num_reqs``) whose tables take at most ``limit`` bytes of the device at this L."""
    if answer is None:
        return _OPEN
    if not _is_whole(answer) or answer < 1:
        return Verdict(False, f"R is a positive integer, got {answer!r}")
    scheduler = dataclasses.replace(config.scheduler, max_model_len=max_model_len)
    frame = growth(dataclasses.replace(config, scheduler=scheduler), "max_num_reqs", [int(answer), int(answer) + 1])
    there, more = (int(one) for one in frame["device"])
    if there > limit:
        elsewhere = int(frame["uva"].iloc[0])
        return Verdict(False, f"R = {answer:,} takes {there:,} bytes of the device (and {elsewhere:,} elsewhere)")
    if more <= limit:
        return Verdict(False, f"R = {answer:,} takes {there:,} bytes of the device; one row more fits too")
    return Verdict(
        True, f"{there:,} bytes; a row takes {more - there:,}, most of it not the tokens, which are elsewhere."
    )


def _is_whole(answer: Any) -> bool:
    return isinstance(answer, Integral) and not isinstance(answer, bool)
