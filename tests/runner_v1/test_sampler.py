"""V1's sampler: its law, its generators, and what must not disturb them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mrv2lab.observer import EventLog
from mrv2lab.protocol import SamplingParams
from mrv2lab.runner_v1.cached_request import CachedRequestState
from mrv2lab.runner_v1.persistent_batch import InputBatch
from mrv2lab.runner_v1.sampler import Sampler
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.runtime.transfer import PinnedCopy
from tests.runner_v1.small import v1
from tests.runtime.machines import machine

VOCAB = 7


class Bench:
    """A batch without a model: requests are added with a temperature and perhaps a seed, and sampled."""

    def __init__(self, rt: Any = None, rows: int = 8, vocab: int = VOCAB) -> None:
        self.rt = rt or CpuRuntime()
        self.batch = InputBatch(rows, 8, vocab, (4,), PinnedCopy(self.rt).table)
        self.sampler = Sampler(self.rt)
        self.sampled = self.rt.zeros((rows, 1), torch.int64, name="sampled")
        self.logits = self.rt.zeros((rows, vocab), torch.float32, name="logits")
        self._values = self.rt.empty((rows, vocab), torch.float32, name="values", place="pinned")

    def anew(self) -> Bench:
        """Without a request; a runtime binds the sampler's segments once."""
        self.rt.synchronize()
        self.batch.reset()
        self.sampler.reset()
        return self

    def add(self, temperature: float, seed: int | None = None) -> CachedRequestState:
        generator = self.sampler.make_generator(seed) if seed is not None else None
        sampling = SamplingParams(temperature=temperature)
        name = f"r{len(self.batch.req_id_to_index)}"
        state = CachedRequestState(name, [1], sampling, seed or 0, seed is not None, generator, [[1]], 0)
        self.batch.add_request(state)
        return state

    def set_logits(self, values: torch.Tensor) -> None:
        self._values.copy_(values)
        self.rt.h2d(self.logits, self._values)

    def draw(self, discarded: tuple[int, ...] = ()) -> list[int]:
        count = self.batch.num_reqs
        self.batch.temperature.publish(count)
        self.sampler.sample(self.sampled[:count], self.logits[:count], self.batch, discarded)
        return self.rt.read(self.sampled)[:count, 0].tolist()


def logits_of(probabilities: list[float], rows: int = 8) -> torch.Tensor:
    return torch.tensor(probabilities).log().repeat(rows, 1)


LAW = [0.4, 0.3, 0.2, 0.05, 0.04, 0.01, 0.0]


@pytest.mark.parametrize("seeded", [False, True])
def test_the_law_is_softmax_of_logits_over_temperature(seeded: bool) -> None:
    """Chi-square over 4,000 draws and 6 possible tokens, at temperature 2: below 22 in 999 of 1,000 runs."""
    bench, rows = Bench(rows=50), 50
    for i in range(rows):
        bench.add(2.0, seed=i if seeded else None)
    bench.set_logits(logits_of(LAW, rows))
    law = torch.tensor(LAW).sqrt()
    law /= law.sum()
    draws = torch.tensor([bench.draw() for _ in range(80)]).flatten()
    counts = torch.bincount(draws, minlength=VOCAB)
    assert counts[6] == 0, "a token of probability 0"
    expected = law * len(draws)
    assert float(((counts - expected) ** 2 / expected)[:6].sum()) < 22


def test_a_batch_of_greedy_rows_is_one_launch() -> None:
    log, bench = EventLog(), Bench()
    bench.rt.observer = log
    for _ in range(3):
        bench.add(0.0)
    bench.set_logits(torch.eye(8, VOCAB).flip(1))
    log.clear()
    assert bench.draw() == [6, 5, 4]
    assert [mark.name for mark in log.marks if mark.kind == "run"] == ["v1.sample.greedy"]


def test_ties_go_to_the_lowest_id() -> None:
    bench = Bench()
    bench.add(0.0)
    bench.set_logits(torch.tensor([0.0, 3, 1, 3, 3, 0, 0]).repeat(8, 1))
    assert bench.draw() == [1]
    bench.add(1.0)
    assert bench.draw()[0] == 1, "beside a row that draws, too"


def test_greedy_rows_beside_sampled_ones_stay_greedy() -> None:
    bench = Bench()
    for temperature in (0.0, 1.0, 1e-6, 0.7):
        bench.add(temperature, seed=5)
    bench.set_logits(logits_of(LAW))
    for _ in range(20):
        assert bench.draw()[0::2] == [0, 0]


def stream(company: list[tuple[float, int | None]], at: int, steps: int = 12) -> list[int]:
    """Tokens of the request with temperature 1 and seed 42, put into place ``at`` among ``company``."""
    bench = Bench()
    for temperature, seed in [*company[:at], (1.0, 42), *company[at:]]:
        bench.add(temperature, seed)
    bench.set_logits(logits_of([0.2, 0.2, 0.2, 0.1, 0.1, 0.1, 0.1]))
    return [bench.draw()[at] for _ in range(steps)]


