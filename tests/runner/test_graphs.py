"""The MRV2 runner's steps under graphs: what is padded, what is launched, what is said, and that addresses stay."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mrv2lab.engine.engine import Engine
from mrv2lab.engine.graph_report import GraphReport
from mrv2lab.observer import EventLog
from mrv2lab.protocol import SamplingParams
from mrv2lab.recorder.recorder import Recorder
from mrv2lab.runner.model_runner import ModelRunner
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.state import BlockTables, RequestState
from tests.engine.small import MODEL, small_engine
from tests.recorder.runs import busy_engine, tokens, work

GRAPHS: dict[str, Any] = {
    "cudagraph_mode": "full_and_piecewise",
    "cudagraph_capture_sizes": (1, 2, 4, 8),
    "progress": False,
}
PLAIN = SamplingParams(max_tokens=30, ignore_eos=True)
each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


OPTIONS: dict[str, Any] = {"max_num_reqs": 8, "num_blocks": 97, "max_num_batched_tokens": 64} | GRAPHS


def engine_of(**options: Any) -> Engine:
    """Eight rows, sequences of at most 48 tokens, graphs of up to 8 tokens."""
    return small_engine(**OPTIONS | options)


# -- padding -----------------------------------------------------------------------------------------------------------


def tails(engine: Engine) -> None:
    """Behind the latest step's batch nothing is left of an earlier one, up to the shape of its graph and beyond."""
    runner, rt = engine.worker.runner, engine.rt
    batch, descriptor = runner.batch, runner.graphs.stats.recent[-1].decision.descriptor
    assert batch is not None and descriptor is not None and descriptor.mode == "full"
    reqs, count = batch.num_reqs, batch.host.num_tokens
    assert (rt.read(runner.buffers.seq_lens)[reqs:] == 0).all()
    assert (rt.read(runner.buffers.query_start_loc.device)[reqs:] == count).all()
    assert (rt.read(runner.block_tables.slot_mappings)[:, count:] == -1).all()
    for table in runner.block_tables.input_tables:
        assert (rt.read(table)[reqs : descriptor.num_reqs] == 0).all()
    assert (rt.read(runner.buffers.positions) < engine.config.scheduler.max_model_len).all()


def eight_then_three(engine: Engine) -> None:
    """Row 29 of reference/mrv2.md 4.3, over three requests."""
    ids = [engine.submit([1 + i, 2, 3, 4, 5, 6][: 2 + i % 4], PLAIN) for i in range(8)]
    for _ in range(4):
        engine.step()
    tails(engine)
    for req_id in ids[:5]:
        engine.abort(req_id)
    for _ in range(3):
        engine.step()
        assert engine.worker.runner.batch.num_reqs == 3
        sizes = engine.config.graphs.cudagraph_capture_sizes
        assert engine.worker.runner.graphs.stats.recent[-1].decision.padded_reqs == (4 if 4 in (sizes or ()) else 8)
        tails(engine)


@each_device
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("sizes", [(1, 2, 4, 8), (8,)], ids=["their own graphs", "one graph"])
def test_eight_then_three(sizes: tuple[int, ...], fused: bool, device: str) -> None:
    with engine_of(device=device, fused_prepare=fused, cudagraph_capture_sizes=sizes) as engine:
        eight_then_three(engine)


def _unpadded_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = BlockTables.gather

    def mutant(self: BlockTables, idx_mapping: torch.Tensor, num_reqs: int, num_reqs_padded: int) -> Any:
        self._num_dirty_rows = 0
        return gather(self, idx_mapping, num_reqs, num_reqs)

    monkeypatch.setattr(BlockTables, "gather", mutant)


def _stale_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM #36580."""
    compute = BlockTables.compute_slot_mappings

    def mutant(self: BlockTables, *args: Any) -> torch.Tensor:
        before = self.rt.raw(self.slot_mappings).clone()
        self.rt.synchronize()
        before = self.rt.raw(self.slot_mappings).clone()
        slots = compute(self, *args)
        self.rt.synchronize()
        tail = self.rt.raw(slots) < 0
        self.rt.raw(slots)[tail] = before[tail]
        return slots

    monkeypatch.setattr(BlockTables, "compute_slot_mappings", mutant)


def _short_query_start_loc(monkeypatch: pytest.MonkeyPatch) -> None:
    import mrv2lab.runner.model_runner as model_runner

    gather = model_runner.gather_host_batch

    def mutant(state: RequestState, output: Any) -> Any:
        host = gather(state, output)
        starts = host.query_start_loc.copy()
        starts[len(host.req_ids) + 1 :] = 0
        return dataclasses.replace(host, query_start_loc=starts)

    monkeypatch.setattr(model_runner, "gather_host_batch", mutant)


