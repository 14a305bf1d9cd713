"""The KV cache's size follows from a measured profile; one block more is refused with the reason, not with an OOM."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import mrv2lab.engine.kv_cache_config as kv_cache_config
import mrv2lab.engine.warm_up as warm_up
import mrv2lab.runtime.device_memory as device_memory
from mrv2lab.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from mrv2lab.engine.engine import Engine
from mrv2lab.engine.kv_cache_config import largest_num_blocks, most_useful_blocks, resolve_kv_cache
from mrv2lab.engine.kv_layout import kv_bytes_per_block
from mrv2lab.engine.worker import wants_warm_up
from mrv2lab.protocol import SamplingParams
from mrv2lab.runner.profile_memory import MemoryProfile, size_words
from mrv2lab.runtime import make_runtime
from mrv2lab.runtime.places import Place
from tests.engine.small import MODEL, small_engine

MIB = 1 << 20
RUNNERS = ("mrv2", "v1")


def engine_of(megabytes: float, **options: Any) -> Engine:
    """On a device of that much memory; few tokens a step, so that little of it is gone."""
    sizes = {"max_num_batched_tokens": 64, "memory_bytes": int(megabytes * MIB), "progress": False}
    return small_engine(**sizes | {"num_blocks": None} | options)


@pytest.mark.parametrize("runner", RUNNERS)
def test_what_the_profile_leaves_is_the_kv_cache(runner: str) -> None:
    with engine_of(8, runner=runner) as engine:
        found, rt = engine.worker.kv_cache_config, engine.rt
        profile = found.profile
        assert profile is not None and profile.total == 8 * MIB
        assert found.num_blocks == engine.config.cache.num_blocks == len(engine.scheduler.kv.pool.blocks)
        kv = sum(cache.nbytes for pair in engine.worker.kv_caches for cache in pair)
        assert kv == found.nbytes == found.num_blocks * kv_bytes_per_block(engine.config)
        assert [cache.shape[0] for pair in engine.worker.kv_caches for cache in pair] == [found.num_blocks] * 2
        # Everything on the device: inside the budget, and with one block more outside of it.
        used = rt.registry.nbytes(Place.DEVICE)
        assert used == kv + profile.tensors
        assert used <= profile.budget < used + found.bytes_per_block
        assert engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4))[0].finished


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_mixed_workload_needs_no_more_than_the_profile_found(runner: str) -> None:
    with engine_of(8, runner=runner) as engine:
        used = engine.rt.registry.nbytes(Place.DEVICE)
        wishes: list[dict[str, Any]] = [
            {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2, "logprobs": 5},
            {"prompt_logprobs": 1, "min_p": 0.1, "temperature": 0.5},
        ]
        engine.generate([[1, 2, 3, 4]] * 2, [SamplingParams(max_tokens=5, **wish) for wish in wishes])
        engine.rt.synchronize()
        more = engine.rt.registry.nbytes(Place.DEVICE) - used
        assert more < 4096, "but for a few rows of staged diffs"


@pytest.mark.parametrize("runner", RUNNERS)
def test_one_block_more_is_refused(runner: str) -> None:
    with engine_of(8, runner=runner) as engine:
        most = engine.config.cache.num_blocks
    assert most is not None
    with engine_of(8, runner=runner, num_blocks=most) as engine:
        assert engine.config.cache.num_blocks == most
    with pytest.raises(ValueError, match=f"num_blocks={most + 1:,} take .* at most {most:,} blocks fit") as caught:
        engine_of(8, runner=runner, num_blocks=most + 1)
    text = str(caught.value)
    assert f"Use num_blocks={most} or less" in text and "num_blocks=None" in text and "MiB" in text


def test_a_utilisation_that_leaves_no_block_names_the_smallest_that_would_do() -> None:
    with pytest.raises(ValueError, match="leaves no KV block") as caught:
        engine_of(8, gpu_memory_utilization=0.001)
    share = float(re.findall(r"use gpu_memory_utilization=([0-9.]+)", str(caught.value))[0])
    with engine_of(8, gpu_memory_utilization=share) as engine:
        assert (engine.config.cache.num_blocks or 0) >= 2
    with pytest.raises(ValueError, match="leaves no KV block"):
        engine_of(8, gpu_memory_utilization=share - 0.002)
    with pytest.raises(ValueError, match="no utilisation would do: use a smaller model"):
        engine_of(0.05)


def test_a_small_pool_is_not_measured() -> None:
    with small_engine() as engine:
        assert engine.worker.kv_cache_config.profile is None and engine.worker.warmed_up is None
        assert str(engine.worker.kv_cache_config) == "17 blocks of 4 tokens, 256 B each, 4.2 KiB"


def test_the_profile_has_every_part() -> None:
    profile = MemoryProfile(1000, 0.9, tensors=300, other=100, step_peak=50, graphs=25)
    assert (profile.budget, profile.needed, profile.available) == (900, 475, 425)
    assert sum(profile.parts().values()) == 1000
    assert "KV cache 425 B" in str(profile) and "left alone 100 B" in str(profile)
    short = MemoryProfile(1000, 0.4, 300, 100, 50, 25)
    assert short.available == -75 and short.missing == 75 and profile.missing == 0
    assert short.parts()["left alone"] == 525 and sum(short.parts().values()) == 1000
    assert str(short).endswith("graphs (estimate) 25 B, left alone 525 B; 75 B over the budget of 400 B")
    tiny = MemoryProfile(100, 0.9, 300, 0, 0, 0)
    assert tiny.parts()["left alone"] == 0 and str(tiny).endswith("300 B; 210 B over the budget of 90 B")


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (139 << 30, "139.0 GiB"), (2 << 50, "2048.0 TiB")],
)
def test_sizes_in_words(nbytes: int, words: str) -> None:
    assert size_words(nbytes) == words


def config_of(**cache: Any) -> EngineConfig:
    return EngineConfig(MODEL, CacheConfig(block_size=4, **cache), SchedulerConfig(max_model_len=48), RunnerConfig())


@pytest.mark.parametrize("page", [1, 64, 100, 4096, 2 * MIB])
@pytest.mark.parametrize("available", [0, 255, 256, 511, 512, 100_000, 5 * MIB])
def test_tensors_are_rounded_as_the_allocator_rounds_them(
    page: int, available: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache_config, "page_bytes", lambda rt: page)
    config, rt = config_of(), make_runtime(RunnerConfig(device="cpu"))
    most, one = largest_num_blocks(config, rt, available), kv_bytes_per_block(config)
    assert one == 256, "two tensors"
    want = max(n for n in range(available // one + 1) if n == 0 or 2 * page * -(-n * one // 2 // page) <= available)
    assert most == want


def test_a_pool_that_takes_half_of_what_is_free_is_measured() -> None:
    rt = make_runtime(RunnerConfig(device="cpu"))
    measured: list[int] = []

    def profile() -> MemoryProfile:
        measured.append(1)
        return MemoryProfile(100_000, 1.0, 0, 0, 0, 0)

    # 61 tokens in the vocabulary, one row: tables that come late take 3 x 61 x 4 bytes at most.
    config = config_of(num_blocks=193, memory_bytes=99_548, gpu_memory_utilization=1.0)
    config = dataclasses.replace(config, scheduler=SchedulerConfig(max_num_reqs=1, max_model_len=48))
    assert 2 * 193 * kv_bytes_per_block(config) + 3 * 4 * config.model.vocab_size == 99_548
    assert resolve_kv_cache(config, rt, profile).profile is None and not measured
    config = dataclasses.replace(config, cache=dataclasses.replace(config.cache, memory_bytes=99_547))
    assert resolve_kv_cache(config, rt, profile).profile is not None and measured


def test_a_small_pool_without_room_for_tables_that_come_late_is_refused() -> None:
    """It takes half of what is free, but then the first request with a penalty brings counts of R x V."""
    rows: dict[str, Any] = {"max_num_reqs": 512}
    with engine_of(64, num_blocks=13, **rows) as engine:
        used, kv = engine.rt.registry.nbytes(Place.DEVICE), engine.worker.kv_cache_config.nbytes
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3, presence_penalty=0.5, temperature=1.0, top_k=3))
        engine.rt.synchronize()
        late = engine.rt.registry.nbytes(Place.DEVICE) - used
        assert kv < late <= 3 * 4 * 512 * engine.config.model.vocab_size
    with pytest.raises(ValueError, match=r"leaves no KV block.* and 13 blocks take"):
        engine_of((used + kv) / 0.9 / MIB + 0.001, num_blocks=13, **rows)


@pytest.mark.parametrize("runner", RUNNERS)
def test_without_a_size_a_cpu_gives_half_of_its_memory_and_no_more_than_is_of_use(
    runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (device_memory, kv_cache_config):
        monkeypatch.setattr(module, "physical_memory", lambda: 16 * MIB)
    with engine_of(1, memory_bytes=None, runner=runner) as engine:
        found = engine.worker.kv_cache_config
        assert found.profile is not None and found.profile.total == 8 * MIB
        assert found.num_blocks == 1 + 4 * 12 and found.enough, "four requests of 48 tokens, and the null block"
        assert "49 blocks of 4 tokens, 256 B each, 12.2 KiB, all that max_num_reqs x max_model_len" in str(found)
        room = largest_num_blocks(engine.config, engine.rt, found.profile.available)
        engine.generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=45, ignore_eos=True))
        assert engine.scheduler.stats.num_preemptions == 0
    # What is asked for is measured by the same total.
    with engine_of(1, memory_bytes=None, runner=runner, num_blocks=room) as engine:
        assert engine.config.cache.num_blocks == room > 10_000
    for asked in (room + 1, 10**7):
        with pytest.raises(ValueError, match=f"{asked:,} take .* at most {room:,} blocks fit .*8.0 MiB: ") as caught:
            engine_of(1, memory_bytes=None, runner=runner, num_blocks=asked)
        assert ("gpu_memory_utilization=0.901" in str(caught.value)) == (asked == room + 1)
        assert "memory_bytes" not in str(caught.value) or asked == room + 1


@pytest.mark.parametrize("options", [{}, {"window": 8}], ids=["one group", "two groups"])
def test_what_the_limits_can_fill(options: dict[str, Any]) -> None:
    config = config_of()
    if options:
        layers = {"num_hidden_layers": 2, "layer_types": ("full_attention", "sliding_attention")}
        model = dataclasses.replace(MODEL, sliding_window=options["window"], **layers)
        config = dataclasses.replace(config, model=model)
    scheduler = SchedulerConfig(max_num_reqs=3, max_model_len=9)
    assert most_useful_blocks(dataclasses.replace(config, scheduler=scheduler)) == 1 + 3 * 3 * (2 if options else 1)


@pytest.mark.parametrize("runner", RUNNERS)
def test_where_nothing_compiles_a_profile_is_no_warm_up_and_finds_as_much(runner: str) -> None:
    with engine_of(8, runner=runner) as engine:
        assert engine.worker.warmed_up is None and engine.worker.kv_cache_config.profile is not None
        used = engine.rt.registry.nbytes(Place.DEVICE)
        engine.warm_up(progress=False)  # which has the largest step too
        assert engine.rt.registry.nbytes(Place.DEVICE) == used


@pytest.mark.parametrize("asked", [False, True])
def test_a_profile_warms_up_if_asked(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "_dummy_shapes", lambda config: [])
    with engine_of(8, warm_up=asked) as engine:
        assert (engine.worker.warmed_up is not None) == asked


def test_unasked_it_does_where_kernels_are_compiled_and_something_needs_it() -> None:
    found = {(c, n): wants_warm_up(None, compiled=c, needed=n) for c in (False, True) for n in (False, True)}
    assert [key for key, wanted in found.items() if wanted] == [(True, True)]
    assert all(wants_warm_up(True, compiled=c, needed=False) for c in (False, True))
    assert not any(wants_warm_up(False, compiled=True, needed=n) for n in (False, True))


@pytest.mark.parametrize("wish", ["logprobs", "allowed_token_ids"])
def test_a_wish_that_the_profile_forgets_is_caught(wish: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant of the batch: V1 allocates for each wish."""
    made = warm_up.first_use_mix

    def forgetful(vocab_size: int) -> warm_up.Mix:
        mix = made(vocab_size)
        plain = getattr(SamplingParams(), wish)
        return dataclasses.replace(mix, params=(dataclasses.replace(mix.params[0], **{wish: plain}),))

    monkeypatch.setattr(warm_up, "first_use_mix", forgetful)
    monkeypatch.setattr(warm_up, "_dummy_shapes", lambda config: [])
    with engine_of(8, runner="v1") as engine:
        used = engine.rt.registry.nbytes(Place.DEVICE)
        engine.warm_up(progress=False)
        assert engine.rt.registry.nbytes(Place.DEVICE) > used


