"""Capture, replay, memory and the audit, on software streams and on a GPU."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch

from mrv2lab.config import CacheConfig
from mrv2lab.graphs import BatchDescriptor, CudaGraphManager
from mrv2lab.graphs.manager import NOT_CAPTURED
from mrv2lab.graphs.out_of_memory import remedy
from mrv2lab.runtime.base import DeviceError, Runtime
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.runtime.effects import GraphMemoryError
from tests.graphs.toy import LAYERS, Toy, captured, expected, table
from tests.runtime.machines import device, marks, seen

FULL_8 = BatchDescriptor("full", 8, 8, 1)
FULL_4 = BatchDescriptor("full", 4, 4, 1)
FULL_2 = BatchDescriptor("full", 2, 2, 1)
PIECES_4 = BatchDescriptor("piecewise", 4, None, None)
PIECES_8 = BatchDescriptor("piecewise", 8, None, None)


def _step(toy: Toy, manager: CudaGraphManager, ids: list[int], lens: list[int], queries: list[int]) -> torch.Tensor:
    """One step as a runner does it; the view of the real tokens."""
    toy.write(ids, lens, queries)
    descriptor = manager.dispatch(len(lens), len(ids), max(queries)).descriptor
    if descriptor is None:
        toy.forward(len(ids), len(lens))
    elif descriptor.mode == "full":
        manager.replay(descriptor)
    else:
        with manager.piecewise(descriptor):
            toy.forward(descriptor.num_tokens, len(lens))
    return toy.hidden[: len(ids)]


# -- a step ------------------------------------------------------------------------------------------------------------


def test_full_and_piecewise_steps_equal_what_they_should(rt: Runtime) -> None:
    toy = Toy(rt)
    manager = captured(toy, table())
    for ids, lens, queries in (
        ([3, 1, 4, 1, 5, 9, 2, 6], [10, 20, 30, 40, 50, 60, 70, 80], [1] * 8),
        ([7, 7], [5, 6], [1, 1]),
        ([1, 2, 3, 4, 5], [9, 3], [2, 3]),
        ([1, 2, 3], [4, 5, 6], [1, 1, 1]),
        (list(range(8)), [8], [8]),
    ):
        assert seen(rt, _step(toy, manager, ids, lens, queries)) == expected(ids, lens, queries)


def test_a_full_graph_is_one_launch_and_pieces_are_one_more_than_attentions(rt: Runtime) -> None:
    toy = Toy(rt)
    manager = captured(toy, table())
    rt.synchronize()

    def launches() -> list[str]:
        return [f"{mark.kind} {mark.name}" for mark in marks(rt, "run", "replay")]

    before = len(launches())
    _step(toy, manager, [1, 2, 3], [1, 2, 3], [1, 1, 1])
    assert launches()[before:] == ["replay full.4.4"]
    _step(toy, manager, [1, 2, 3], [3], [3])
    assert launches()[before + 1 :] == [
        "replay piecewise.4.0",
        "run layer.0.attention",
        "replay piecewise.4.1",
        "run layer.1.attention",
        "replay piecewise.4.2",
    ]


def test_attention_sees_the_tokens_there_are_under_pieces(rt: Runtime) -> None:
    """vLLM #36626: 5 tokens under 8-token pieces."""
    toy = Toy(rt)
    manager = captured(toy, table())
    _step(toy, manager, [1, 2, 3, 4, 5], [9, 3], [2, 3])
    assert seen(rt, toy.seen) == [LAYERS] * 5 + [0] * 3


def test_eight_then_two_under_one_graph(rt: Runtime) -> None:
    toy = Toy(rt)
    manager = captured(toy, table(sizes=(8,)))
    _step(toy, manager, list(range(8)), [9] * 8, [1] * 8)
    before = seen(rt, toy.seen)
    hidden = _step(toy, manager, [7, 7], [5, 6], [1, 1])
    assert seen(rt, hidden) == expected([7, 7], [5, 6], [1, 1])
    assert [after - one for after, one in zip(seen(rt, toy.seen), before, strict=True)] == [LAYERS] * 2 + [0] * 6


def test_before_the_capture_every_step_is_eager(cpu: CpuRuntime) -> None:
    manager = CudaGraphManager(cpu, table())
    assert manager.dispatch(1, 1, 1) is NOT_CAPTURED
    assert NOT_CAPTURED.reason == "graphs are not captured yet"
    assert CudaGraphManager(cpu, table("none")).dispatch(1, 1, 1).reason == "cudagraph_mode is 'none'"


