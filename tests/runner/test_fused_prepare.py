"""Fused preparation: every table of the device is what the separate launches make it, step by step."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from mrv2lab.check.memory_ledger import measure
from mrv2lab.config import ModelConfig, RunnerConfig
from mrv2lab.engine.engine import Engine
from mrv2lab.observer import EventLog
from mrv2lab.protocol import SamplingParams
from mrv2lab.runner.async_output import OutputSlot
from mrv2lab.runner.model_runner import ModelRunner
from mrv2lab.state.input_batch import HostBatch, InputBuffers
from tests.runner.schedules import drive
from tests.runner.test_invariants import MODEL, SLOTS
from tests.runner_v1.test_mutants import mutate

SEPARATE = {"prefill_inputs", "pos_seq_lens", "combine_tokens", "gather_block_tables", "slot_mapping"}
FUSED = {"prepare_decode", "prepare_batch"}


def moves(seed: int) -> list[Any]:
    """Arrivals (one-token prompts too), ends, aborts and preemptions between decodes."""
    choose = random.Random(seed)
    made: list[Any] = []
    for _ in range(30):
        kind = choose.choice(["submit", "step", "step", "step", "abort", "preempt"])
        length = choose.choice([1, 1, 2, 9, 17])
        made.append((kind, length if kind == "submit" else choose.randrange(1, 4), choose.randrange(2, 12), seed % 3))
    return made


def states(
    seed: int, model: ModelConfig = MODEL, **options: Any
) -> tuple[list[dict[str, torch.Tensor]], list[set[str]]]:
    """Every integer table behind each step, and the preparation launches of each step."""
    log = EventLog()
    tables: list[dict[str, torch.Tensor]] = []
    launches: list[set[str]] = []

    def note(engine: Engine) -> None:
        launches.append({mark.name for mark in log.marks if mark.kind == "kernel"} & (SEPARATE | FUSED))
        tables.append({name: engine.rt.read(table) for name, table in engine.worker.runner.tables().items()})
        log.clear()

    with Engine(model, **{"device": "cpu", "observer": log, "num_blocks": 24} | SLOTS | options) as engine:
        drive(engine, moves(seed), note)
    return tables, launches


def check(seed: int, **options: Any) -> None:
    separate, apart = states(seed, **options)
    fused, together = states(seed, fused_prepare=True, **options)
    assert len(separate) == len(fused)
    for number, (one, other) in enumerate(zip(separate, fused, strict=True)):
        assert [name for name in one if not torch.equal(one[name], other[name])] == [], f"step {number}"
    kinds: list[set[str]] = [SEPARATE, SEPARATE - {"prefill_inputs"}, set()]
    assert [{"prepare_batch"}, {"prepare_decode"}, set()] == [
        next(other for one, other in zip(apart, together, strict=True) if one == kind) for kind in kinds
    ]
    pairs = {(frozenset(one), frozenset(other)) for one, other in zip(apart, together, strict=True)}
    assert len(pairs) == len(kinds), "a kind of step has one way of preparing it"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("async_scheduling", [True, False])
def test_every_table_is_the_same(seed: int, async_scheduling: bool) -> None:
    check(seed, async_scheduling=async_scheduling, transfer=("uva_pool", "pinned_copy", "barrier")[seed])


def test_two_groups_of_blocks() -> None:
    windows: Any = {"sliding_window": 7, "layer_types": ("full_attention", "sliding_attention")}
    model = replace(MODEL, num_hidden_layers=2, **windows)
    check(2, model=model, num_blocks=48, enable_prefix_caching=False)


def test_prompts_in_chunks() -> None:
    check(4, max_num_batched_tokens=5, long_prefill_token_threshold=3)


def test_padded_to_a_graph() -> None:
    check(1, cudagraph_mode="full_decode_only", cudagraph_capture_sizes=(2, 4))


def test_mutant_a_prefill_of_one_token_taken_for_a_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        HostBatch, "is_plain_decode", property(lambda self: self.num_tokens == self.num_logits == len(self.req_ids))
    )
    with pytest.raises(AssertionError):
        check(0, async_scheduling=True, transfer="uva_pool")


def test_rows_are_sent_when_they_change() -> None:
    log = EventLog()
    slots: Any = SLOTS
    with Engine(MODEL, device="cpu", observer=log, num_blocks=24, fused_prepare=True, **slots) as engine:
        for length in (9, 5):
            engine.submit([1] * 3, SamplingParams(max_tokens=length, ignore_eos=True))
        sent = []
        while engine.has_work():
            log.clear()
            engine.step()
            places = [mark.writes[0] for mark in log.marks if mark.kind in ("h2d", "publish")]
            sent.append([name for name in places if name in ("idx_mapping", "query_start_loc") or name[:5] == "batch"])
    # The prefills, read in place; a decode's query_start_loc is made on the device, and its rows are those of the
    # prefills until one leaves, and once more when its row is free.
    assert {number: step for number, step in enumerate(sent) if step} == {
        0: ["batch.uva0"], 5: ["idx_mapping"], 6: ["idx_mapping"],
    }  # fmt: skip


def counting(transfer: str) -> list[tuple[int, int]]:
    """Of each step, the launches that count what was sampled and the copies that bring the counts; the counts are
    checked against the device's."""
    log = EventLog()
    slots: Any = SLOTS | {"max_num_batched_tokens": 8, "transfer": transfer}  # so that the later prompt comes in chunks
    made = []
    with Engine(MODEL, device="cpu", observer=log, num_blocks=24, fused_prepare=True, **slots) as engine:
        runner = engine.worker.runner
        for length in (14, 9):
            engine.submit([1] * 3, SamplingParams(max_tokens=length, ignore_eos=True))
        for number in range(40):
            if number == 17:
                engine.submit([1] * 30, SamplingParams(max_tokens=4, ignore_eos=True))
            if not engine.has_work():
                break
            log.clear()
            engine.step()
            names = [mark.name for mark in log.marks if mark.kind == "kernel"]
            copies = [mark.reads[0] for mark in log.marks if mark.kind == "d2h"]
            counted = names.count("num_sampled_without_drafts")
            assert len([name for name in names if name.startswith("num_sampled")]) == counted
            made.append((counted, len([name for name in copies if name[0] == "n"])))
            if "post_update" in names:
                count = runner.batch.num_reqs
                _, num_sampled = runner.outputs.latest()
                host, states = runner.batch.host, runner.req_states
                unfinished = [
                    length < states.prefill_len.np[row]
                    for length, row in zip(host.seq_lens_upper_bound, host.rows, strict=True)
                ]
                assert host.all_sample == (not any(unfinished))
                assert engine.rt.read(num_sampled)[:count].tolist() == [int(not one) for one in unfinished]
                assert engine.rt.read(runner.num_rejected)[:count].tolist() == [0] * count
    return made