def test_asked_for_blocks_where_there_is_no_room_at_all() -> None:
    with pytest.raises(ValueError, match=r"leaves no KV block.* and 64 blocks take 16\.0 KiB; use") as caught:
        engine_of(64, num_blocks=64, gpu_memory_utilization=0.0001)
    assert "num_blocks=0" not in str(caught.value)
    found = re.findall(r"gpu_memory_utilization=([0-9.]+) or more, or memory_bytes=([0-9]+) or more", str(caught.value))
    with engine_of(64, num_blocks=64, gpu_memory_utilization=float(found[0][0])) as engine:
        assert engine.config.cache.num_blocks == 64
    with engine_of(int(found[0][1]) / MIB, num_blocks=64, gpu_memory_utilization=0.0001) as engine:
        assert engine.config.cache.num_blocks == 64
    with pytest.raises(ValueError, match="leaves no KV block"):
        engine_of(0.5 * int(found[0][1]) / MIB, num_blocks=64, gpu_memory_utilization=0.0001)


@pytest.mark.parametrize("memory_bytes", [0, -1, 1.5, True])
def test_no_memory_is_refused(memory_bytes: Any) -> None:
    with pytest.raises(ValueError, match="memory_bytes must be a positive integer"):
        CacheConfig(memory_bytes=memory_bytes)