def test_what_was_not_captured_cannot_be_replayed(cpu: CpuRuntime) -> None:
    manager = captured(Toy(cpu), table("full_decode_only"))
    with pytest.raises(KeyError):
        manager.replay(BatchDescriptor("full", 3, 3, 1))
    with pytest.raises(KeyError):
        manager.piecewise(PIECES_8)


# -- capture -----------------------------------------------------------------------------------------------------------


def test_capture_goes_largest_first_and_pieces_before_full(rt: Runtime) -> None:
    toy, order = Toy(rt), []

    def prepare(descriptor: BatchDescriptor) -> object:
        order.append(descriptor)
        return toy.prepare(descriptor)

    made = table(sizes=(2, 8))
    report = CudaGraphManager(rt, made).capture(prepare, progress=False)  # type: ignore[arg-type]
    assert [one.descriptor for one in report.captured] == list(made.candidates())
    # Warm-up, then fresh inputs; where nothing compiles, the smallest of a kind is warmed up for all.
    warm = [rt.device.type == "cuda" or one.num_tokens == 2 for one in made.candidates()]
    assert order == [one for one, twice in zip(made.candidates(), warm, strict=True) for _ in range(1 + twice)]
    assert [(one.graphs, one.launches) for one in report.captured] == [(3, 6), (3, 6), (1, 8), (1, 8)]
    assert report.seconds > 0 and report.nbytes >= 0
    assert str(report).splitlines()[1].startswith("  piecewise: 2, 8 tokens; 6 graphs, 12 launches, ")


def test_a_capture_draws_a_bar_if_asked(cpu: CpuRuntime, capfd: pytest.CaptureFixture[str]) -> None:
    toy = Toy(cpu)
    CudaGraphManager(cpu, table()).capture(toy.prepare)
    assert "graphs: 100%" in capfd.readouterr().err
    CudaGraphManager(cpu, table()).capture(toy.prepare, progress=False)
    assert capfd.readouterr().err == ""


def test_an_error_in_a_capture_leaves_no_graphs_and_a_usable_runtime(rt: Runtime) -> None:
    toy = Toy(rt)
    calls = []

    def prepare(descriptor: BatchDescriptor) -> object:
        forward = toy.prepare(descriptor)
        calls.append(descriptor)
        if len(calls) < 6:
            return forward

        def broken() -> None:
            forward()
            raise ArithmeticError("boom")

        return broken

    manager = CudaGraphManager(rt, table())
    with pytest.raises(ArithmeticError, match="boom"):
        manager.capture(prepare, progress=False)  # type: ignore[arg-type]
    assert not manager.is_captured and not manager.captured
    assert rt.segments is None and rt.capturing is None and gc.isenabled()
    manager.capture(toy.prepare, progress=False)
    assert seen(rt, _step(toy, manager, [1, 2], [3, 4], [1, 1])) == expected([1, 2], [3, 4], [1, 1])


def test_a_segment_that_fails_in_the_warm_up_is_named(soft: Runtime) -> None:
    toy = Toy(soft)

    def prepare(descriptor: BatchDescriptor) -> object:
        return lambda: soft.run("boom", toy.hidden, writes=(toy.hidden,))

    with pytest.raises(DeviceError, match="'boom'"):
        CudaGraphManager(soft, table()).capture(prepare, progress=False)  # type: ignore[arg-type]


def test_graphs_can_be_captured_again(rt: Runtime) -> None:
    toy = Toy(rt)
    manager = captured(toy, table())
    manager.reset()
    assert manager.dispatch(2, 2, 1) is NOT_CAPTURED
    manager.capture(toy.prepare, progress=False)
    assert seen(rt, _step(toy, manager, [1, 2], [3, 4], [1, 1])) == expected([1, 2], [3, 4], [1, 1])


# -- memory ------------------------------------------------------------------------------------------------------------


def test_tapes_hold_what_their_records_take(cpu: CpuRuntime) -> None:
    toy = Toy(cpu)
    manager = captured(toy, table())
    held = sum(tape.held for tape in cpu.tapes)
    assert manager.report().nbytes == held > 0
    manager.reset()
    assert sum(tape.held for tape in cpu.tapes) == 0 == manager.report().nbytes


def _sizes(cpu: CpuRuntime, toy: Toy) -> dict[BatchDescriptor, int]:
    manager = captured(toy, table())
    sizes = {one: manager.captured[one].nbytes for one in manager.captured}
    manager.reset()
    return sizes


