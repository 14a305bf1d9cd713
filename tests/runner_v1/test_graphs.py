"""The V1 runner's steps under graphs: padding duties, what is launched, addresses, memory, and what is said of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mrv2lab.config import ModelConfig
from mrv2lab.engine.engine import Engine
from mrv2lab.observer import EventLog
from mrv2lab.protocol import SamplingParams
from mrv2lab.runner_v1 import model_runner, padding
from mrv2lab.runner_v1.graph_dispatcher import Decision, GraphKey
from mrv2lab.runner_v1.graph_stats import V1GraphReport
from mrv2lab.runner_v1.prepare import InputPreparation
from mrv2lab.runtime.cpu import CpuRuntime
from tests.engine.small import MODEL
from tests.recorder.runs import busy_engine, tokens, work
from tests.runner_v1.graphs import OPTIONS, check_tails, engine_of, mode_of
from tests.runner_v1.small import greedy, v1
from tests.runner_v1.test_mutants import mutate
from tests.slow import mostly_slow

each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
POLICIES = ["barrier", "pinned_copy", "uva_pool"]
PLAIN = greedy(30)

# -- padding duties ----------------------------------------------------------------------------------------------------


def eight_then_three(engine: Engine) -> None:
    """A batch of eight, then one of three under the same graph or a smaller one; the tails after each step."""
    ids = [engine.submit([1 + i, 2, 3, 4, 5, 6][: 2 + i % 4], PLAIN) for i in range(8)]
    for _ in range(4):
        engine.step()
    assert mode_of(engine) == "FULL"
    check_tails(engine)
    for req_id in ids[:5]:
        engine.abort(req_id)
    for _ in range(3):
        engine.step()
        assert engine.worker.runner.batch.num_reqs == 3
        assert mode_of(engine) == "FULL"
        check_tails(engine)
    engine.submit([9, 8], PLAIN)
    engine.step()
    assert mode_of(engine) == "PIECEWISE"
    check_tails(engine)


@each_device
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sizes", [(1, 2, 4, 8), (8,)], ids=["their own graphs", "one graph"])
def test_eight_then_three(sizes: tuple[int, ...], policy: str, device: str) -> None:
    with engine_of(device=device, transfer=policy, cudagraph_capture_sizes=sizes) as engine:
        eight_then_three(engine)


def test_eight_then_two_is_what_two_are() -> None:
    """Under one graph of eight, for which nothing of the eight may be left."""
    with engine_of(cudagraph_capture_sizes=(8,)) as engine:
        want = [output.token_ids for output in engine.generate([[1, 2, 3], [4, 5]], greedy(12))]
    with engine_of(cudagraph_capture_sizes=(8,)) as engine:
        engine.generate([[10 + i, 2, 3] for i in range(8)], greedy(12))
        assert [output.token_ids for output in engine.generate([[1, 2, 3], [4, 5]], greedy(12))] == want


def _keep(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A mutant: behind the batch, buffer ``name`` keeps what it held."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        compute = InputPreparation._compute_positions

        def mutant(self: InputPreparation, count: int, total: int) -> None:
            used = total if name == "slot_mappings" else count
            tail = self.rt.raw(getattr(self, name))[..., used:]
            self.rt.synchronize()
            before = tail.clone()
            compute(self, count, total)
            self.rt.synchronize()
            tail.copy_(before)

        monkeypatch.setattr(InputPreparation, "_compute_positions", mutant)

    return patch


def _lines(*mutant: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: mutate(monkeypatch, *mutant)


DUTIES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "slot_mapping": _keep("slot_mappings"),
    "seq_lens": _keep("seq_lens"),
    "query_start_loc": _lines(InputPreparation, "_fill", "starts[count + 1 :] = total", "pass"),
    "block rows": _lines(padding, "_pad_tails", "table[count:reqs].fill_(NULL_BLOCK)", "pass"),
    "positions": _lines(padding, "_pad_tails", "positions[total:tokens].zero_()", "pass"),
}


@pytest.mark.parametrize("duty", DUTIES)
def test_a_duty_that_is_forgotten_is_found(duty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    DUTIES[duty](monkeypatch)
    with engine_of() as engine, pytest.raises(AssertionError, match=duty):
        eight_then_three(engine)


def test_what_stale_slots_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM #36580: the padding of three decodes writes over blocks that have a new owner by then."""

    def texts() -> list[list[int]]:
        with engine_of(cudagraph_capture_sizes=(8,), num_blocks=33, enable_prefix_caching=False) as engine:
            ids = [engine.submit([1 + i, 2, 3], greedy(4 if i > 2 else 30)) for i in range(8)]
            ids += [engine.submit([20 + i] * 20, greedy(9)) for i in range(3)]
            while engine.has_work():
                engine.step()
            return [engine.output(req_id).token_ids for req_id in ids]

    wanted = texts()
    DUTIES["slot_mapping"](monkeypatch)
    assert texts() != wanted