@pytest.mark.parametrize("transfer", ["uva_pool", "barrier"])
def test_plain_decodes_are_counted_once_a_slot(transfer: str) -> None:
    made = counting(transfer)
    launched = [number for number, (launches, _) in enumerate(made) if launches]
    assert all(launches == copies for launches, copies in made)
    assert launched[0] == 0  # the prefill
    assert 3 < len(launched) < len(made) / 2
    assert [number for number in launched if 5 <= number < 14] == []


def test_mutant_counts_that_are_thought_to_be_there_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill in chunks leaves a 0 in its slot; here nobody notes that it does."""
    most: dict[int, int] = {}

    def note(slot: OutputSlot, num_ones: int) -> None:
        most[id(slot)] = max(num_ones, most.get(id(slot), 0))

    monkeypatch.setattr(OutputSlot, "num_ones", property(lambda slot: most.get(id(slot), 0), note))
    rejected = property(lambda runner: 99, lambda runner, rows: None)
    monkeypatch.setattr(ModelRunner, "_none_rejected", rejected, raising=False)
    with pytest.raises((AssertionError, RuntimeError)):
        counting("uva_pool")


def check_dummy_runs(num_tokens: int, steps_between: int = 99) -> None:
    """A dummy run sends rows of nobody; the next step must send its own again, although they are the last step's."""
    tokens = []
    for dummies in (0, 1, 2):
        slots: Any = SLOTS
        with Engine(MODEL, device="cpu", num_blocks=24, fused_prepare=True, **slots) as engine:
            for number in range(40):
                if number in (0, 1, steps_between, 2 * steps_between):
                    engine.submit([number % 7, 3, 4], SamplingParams(max_tokens=9, ignore_eos=True))
                engine.step()
                for _ in range(dummies):
                    engine.worker.runner.dummy_run(num_tokens, 2)
            assert all(output.finished for output in engine.requests.values())
            tokens.append([output.token_ids for output in engine.requests.values()])
    assert tokens[0] == tokens[1] == tokens[2]


def test_dummy_runs_between_decodes() -> None:
    check_dummy_runs(2)


def test_dummy_runs_of_prefills_between_those_of_newcomers() -> None:
    check_dummy_runs(5, 3)


def test_mutant_a_dummy_run_takes_the_slot_of_a_step_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, ModelRunner, "execute_model", "fabricated is None or host.is_plain_decode", "True")
    with pytest.raises((AssertionError, IndexError)):
        check_dummy_runs(5, 3)


def test_mutant_rows_that_are_thought_to_be_there_still(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = InputBuffers.send

    def stale(self: InputBuffers, host: HostBatch, *, fused: bool = False) -> Any:
        before = self._sent
        made = honest(self, host, fused=fused)
        self._sent = before if self._sent is None else self._sent
        return made

    monkeypatch.setattr(InputBuffers, "send", stale)
    with pytest.raises(AssertionError):
        check_dummy_runs(2)


@pytest.mark.parametrize("transfer", ["uva_pool", "pinned_copy", "barrier", "unsafe"])
def test_the_ledger_knows_its_buffers(transfer: str) -> None:
    slots: Any = SLOTS | {"max_num_reqs": 5, "transfer": transfer, "fused_prepare": True}
    with Engine(MODEL, device="cpu", num_blocks=24, **slots) as engine:
        assert [problem for problem in measure(engine).problems if "batch" in problem] == []
        assert any(name.startswith("batch") for name in measure(engine).rows.table)


def test_it_is_mrv2s() -> None:
    with pytest.raises(ValueError, match="fused_prepare is for runner='mrv2'"):
        RunnerConfig(runner="v1", fused_prepare=True)