def test_out_of_memory_leaves_that_size_and_larger_ones_eager(cpu: CpuRuntime) -> None:
    toy = Toy(cpu)
    sizes = _sizes(cpu, toy)
    # room for every piece and one full graph, not for a second one
    cpu.graph_limit = sum(size for one, size in sizes.items() if one.mode == "piecewise") + int(1.5 * sizes[FULL_8])
    manager = CudaGraphManager(cpu, table())
    manager.remedy = "Buy memory"
    with pytest.warns(UserWarning, match="have no graph") as caught:
        manager.capture(toy.prepare, progress=False)
    (warning,) = caught
    assert warning.filename == __file__, "the caller's line, not one of ours"
    text = str(warning.message)
    assert text.startswith("2 of 6 shapes have no graph, so their steps take another one or run eagerly: full, plain ")
    assert "plain decodes: 4, 8 tokens (out of memory: graph 'full.4.4': " in text and "). Buy memory; " in text
    assert FULL_2 in manager.captured and FULL_4 not in manager.captured and FULL_8 not in manager.captured
    assert manager.dispatch(2, 2, 1).descriptor == FULL_2
    decision = manager.dispatch(3, 3, 1)
    assert decision.descriptor == PIECES_4
    assert "full graph of 4 tokens, 4 requests could not be captured: out of memory" in decision.reason
    assert "given up when 4 tokens ran out of memory" in manager.dispatch(8, 8, 1).reason
    assert "not captured: full, plain decodes: 4, 8 tokens (out of memory: graph" in str(manager.report())
    assert seen(cpu, _step(toy, manager, [1, 2, 3], [3, 4, 5], [1] * 3)) == expected([1, 2, 3], [3, 4, 5], [1] * 3)
    cpu.graph_limit = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager.capture(toy.prepare, progress=False)
    assert FULL_8 in manager.captured


def test_without_any_memory_every_step_is_eager(cpu: CpuRuntime) -> None:
    toy = Toy(cpu)
    cpu.graph_limit = 0
    with pytest.warns(UserWarning, match="6 of 6 shapes have no graph"):
        manager = captured(toy, table())
    decision = manager.dispatch(2, 2, 1)
    assert decision.descriptor is None
    assert "could not be captured: out of memory: graph 'full.2.2'" in decision.reason
    assert cpu.segments is None
    assert seen(cpu, _step(toy, manager, [1, 2], [3, 4], [1, 1])) == expected([1, 2], [3, 4], [1, 1])


def test_pieces_that_ran_out_of_memory_half_way_hold_nothing(cpu: CpuRuntime) -> None:
    toy = Toy(cpu)
    sizes = _sizes(cpu, toy)
    cpu.graph_limit = sizes[PIECES_8] - 1
    manager = CudaGraphManager(cpu, table("piecewise", (8,)))
    with pytest.warns(UserWarning, match=r"graph 'piecewise\.8\.2': out of memory"):
        manager.capture(toy.prepare, progress=False)
    assert sum(tape.held for tape in cpu.tapes) == 0


def test_the_warning_stays_short_and_names_a_size_of_one_token(cpu: CpuRuntime) -> None:
    toy = Toy(cpu, 32)
    cpu.graph_limit = 0
    with pytest.warns(UserWarning, match=r"64 of 64 shapes") as caught:
        manager = captured(toy, table("full", tuple(range(1, 33)), reqs=64))
    assert "full, any lengths: 1, 2, 3, 4, ..., 29, 30, 31, 32 tokens (32 sizes) (out of memory: " in str(
        caught[0].message
    )
    assert len(str(caught[0].message)) < 600 and len(str(manager.report()).splitlines()) == 3
    assert len(manager.report().dropped) == 64
    with pytest.warns(UserWarning, match=r"piecewise: 1 token \(out of memory"):
        captured(toy, table("piecewise", (1,)))
    manager._drop(BatchDescriptor("full", 1, 1, 1), "why")
    assert manager.table.dropped[BatchDescriptor("full", 2, 2, 1)] == "given up when 1 token ran out of memory"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_blocks": 1024}, "by fewer num_blocks (1,024)"),
        ({"num_blocks": None, "gpu_memory_utilization": 0.8}, "by a lower gpu_memory_utilization (0.8)"),
    ],
)
def test_the_remedy_is_the_option_that_sized_the_kv_cache(options: dict[str, Any], words: str) -> None:
    assert remedy(CacheConfig(**options)).endswith(words)