def test_a_seeded_row_draws_the_same_in_any_company() -> None:
    alone = stream([], 0)
    assert len(set(alone)) > 2
    others: list[tuple[float, int | None]] = [(0.0, None), (1.0, None), (0.5, 7)]
    assert all(stream(others, at) == alone for at in range(4))


def test_a_row_without_a_seed_depends_on_its_company() -> None:
    """All such rows share one generator: V1's price for one launch for all of them."""

    def second_row(others: int) -> list[int]:
        bench = Bench()
        for _ in range(1 + others):
            bench.add(1.0)
        bench.set_logits(logits_of([1 / VOCAB] * VOCAB))
        return [bench.draw()[0] for _ in range(12)]

    assert second_row(0) == second_row(0)
    assert second_row(0) != second_row(1)


def test_a_discarded_row_leaves_its_generator_alone() -> None:
    """A prompt in chunks samples at each chunk, for nobody (vLLM #10097)."""
    bench = Bench()
    bench.add(1.0, seed=42)
    bench.set_logits(logits_of([0.2, 0.2, 0.2, 0.1, 0.1, 0.1, 0.1]))
    made = [bench.draw(discarded=(0,) if step in (0, 3, 4) else ()) for step in range(15)]
    assert [row[0] for step, row in enumerate(made) if step not in (0, 3, 4)] == stream([], 0)


def test_a_forgotten_discard_changes_the_draws() -> None:
    """The mutant: the row of a chunk draws."""
    bench = Bench()
    bench.add(1.0, seed=42)
    bench.set_logits(logits_of([0.2, 0.2, 0.2, 0.1, 0.1, 0.1, 0.1]))
    bench.draw()
    assert [bench.draw()[0] for _ in range(12)] != stream([], 0)


def test_logits_stay_as_they_are() -> None:
    bench = Bench()
    bench.add(0.5, seed=1)
    bench.add(0.0)
    bench.set_logits(logits_of([0.2, 0.2, 0.2, 0.1, 0.1, 0.1, 0.1]))
    before = bench.rt.read(bench.logits)
    bench.draw()
    assert torch.equal(bench.rt.read(bench.logits), before)


def test_a_generator_goes_behind_the_draws_that_are_queued() -> None:
    """The request has ended on the host while its last draw is still in the queue."""
    bench = Bench()
    state = bench.add(1.0, seed=42)
    bench.set_logits(logits_of([0.2, 0.2, 0.2, 0.1, 0.1, 0.1, 0.1]))
    bench.batch.temperature.publish(1)
    bench.sampler.sample(bench.sampled[:1], bench.logits[:1], bench.batch)
    assert state.generator is not None
    bench.sampler.forget(state.generator)
    assert len(bench.sampler._generators) == 1
    assert bench.rt.read(bench.sampled)[0].tolist() == stream([], 0, 1)
    assert not bench.sampler._generators


def test_nothing_waits() -> None:
    log, bench = EventLog(), Bench()
    for i in range(6):
        bench.add(0.4 * i, seed=i if i % 2 else None)
    bench.set_logits(logits_of(LAW))
    bench.rt.observer = log
    bench.batch.temperature.publish(6)
    bench.sampler.sample(bench.sampled[:6], bench.logits[:6], bench.batch, (2,))
    assert log.waits() == []
    assert [mark.name for mark in log.marks if mark.kind == "run"] == ["v1.sample.random"]


@pytest.mark.parametrize("where", ["threaded", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_elsewhere_too_a_seeded_row_draws_the_same_in_any_company(where: str) -> None:
    made = []
    others: list[tuple[float, int | None]] = [(0.0, None), (1.0, None)]
    with machine(where) as rt:
        bench = Bench(rt, vocab=1000)
        for at in range(3):
            bench.anew()
            for temperature, seed in [*others[:at], (1.0, 42), *others[at:]]:
                bench.add(temperature, seed)
            bench.set_logits(torch.zeros(8, 1000))
            made.append([bench.draw(discarded=(at,) if step == 3 else ())[at] for step in range(9)])
    assert len({tuple(one[:3] + one[4:]) for one in made}) == 1


def test_the_engines_seed_seeds_the_shared_generator() -> None:
    """Requests without a seed draw otherwise under another engine seed, and never twice alike under None."""

    def tokens(seed: int | None) -> list[int]:
        with v1(seed=seed) as engine:
            first = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=24, temperature=5.0, ignore_eos=True))
            engine.reset()  # starts the draws again
            again = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=24, temperature=5.0, ignore_eos=True))
            assert first[0].token_ids == again[0].token_ids
            return first[0].token_ids

    assert tokens(0) == tokens(0) != tokens(5)
    assert tokens(None) != tokens(None)