def test_attention_sees_five_tokens_under_pieces_of_eight() -> None:
    with engine_of() as engine:
        engine.submit([1, 2, 3], PLAIN)
        engine.submit([4, 5], PLAIN)
        runner, seen = engine.worker.runner, []
        build = runner.inputs_builder.build
        runner.inputs_builder.build = lambda *args: seen.append(build(*args)) or seen[-1]
        engine.step()
        (inputs,) = seen
        assert mode_of(engine) == "PIECEWISE"
        meta = inputs.attn_metadata[0]
        assert len(inputs.input_ids) == len(inputs.positions) == len(meta.slot_mapping) == 8
        assert engine.rt.read(meta.query_start_loc).tolist() == [0, 3, 5]
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
        launched = [mark.name for mark in log.marks if mark.kind == "replay" or mark.name.startswith("layer.")]
        assert launched == ["v1.piecewise.4.0", "layer.0.attention", "v1.piecewise.4.1"]
        log.clear()
        engine.step()
        assert [mark.name for mark in log.marks if mark.kind == "replay"] == ["v1.full.1"]
        assert not [mark for mark in log.marks if mark.kind == "run" and mark.name.startswith(("layer.", "embed"))]
        assert not [mark for mark in log.marks if mark.name == "v1.pad_tails"], "there is nothing to pad"
        assert ("graph_tokens", 1) in log.gauges


def test_without_graphs_nothing_is_said_of_them() -> None:
    log = EventLog()
    with v1(observer=log) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
        assert "graph_tokens" not in dict(log.gauges)
        assert engine.worker.runner.model is engine.worker.decoder
        assert str(engine.graph_report()).startswith("no graphs\n")


@each_device
@pytest.mark.parametrize("policy", POLICIES)
def test_addresses_stay_and_the_steady_state_allocates_nothing(policy: str, device: str) -> None:
    with engine_of(transfer=policy, device=device) as engine:
        for i in range(5):
            engine.submit([1 + i, 2, 3], PLAIN)
        for _ in range(6):
            engine.step()
        before, allocated = _buffers(engine), torch.cuda.memory_allocated() if device == "cuda" else 0
        for _ in range(12):
            engine.step()
        assert _buffers(engine) == before
        assert device != "cuda" or torch.cuda.memory_allocated() == allocated


def _buffers(engine: Engine) -> list[str]:
    engine.rt.synchronize()
    return sorted(buffer.name for buffer in engine.rt.registry.buffers() if not buffer.name.endswith(".tmp"))


