"""Every mutant is caught by every check that it names, and by no check when it is not there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mrv2lab.check import sampling_draws
from mrv2lab.check.invariants import InvariantBroken, check_invariants
from mrv2lab.check.races import RaceDetector
from mrv2lab.check.twin import Twin
from mrv2lab.check.workloads import MODEL
from mrv2lab.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from mrv2lab.engine.engine import Engine
from mrv2lab.engine.workload import Arrival, Workload
from mrv2lab.protocol import SamplingParams
from mrv2lab.recorder.recorder import Recorder
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.teach import mutants
from mrv2lab.teach.mutants import Mutant
from tests.runner_v1.sampling import SamplingBench
from tests.sample.pipeline import Pipeline
from tests.slow import mostly_slow

Around = Callable[[], AbstractContextManager[Any]]

CACHE = {"num_blocks": 1 + 15, "block_size": 8}
SCHEDULER = {
    "max_num_reqs": 5,
    "max_model_len": 96,
    "long_prefill_token_threshold": 7,
    "max_num_batched_tokens": 40,
}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def everything_at_once() -> Workload:
    """20 arrivals: chunks, preemptions, prefix hits, recycled rows, greedy and sampled, and unforeseen ends."""
    rng = np.random.default_rng(11)
    heads = [rng.integers(0, 331, 16).tolist() for _ in range(2)]
    arrivals = []
    for i in range(20):
        prompt = rng.integers(0, 331, int(rng.integers(3, 20))).tolist()
        if i % 3 == 0:
            prompt = heads[i % 2] + prompt[:3]
        seed = i if i % 4 == 1 else None
        params = SamplingParams(max_tokens=20, temperature=0.9 * (i % 2), seed=seed, ignore_eos=i % 4 != 3)
        arrivals.append(Arrival(i // 3, tuple(prompt), params))
    return Workload(tuple(arrivals))


def with_sampling_parameters() -> Workload:
    """As many arrivals, with every sampling parameter."""
    rng, settings = np.random.default_rng(12), sampling_draws.settings()
    heads = [rng.integers(0, 331, 16).tolist() for _ in range(2)]
    arrivals = []
    for i in range(24):
        prompt = rng.integers(0, 331, int(rng.integers(3, 20))).tolist()
        if i % 3 == 0:
            prompt = heads[i % 2] + prompt[:3]
        setting = settings[i] | ({"prompt_logprobs": "off"} if i % 3 == 0 else {})
        params = sampling_draws.params(setting, rng, 331, max_tokens=20, ignore_eos=i % 4 != 3)
        arrivals.append(Arrival(i // 3, tuple(prompt), params))
    return Workload(tuple(arrivals))


WORKLOADS = {False: everything_at_once, True: with_sampling_parameters}
"""By whether requests use sampling parameters."""


def runner_config(runner: str, needs: dict[str, Any]) -> RunnerConfig:
    """As the mutant needs it; V1 in its async fashion, in MRV2's batch order."""
    own = {"transfer": "barrier", "reorder": "mrv2"} if runner == "v1" else {}
    return RunnerConfig(runner=runner, device="cpu", **own | needs)  # type: ignore[arg-type]


def twin_finds(runner: str, needs: dict[str, Any], around: Around, sampling: bool = False) -> bool:
    """The right runner drives, the mutant follows. A breakdown would be no silent bug: it fails the test."""
    config = EngineConfig(MODEL, CacheConfig(**CACHE), SchedulerConfig(**SCHEDULER), runner_config(runner, needs))
    with Twin.build(config, config, around_b=around) as twin:
        report = twin.run(WORKLOADS[sampling]())
    assert not report.equal or (report.stats.num_preemptions and report.stats.prefix_hit_tokens)
    return not report.equal


def engine(runner: str, needs: dict[str, Any]) -> Engine:
    own = {"transfer": "barrier", "reorder": "mrv2"} if runner == "v1" else {}
    options = CACHE | SCHEDULER | own | {"max_logprobs": -1} | needs
    return Engine(MODEL, runner=runner, device="cpu", **options)  # type: ignore[arg-type]


def drive(made: Engine, after: Callable[[], None] = lambda: None, turns: int = 200, sampling: bool = False) -> None:
    """Run the workload, at most so far that a mutant cannot hang it."""
    arrivals = list(WORKLOADS[sampling]())
    while (arrivals or made.has_work()) and made.num_steps < turns:
        while arrivals and arrivals[0].step <= made.num_steps:
            arrival = arrivals.pop(0)
            made.submit(arrival.prompt, arrival.params)  # type: ignore[arg-type]
        made.step()
        after()


def recording_finds(runner: str, needs: dict[str, Any], around: Around, path: Path) -> bool:
    """Checksums every step; what the mutant did is compared with the specs, outside of it."""
    with around(), engine(runner, needs) as made, Recorder(made, path, check_every=1) as recorder:
        drive(made, turns=60)
    return bool(recorder.recording.verify())


def invariants_find(runner: str, needs: dict[str, Any], around: Around, path: Path) -> bool:
    with around(), engine(runner, needs) as made:
        try:
            drive(made, lambda: check_invariants(made), turns=120)
        except InvariantBroken:
            return True
    return False


def race_finds(runner: str, needs: dict[str, Any], around: Around, path: Path, sampling: bool = False) -> bool:
    with around(), engine(runner, needs) as made, RaceDetector(made) as races:
        drive(made, turns=40, sampling=sampling)
    return bool(races.hazards and races.corrupted_steps)


def sampler_finds(runner: str, needs: dict[str, Any], around: Around, path: Path, sampling: bool = True) -> bool:
    """The sampler alone on logits of which many tie, and on others."""
    with around():
        try:
            for seed in range(6 if runner == "mrv2" else 12):
                if runner == "mrv2":
                    Pipeline(CpuRuntime(), vocab=120, rows=16, seed=seed, levels=seed % 2).check()
                else:
                    v1_pipeline(seed)
        except AssertionError:
            return True
    return False