@pytest.mark.parametrize("mutant", [_unpadded_gather, _stale_slots, _short_query_start_loc])
def test_padding_mutants_are_caught(mutant: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of() as engine:
        mutant(monkeypatch)
        with pytest.raises(AssertionError):
            eight_then_three(engine)


def test_attention_sees_five_tokens_under_pieces_of_eight() -> None:
    """Row 24 of reference/mrv2.md 4.3 (vLLM #36626)."""
    with engine_of() as engine:
        engine.submit([1, 2, 3], PLAIN)
        engine.submit([4, 5], PLAIN)
        engine.step()
        runner: ModelRunner = engine.worker.runner
        inputs = runner.forward_inputs
        assert inputs is not None
        assert runner.graphs.stats.recent[-1].decision.mode == "piecewise"
        meta = inputs.attn_metadata[0]
        assert len(inputs.input_ids) == len(inputs.positions) == len(meta.slot_mapping) == 8
        assert engine.rt.read(meta.query_start_loc).tolist() == [0, 2, 5]
        assert len(meta.seq_lens) == len(meta.block_table) == 2 and meta.max_query_len == 3
        assert engine.rt.read(meta.slot_mapping)[5:].tolist() == [-1, -1, -1]


# -- launches ----------------------------------------------------------------------------------------------------------


@each_device
def test_a_decode_is_one_replay_and_a_chunk_is_pieces_around_attention(device: str) -> None:
    log = EventLog()
    with engine_of(device=device, observer=log) as engine:
        engine.submit([1, 2, 3], PLAIN)
        log.clear()
        engine.step()
        pieces = [mark.name for mark in log.marks if mark.kind == "replay"]
        assert len(pieces) == 2 and [m.name for m in log.marks if m.name.startswith("layer.")] == ["layer.0.attention"]
        log.clear()
        engine.step()
        assert [mark.name for mark in log.marks if mark.kind == "replay"] == ["full.1.1"]
        assert not [mark for mark in log.marks if mark.kind == "run" and mark.name.startswith(("layer.", "embed"))]
        assert ("graph_tokens", 1) in log.gauges


def test_without_graphs_nothing_is_said_of_them() -> None:
    log = EventLog()
    with small_engine(observer=log) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
        assert "graph_tokens" not in dict(log.gauges)
        assert str(engine.graph_report()).startswith("no graphs\n")


@each_device
@pytest.mark.parametrize("transfer", ["barrier", "pinned_copy", "uva_pool"])
def test_addresses_stay_and_the_steady_state_allocates_nothing(transfer: str, device: str) -> None:
    with engine_of(transfer=transfer, device=device) as engine:
        for i in range(5):
            engine.submit([1 + i, 2, 3], PLAIN)
        for _ in range(6):
            engine.step()
        before, allocated = _buffers(engine), torch.cuda.memory_allocated() if device == "cuda" else 0
        for _ in range(12):
            engine.step()
        assert _buffers(engine) == before
        assert device != "cuda" or torch.cuda.memory_allocated() == allocated
        assert engine.worker.runner.graphs.audit() == []


def _buffers(engine: Engine) -> list[str]:
    engine.rt.synchronize()
    return sorted(buffer.name for buffer in engine.rt.registry.buffers() if not buffer.name.endswith(".tmp"))


def test_a_buffer_that_moved_is_found_by_the_audit() -> None:
    with engine_of() as engine:
        buffers, rt = engine.worker.runner.buffers, engine.rt
        buffers.seq_lens = rt.zeros(8, torch.int32, name="seq_lens")
        assert any("seq_lens" in line for line in engine.worker.runner.graphs.audit())


# -- statistics --------------------------------------------------------------------------------------------------------


def test_every_step_has_a_reason() -> None:
    with busy_engine(**GRAPHS) as engine:
        work(engine, 60)
        while engine.has_work():
            engine.step()
        report = engine.graph_report()
        assert isinstance(report, GraphReport)
        steps = [one.step for one in report.recent]
        assert steps == sorted(set(steps)) and report.steps == len(steps) > 40
        assert {row["mode"] for row in report.rows()} == {"full", "piecewise", "eager"}
        assert sum(row["padding"] for row in report.rows()) == report.padding > 0
        assert "eager: " in "".join(report.why(step) for step in steps)
        with pytest.raises(KeyError, match="step 9999 has run no forward; known: "):
            report.why(9999)
        text = str(report)
        assert "shapes in" in text and "more of padding" in text and "exceed the largest capture size 8" in text


@pytest.mark.parametrize("runner", ["mrv2", "v1"])
def test_a_reset_begins_the_report_anew(runner: str) -> None:
    """Step numbers begin anew, so what is known of the old ones would answer for the new."""
    with engine_of(runner=runner) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
        assert engine.graph_report().steps == 4
        engine.reset()
        assert engine.graph_report().steps == 0
        with pytest.raises(KeyError, match="step 0 has run no forward; no step has yet"):
            engine.graph_report().why(0)
        engine.generate([[1, 2]], SamplingParams(max_tokens=2, ignore_eos=True))
        report = engine.graph_report()
        assert report.steps == 2 and "2 steps with a forward, 3 tokens" in str(report)
        with pytest.raises(KeyError, match=r"step 3 has run no forward; known: 0\.\.1"):
            report.why(3)


@pytest.mark.parametrize("runner", ["mrv2", "v1"])
def test_the_warning_names_the_line_that_makes_the_engine(runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    init = CpuRuntime.__init__

    def small(rt: CpuRuntime, **options: Any) -> None:
        init(rt, **options)
        rt.graph_limit = 0

    monkeypatch.setattr(CpuRuntime, "__init__", small)
    with pytest.warns(UserWarning, match=r"by fewer num_blocks \(97\)") as caught:
        Engine(MODEL, device="cpu", max_model_len=48, **OPTIONS | {"runner": runner}).close()
    assert [warning.filename for warning in caught] == [__file__]


def test_out_of_memory_at_capture_leaves_steps_eager_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of() as engine:
        wanted = [o.token_ids for o in engine.generate([[1, 2, 3], [4, 5]], PLAIN)]
        rt, runner = engine.rt, engine.worker.runner
        assert isinstance(rt, CpuRuntime)
        rt.graph_limit = 0
        with torch.inference_mode(), pytest.warns(UserWarning, match="shapes have no graph"):
            engine.worker.capture_report = runner.warm_up_and_capture(progress=False)
        runner.graphs.stats.reset()
        assert [o.token_ids for o in engine.generate([[1, 2, 3], [4, 5]], PLAIN)] == wanted
        report = engine.graph_report()
        assert {row["mode"] for row in report.rows()} == {"eager"}
        assert "out of memory" in report.rows()[0]["reason"] and "not captured: " in str(report)


# -- recordings and resets ---------------------------------------------------------------------------------------------


def test_a_recording_says_which_steps_were_padded_and_changes_no_token() -> None:
    with busy_engine(**GRAPHS) as engine:
        work(engine, 30)
        wanted = tokens(engine)
    with busy_engine(**GRAPHS) as engine, Recorder(engine) as recorder:
        work(engine, 30)
        assert tokens(engine) == wanted
    assert recorder.recording is not None
    padded = [step.gauges.get("graph_tokens") for step in recorder.recording.steps]
    assert {0, 1, 2, 4} <= set(padded)


def test_graphs_survive_a_reset() -> None:
    with engine_of() as engine:
        wanted = engine.generate([[1, 2, 3], [4, 5]], PLAIN)[1].token_ids
        engine.submit([1, 2, 3, 4], PLAIN)
        for _ in range(3):
            engine.step()
        engine.reset()
        assert engine.generate([[1, 2, 3], [4, 5]], PLAIN)[1].token_ids == wanted
        assert engine.worker.runner.graphs.is_captured


@pytest.mark.parametrize("mode", ["full", "full_decode_only", "piecewise", "full_and_piecewise"])
def test_replay_off_is_the_padded_shape_eagerly(mode: str) -> None:
    """Over two KV-cache groups, one of them sliding."""
    rng = np.random.default_rng(0)
    windows: Any = {"sliding_window": 7, "layer_types": ("full_attention", "sliding_attention")}
    model = dataclasses.replace(MODEL, num_hidden_layers=2, **windows)
    prompts = [rng.integers(0, 61, int(n)).tolist() for n in rng.integers(1, 9, 6)]

    def made(replay: bool) -> list[list[int]]:
        sizes: Any = {"max_num_reqs": 8, "num_blocks": 97, "block_size": 4, "max_model_len": 48}
        graphs: Any = GRAPHS | {"cudagraph_mode": mode}
        with Engine(model, device="cpu", **sizes, **graphs) as engine:
            engine.worker.runner.forward_pass.replay = replay
            return [output.token_ids for output in engine.generate(prompts, PLAIN)]

    assert made(True) == made(False)


def test_a_size_beyond_what_all_rows_can_hold_is_captured_and_serves_smaller_steps() -> None:
    with engine_of(max_num_reqs=2, max_model_len=6, cudagraph_capture_sizes=(4, 16)) as engine:
        assert len(engine.generate([[1, 2, 3, 4, 5]], SamplingParams(max_tokens=1))[0].token_ids) == 1
        assert engine.worker.runner.graphs.stats.recent[0].decision.padded_tokens == 16