def test_a_block_too_many_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant that forgets the weights and tables."""
    monkeypatch.setattr(MemoryProfile, "needed", property(lambda self: self.other))
    with engine_of(8) as engine:
        profile = engine.worker.kv_cache_config.profile
        assert profile is not None
        assert engine.rt.registry.nbytes(Place.DEVICE) > profile.budget


@contextmanager
def others_hold_still() -> Iterator[None]:
    """Skip where somebody else on the GPU takes memory meanwhile, which a profile cannot tell from its own."""

    def by_others() -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()

    before = by_others()
    try:
        yield
    except (ValueError, AssertionError):
        if by_others() - before > 1 << 30:
            pytest.skip("another process has taken memory of this GPU meanwhile")
        raise


@pytest.mark.gpu
def test_no_out_of_memory_at_the_computed_size() -> None:
    """A few hundredths of the GPU, which a mixed workload does not leave."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    model = dataclasses.replace(MODEL, num_hidden_layers=4, **heads)
    options = {"max_num_reqs": 4, "max_num_batched_tokens": 64, "max_model_len": 48, "block_size": 64}
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    options |= {"device": "cuda", "progress": False, "gpu_memory_utilization": (total - free) / total + 0.03}
    with others_hold_still(), Engine(model, num_blocks=None, **options) as engine:
        profile, most = engine.worker.kv_cache_config.profile, engine.config.cache.num_blocks
        assert profile is not None and most is not None and most > 100
        wish = SamplingParams(max_tokens=5, temperature=1.0, top_p=0.9, repetition_penalty=1.2, logprobs=5)
        assert all(output.finished for output in engine.generate([[1, 2, 3]] * 4, [wish] * 4))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        assert total - free <= profile.budget
    del engine
    with pytest.raises(ValueError, match=r"blocks fit|leaves no KV block"):  # others may share the GPU
        Engine(model, num_blocks=2 * most, **options)