def test_a_report_has_a_line_for_each_kind(cpu: CpuRuntime) -> None:
    """Under "full" a size may have a graph of any lengths, one of plain decodes, or both."""
    toy = Toy(cpu, 64)
    lines = str(captured(toy, table("full", (1, 2, 4, 64), reqs=8)).report()).splitlines()
    assert lines[0].startswith("8 shapes in ")
    assert lines[1].startswith("  full, any lengths: 1, 2, 4, 64 tokens; 4 graphs, 32 launches, ")
    assert lines[2].startswith("  full, plain decodes: 1, 2, 4, 8 tokens; 4 graphs, 32 launches, ")
    only = captured(toy, table("piecewise", (1,))).report()
    assert "\n  piecewise: 1 token; 3 graphs, " in str(only) and str(only).startswith("1 shape in ")


@pytest.mark.gpu
def test_out_of_memory_in_a_real_capture() -> None:
    from mrv2lab.runtime.cuda import CudaRuntime

    rt = CudaRuntime()
    there, graph = rt.zeros(1, torch.int32, name="there"), rt.graph("g")
    rt.register("hog", lambda dst: dst.add_(torch.empty(1 << 45, dtype=torch.uint8, device=dst.device)[0]))
    rt.register("add", lambda dst, value: dst.add_(value))
    rt.run("add", there, 1)
    rt.synchronize()
    with pytest.raises(GraphMemoryError, match=r"'g'.*out of memory"), graph.capture():
        rt.run("hog", there)
    with graph.capture():
        rt.run("add", there, 10)
    graph.replay()
    assert seen(rt, there) == [11]


@pytest.mark.gpu
def test_products_can_be_captured_again_when_every_graph_is_gone() -> None:
    """cuBLAS's workspace of the capture stream lives in the graphs' pool and outlives them."""
    from mrv2lab.runtime.cuda import CudaRuntime

    rt = CudaRuntime()
    a, out = (rt.zeros((64, 64), torch.float32, name=name) for name in ("a", "out"))
    rt.register("fill", lambda dst, value: dst.fill_(value))
    rt.register("product", lambda dst, src: torch.mm(src, src, out=dst))
    rt.run("product", out, a)
    for value in (1, 2, 3):
        graph = rt.graph("g")
        rt.trim()
        with graph.capture():
            rt.run("product", out, a)
        rt.run("fill", a, value)
        graph.replay()
        assert seen(rt, out[0, :2]) == [64 * value**2] * 2
        graph.reset()


# -- the audit ---------------------------------------------------------------------------------------------------------


def test_a_replay_names_the_buffers_it_reads_and_writes(rt: Runtime) -> None:
    toy = Toy(rt)
    manager = captured(toy, table())
    _step(toy, manager, [1, 2, 3], [1, 2, 3], [1, 1, 1])
    mark = marks(rt, "replay")[-1]
    assert set(mark.reads) == {"ids", "hidden", "seq_lens", "query_start_loc", "out"}
    assert set(mark.writes) == {"hidden", "out", "seen"}
    assert mark.nbytes > 0
    _step(toy, manager, [1, 2, 3], [3], [3])
    first = marks(rt, "replay")[-3]
    assert (first.name, first.reads, first.writes) == ("piecewise.4.0", ("ids", "hidden"), ("hidden",))


def test_the_audit_passes_while_buffers_stay(rt: Runtime) -> None:
    toy = Toy(rt)
    manager = captured(toy, table())
    for _ in range(3):
        _step(toy, manager, [1, 2, 3], [1, 2, 3], [1, 1, 1])
    assert manager.audit() == []


def test_the_audit_finds_a_buffer_that_moved(rt: Runtime) -> None:
    """The mutant: a runner that allocates its sequence lengths anew. The graphs go on reading the old ones."""
    toy = Toy(rt)
    manager = captured(toy, table())
    good = seen(rt, _step(toy, manager, [1, 2], [3, 4], [1, 1]))
    keep = toy.seq_lens
    toy.seq_lens = rt.zeros(8, torch.int32, name="seq_lens")
    assert seen(rt, _step(toy, manager, [1, 2], [30, 40], [1, 1])) == good != expected([1, 2], [30, 40], [1, 1])
    found = manager.audit()
    assert [line.split(":")[0] for line in found] == ["full.8.8", "full.4.4", "full.2.2"]
    assert all("'seq_lens' was at" in line and "a newer one is at" in line for line in found)
    del keep


def test_the_audit_finds_a_buffer_that_is_gone(cpu: CpuRuntime) -> None:
    manager = captured(Toy(cpu), table())
    for graphs in manager._graphs.values():  # as on a GPU, where a graph keeps nothing alive
        for graph in graphs:
            graph.records = ()  # type: ignore[attr-defined]
    gc.collect()
    other = device(cpu, 4096, "other")
    assert any("where now nothing that is registered is" in line for line in manager.audit())
    del other