def v1_pipeline(seed: int) -> None:
    """Raises ``AssertionError`` where V1's sampler is not the oracle."""
    rng, bench = np.random.default_rng(seed), SamplingBench(vocab=80, rows=16)
    for i in range(16):
        params = sampling_draws.params(sampling_draws.settings()[16 * (seed % 4) + i], rng, 80, max_tokens=20)
        left_out = ("prompt_logprobs", "logprobs", "stop")
        given = {name: getattr(params, name) for name in vars(params) if name not in left_out}
        prompt, outputs = (rng.integers(0, 80, 8).tolist() for _ in range(2))
        outputs += list(params.logit_bias)[:2]  # or few would be punished, too
        bench.add(prompt, outputs, stop=params.stop_token_ids, **given)
    logits = rng.normal(0, 1.5, (16, 80)).astype(np.float32)
    bench.check(logits.round() if seed % 2 else logits)


CHECKS: dict[str, Callable[..., bool]] = {
    "sampler": sampler_finds,
    "twin": lambda runner, needs, around, path, sampling=False: twin_finds(runner, needs, around, sampling),
    "recording": recording_finds,
    "invariants": invariants_find,
    "race": race_finds,
}


def _claims(made: tuple[Mutant, ...]) -> list[Any]:
    """Every check that a mutant says catches it; all but its first are left to `make test-all`."""
    return [
        pytest.param(one, check, id=f"{one.runner}-{one.name}-{check}", marks=[pytest.mark.slow] if place else [])
        for one in made
        for place, check in enumerate(one.caught_by)
    ]


CLAIMS = _claims(tuple(mutants.ALL))
SAMPLING_CLAIMS = _claims(tuple(mutants.SAMPLING))
QUIET = {(one.runner, check, tuple(sorted(one.needs.items()))) for one in mutants.ALL for check in one.caught_by}
QUIETLY = mostly_slow(sorted(QUIET, key=lambda one: (len(one[2]), one[0] == "mrv2", one)), 6)
"""Each check on each runner first, then with what single mutants need."""


@pytest.mark.parametrize(("mutant", "check"), CLAIMS)
def test_it_is_caught(mutant: Mutant, check: str, tmp_path: Path) -> None:
    assert CHECKS[check](mutant.runner, dict(mutant.needs), mutant, tmp_path / "run.mrv2"), (
        f"{mutant.name} escaped the {check}: {mutant.breaks}"
    )


@pytest.mark.parametrize(("runner", "check", "needs"), QUIETLY)
def test_the_checks_are_quiet_without_it(runner: str, check: str, needs: tuple[Any, ...], tmp_path: Path) -> None:
    assert not CHECKS[check](runner, dict(needs), nullcontext, tmp_path / "run.mrv2")


@pytest.mark.parametrize(("mutant", "check"), SAMPLING_CLAIMS)
def test_a_sampling_mutant_is_caught(mutant: Mutant, check: str, tmp_path: Path) -> None:
    found = CHECKS[check](mutant.runner, dict(mutant.needs), mutant, tmp_path / "run.mrv2", sampling=True)
    assert found, f"{mutant.name} escaped the {check}: {mutant.breaks}"


@pytest.mark.parametrize("check", ["twin", "sampler", "race"])
@pytest.mark.parametrize("runner", mostly_slow(["mrv2", "v1"], 1))
def test_the_checks_are_quiet_with_sampling_parameters(runner: str, check: str, tmp_path: Path) -> None:
    assert not CHECKS[check](runner, {}, nullcontext, tmp_path / "run.mrv2", sampling=True)


def test_there_are_enough_of_them() -> None:
    assert len(mutants.ALL) >= 20
    assert {one.runner for one in mutants.ALL} == {"mrv2", "v1"}
    every = mutants.ALL + mutants.SAMPLING
    assert len({one.name for one in every}) == len(every)
    assert len(mutants.SAMPLING) >= 20


@pytest.mark.parametrize("mutant", mutants.ALL + mutants.SAMPLING, ids=lambda one: one.name)
def test_it_is_a_sentence_and_somebody_catches_it(mutant: Mutant) -> None:
    assert mutant.caught_by, "a mutant that nothing catches teaches nothing"
    assert mutant.breaks[0].isupper() and mutant.breaks.endswith(".")
    assert getattr(mutants, mutant.name) is mutant


@pytest.mark.parametrize("mutant", mutants.ALL + mutants.SAMPLING, ids=lambda one: one.name)
def test_it_is_gone_after_the_with(mutant: Mutant) -> None:
    """Whatever it replaced stands there again, also when the block raises."""
    seen: list[tuple[Any, str, Any]] = []
    patch = mutants.Patch()
    mutant.patch(patch)
    seen += patch._undo
    patch.undo()
    assert seen, "it replaces nothing"
    with mutant():
        assert any(inspect.getattr_static(owner, name) is not value for owner, name, value in seen)
    for owner, name, value in seen:
        assert inspect.getattr_static(owner, name) is value
    with pytest.raises(ZeroDivisionError), mutant():
        raise ZeroDivisionError
    for owner, name, value in seen:
        assert inspect.getattr_static(owner, name) is value


def test_only_what_can_be_put_back_is_patched() -> None:
    with pytest.raises(AttributeError, match="has no 'step' of its own"):
        mutants.Patch().set(Recorder, "step", None)


def test_they_are_listed() -> None:
    assert {one.name for one in mutants.ALL + mutants.SAMPLING} < set(dir(mutants))
    assert "torch" not in dir(mutants)