def test_a_block_table_that_takes_turns_in_a_pool_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full graph would read one of the slots for ever."""
    mutate(monkeypatch, model_runner.ModelRunnerV1, "_make_table", 'name.startswith("block_table")', "False")
    with engine_of(transfer="uva_pool") as engine, pytest.raises(RuntimeError, match="have moved since its capture"):
        engine.generate([[1, 2, 3]], PLAIN)


@each_device
def test_a_step_has_no_implicit_sync(device: str) -> None:
    with engine_of(device=device) as engine:
        for i in range(3):
            engine.submit([1 + i, 2, 3], PLAIN)
        for _ in range(8):
            engine.step()
        with engine.rt.watch_syncs() as seen:
            for _ in range(10):
                engine.step()
        assert seen == []


# -- kernels and KV-cache groups ---------------------------------------------------------------------------------------

SLIDING = dataclasses.replace(
    MODEL, num_hidden_layers=2, sliding_window=5, layer_types=("full_attention", "sliding_attention")
)
GROUPS: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "kernels": (MODEL, {"kernels": "interpret"}),
    "two groups": (SLIDING, {"block_size": 4}),
}


@pytest.mark.parametrize("mode", mostly_slow(["full_and_piecewise", "full", "piecewise", "full_decode_only"], 1))
@pytest.mark.parametrize("kind", [pytest.param("kernels", marks=pytest.mark.slow), "two groups"])
def test_text_is_what_it_is_without_graphs(kind: str, mode: str) -> None:
    model, more = GROUPS[kind]
    prompts = [[1 + i, 2, 3, 4, 5, 6, 7, 8, 9][: 2 + i] for i in range(5)]

    def texts(**options: Any) -> list[list[int]]:
        limits = {"max_num_reqs": 3, "max_model_len": 48, "num_blocks": 64, "device": "cpu", "runner": "v1"}
        with Engine(model, **OPTIONS | limits | more | options) as engine:
            return [output.token_ids for output in engine.generate(prompts, greedy(8))]

    assert texts(cudagraph_mode=mode) == texts(cudagraph_mode="none")


# -- the wrapper -------------------------------------------------------------------------------------------------------


def test_a_key_without_a_graph_is_an_error_once_capturing_is_over() -> None:
    with engine_of() as engine:
        runner = engine.worker.runner
        for decision in (
            Decision("FULL", GraphKey(3, 3, True), ""),
            Decision("PIECEWISE", GraphKey(3, None, False), ""),
        ):
            with pytest.raises(RuntimeError, match=f"no {decision.mode} graph was captured for"):
                runner.dummies.run(3, 3, decision=decision)
        assert runner.graphs.context.key is None, "the context is left behind"
        engine.generate([[1, 2, 3]], greedy(3))


def test_a_first_use_is_a_use() -> None:
    """Graphs that steps capture as they meet their keys give the same text: nothing of a first use is lost."""
    prompts = [[1, 2, 3], [4, 5]]
    with engine_of() as engine:
        want = [output.token_ids for output in engine.generate(prompts, PLAIN)]
    with engine_of() as engine:
        graphs = engine.worker.runner.graphs
        graphs.reset()
        graphs.dispatcher.enable()
        graphs.wrapper.capturing = True
        assert [output.token_ids for output in engine.generate(prompts, PLAIN)] == want
        assert set(graphs.wrapper._whole) == {(2, 2, True)} and set(graphs.wrapper._pieces) == {(8, None, False)}


def test_other_segments_than_at_capture_are_an_error() -> None:
    with engine_of() as engine:
        runner = engine.worker.runner
        pieces = runner.graphs.wrapper._pieces[GraphKey(4, None, False)]
        with pieces, pytest.raises(RuntimeError, match="segment 'logits' was not there at capture"):
            runner.rt.run("logits")


# -- memory, statistics, recordings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 2000])
def test_out_of_memory_at_capture_leaves_steps_to_the_next_key(limit: int) -> None:
    with engine_of() as engine:
        want = [output.token_ids for output in engine.generate([[1, 2, 3], [4, 5]], PLAIN)]
        rt, runner = engine.rt, engine.worker.runner
        assert isinstance(rt, CpuRuntime)
        rt.graph_limit = limit
        with torch.inference_mode(), pytest.warns(UserWarning, match="keys have no graph"):
            report = runner.warm_up_and_capture(progress=False)
        assert report.dropped and bool(report.captured) == bool(limit) and report.nbytes <= limit
        assert [output.token_ids for output in engine.generate([[1, 2, 3], [4, 5]], PLAIN)] == want
        report = engine.graph_report()
        assert limit or {row["mode"] for row in report.rows()} == {"NONE"}
        assert "out of memory" in report.rows()[0]["reason"] and "not captured: " in str(report)
        rt.graph_limit = None
        with torch.inference_mode():
            assert not runner.warm_up_and_capture(progress=False).dropped, "a second capture has everything again"


def test_every_step_has_a_reason() -> None:
    graphs = {key: value for key, value in OPTIONS.items() if key.startswith("cudagraph")}
    with busy_engine(runner="v1", progress=False, **graphs) as engine:
        work(engine, 60)
        while engine.has_work():
            engine.step()
        report = engine.graph_report()
        assert isinstance(report, V1GraphReport)
        steps = [one.step for one in report.recent]
        assert steps == sorted(set(steps)) and report.steps == len(steps) > 40
        assert {row["mode"] for row in report.rows()} == {"FULL", "PIECEWISE", "NONE"}
        assert sum(row["padding"] for row in report.rows()) == report.padding > 0
        assert "NONE: " in "".join(report.why(step) for step in steps)
        with pytest.raises(KeyError, match="step 9999 has run no forward; known: "):
            report.why(9999)
        assert "more of padding" in str(report) and "exceed the largest capture size 8" in str(report)


def test_a_report_is_a_value_that_later_steps_leave_alone() -> None:
    with engine_of() as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
        report = engine.graph_report()
        assert (report.steps, report.tokens) == (4, 6)
        engine.generate([[4, 5, 6]], SamplingParams(max_tokens=4))
        assert (report.steps, report.tokens, len(report.recent)) == (4, 6, 4)
        assert engine.graph_report().steps == 8


def test_observers_hear_of_padding_and_change_no_token() -> None:
    graphs = {key: value for key, value in OPTIONS.items() if key.startswith("cudagraph")}
    with busy_engine(runner="v1", progress=False, **graphs) as engine:
        work(engine, 30)
        want = tokens(engine)
    log = EventLog()
    with busy_engine(runner="v1", progress=False, observer=log, **graphs) as engine:
        work(engine, 30)
        assert tokens(engine) == want
    assert {0, 1, 2, 4} <= {value for name, value in log.gauges if name == "graph_tokens"}


def test_graphs_survive_a_reset() -> None:
    with engine_of() as engine:
        want = engine.generate([[1, 2, 3], [4, 5]], PLAIN)[1].token_ids
        engine.submit([1, 2, 3, 4], PLAIN)
        for _ in range(3):
            engine.step()
        engine.reset()
        assert engine.generate([[1, 2, 3], [4, 5]], PLAIN)[1].token_ids == want
        assert mode_of(engine) == "FULL"


def test_sizes_beyond_all_rows_serve_smaller_steps() -> None:
    with engine_of(max_num_reqs=1, cudagraph_capture_sizes=(1, 64)) as engine:
        engine.generate([[1, 2, 3]], greedy(3))
        assert [one.decision.mode for one in engine.worker.runner.graphs.stats.recent] == ["PIECEWISE", "FULL", "FULL"]
