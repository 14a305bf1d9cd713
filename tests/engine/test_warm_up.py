"""A warm-up leaves nothing behind but compiled kernels and the buffers that are allocated on first use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import mrv2lab.engine.warm_up as warm_up
from mrv2lab.engine.engine import Engine
from mrv2lab.engine.warm_up import COUNTS, mixes
from mrv2lab.protocol import SamplingParams
from tests.attention.test_engine import MODEL as SLIDING
from tests.engine.small import VOCAB, small_engine
from tests.runner.test_dummy import digest
from tests.slow import mostly_slow

WISHES: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.0, "top_k": 7, "top_p": 0.9},
    {"temperature": 0.5, "min_p": 0.05, "repetition_penalty": 1.3},
    {"logprobs": 3, "prompt_logprobs": 2},
    {"temperature": 0.9, "presence_penalty": 0.5, "logit_bias": {4: 2.0}, "logprobs": 1},
    {"bad_words": ((5,), (6, 7)), "min_tokens": 3, "stop_token_ids": (9,)},
)
RUNNERS = [{"runner": "mrv2"}, {"runner": "v1"}]


def mixed_workload(engine: Engine) -> list[list[int]]:
    """Everything at once, alone and together, in prefills and decodes."""
    rng = np.random.default_rng(0)
    made = []
    for count in (1, 3, len(WISHES)):
        params = [SamplingParams(max_tokens=6, ignore_eos=True, **WISHES[i]) for i in range(count)]
        prompts = [rng.integers(0, VOCAB, 2 + 3 * i).tolist() for i in range(count)]
        made += [output.token_ids for output in engine.generate(prompts, params)]
    return made


WAYS = [("uva_pool", True), ("barrier", False), ("barrier", True), ("pinned_copy", True), ("uva_pool", False)]


@pytest.mark.parametrize(("transfer", "async_scheduling"), mostly_slow(WAYS, 2))
def test_the_state_is_that_of_a_fresh_engine(transfer: str, async_scheduling: bool) -> None:
    options = {"transfer": transfer, "async_scheduling": async_scheduling}
    with small_engine(**options) as engine:
        fresh, wanted = digest(engine), mixed_workload(engine)
    with small_engine(**options) as engine:
        made = engine.warm_up(progress=False)
        assert made.steps > 100 and made.dummy_runs > 10
        assert digest(engine) == fresh
        assert not engine.worker.runner.graphs.stats.recent, "warm-up steps are nobody's"
        assert mixed_workload(engine) == wanted


@pytest.mark.parametrize("options", RUNNERS, ids=lambda o: o["runner"])
def test_in_the_middle_of_a_life_cached_prefixes_stay_valid(options: dict[str, Any]) -> None:
    def texts(warm_up: bool) -> list[list[int]]:
        with small_engine(num_blocks=40, **options) as engine:
            made = []
            for _ in range(2):
                made += [o.token_ids for o in engine.generate([list(range(1, 20))], SamplingParams(max_tokens=5))]
                if warm_up:
                    engine.warm_up(progress=False)
            assert engine.scheduler.stats.prefix_hit_tokens == 16
            return made

    assert texts(True) == texts(False)


def test_a_kv_cache_for_nobody_is_left_alone() -> None:
    with small_engine(num_blocks=2, block_size=1) as engine:
        assert engine.warm_up(progress=False).steps == 0


@pytest.mark.parametrize("options", RUNNERS, ids=lambda o: o["runner"])
@pytest.mark.parametrize("num_blocks", mostly_slow([4, 3, 40], 2))
def test_layers_that_slide(num_blocks: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two KV-cache groups, also in a cache that has one block or two for each."""
    monkeypatch.setattr(warm_up, "COUNTS", (1, 3))
    monkeypatch.setattr(warm_up, "_dummy_shapes", lambda config: [])
    monkeypatch.setattr(warm_up, "mixes", lambda vocab_size: mixes(vocab_size)[:2])
    with Engine(SLIDING, device="cpu", num_blocks=num_blocks, block_size=4, max_model_len=48, **options) as engine:
        assert engine.warm_up(progress=False).steps >= 4


def test_no_dummy_run_overtakes_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """flashinfer's plans, say, lie in as many page-locked buffers as steps may be in flight."""
    with small_engine() as engine:
        rt, run, done = engine.rt, engine.worker.runner.dummy_run, []
        monkeypatch.setattr(warm_up, "mixes", lambda vocab_size: ())

        def watched(*args: Any, **options: Any) -> None:
            last = rt.event("last")
            last.record(rt.main)
            done.append(last.query())
            run(*args, **options)

        monkeypatch.setattr(engine.worker.runner, "dummy_run", watched)
        engine.warm_up(progress=False)
    assert len(done) > 10 and all(done)


@pytest.mark.parametrize("options", RUNNERS)
def test_under_unsafe_it_ends(options: dict[str, Any]) -> None:
    """Its requests' tokens would be read too late, and one that never sees its end never ends."""
    with small_engine(transfer="unsafe", num_blocks=None, memory_bytes=1 << 26, **options) as engine:
        assert engine.worker.kv_cache_config.profile is not None


def test_unfinished_requests_refuse_it() -> None:
    with small_engine() as engine:
        engine.submit([1, 2, 3], SamplingParams(max_tokens=3))
        with pytest.raises(RuntimeError, match="1 requests are unfinished"):
            engine.warm_up(progress=False)


def test_a_block_that_is_not_restored_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    with small_engine() as engine:
        fresh = digest(engine)
        raw = engine.rt.raw

        def copy_that_nobody_restores(tensor: torch.Tensor) -> torch.Tensor:
            found = raw(tensor)
            return found.clone() if found.dim() == 4 else found

        monkeypatch.setattr(engine.rt, "raw", copy_that_nobody_restores)
        engine.warm_up(progress=False)
        monkeypatch.undo()
        assert digest(engine) != fresh


def test_every_stage_of_the_sampler_has_a_mix() -> None:
    names = {mix.name for mix in mixes(VOCAB)}
    assert {"greedy", "seeded", "top-k", "top-p", "min-p", "penalties", "grammar", "custom processor"} <= names
    assert all(len({mix.name for mix in mixes(vocab)}) == len(mixes(vocab)) for vocab in (2, 61, 151_936))


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [{}, {"cudagraph_mode": "full_and_piecewise"}], ids=["eager", "graphs"])
def test_a_mixed_workload_compiles_nothing(graphs: dict[str, Any]) -> None:
    """Row 73 of reference/mrv2.md 4.7, counted by Triton's own hook."""
    import triton

    compiled: list[str] = []

    def note(*args: Any, **options: Any) -> None:
        compiled.append(str(options.get("repr") or options.get("fn")))

    with small_engine(device="cuda", max_num_reqs=16, num_blocks=200, progress=False, **graphs) as engine:
        engine.warm_up(progress=False)
        assert COUNTS[-1] <= 16
        with triton.knobs.runtime.scope():
            triton.knobs.runtime.jit_post_compile_hook = note
            mixed_workload(engine)
    assert compiled == []
