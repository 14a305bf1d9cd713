"""Cutting a forward at attention, and what a forward that changed since the capture is told."""

from __future__ import annotations

import pytest

from mrv2lab.graphs import BatchDescriptor
from mrv2lab.graphs.pieces import PieceRecorder
from mrv2lab.runtime.cpu import CpuRuntime
from tests.graphs.toy import Toy, captured, table

PIECES_4 = BatchDescriptor("piecewise", 4, None, None)


def test_pieces_are_the_segments_between_attentions(cpu: CpuRuntime) -> None:
    toy = Toy(cpu)
    with PieceRecorder(cpu, "g") as recorder:
        toy.forward(4, 4)
    assert {name: graph and graph.name for name, graph in recorder.plan.items()} == {
        "embed": "g.0",
        "layer.0.before_attention": None,
        "layer.0.after_attention": "g.1",
        "layer.1.before_attention": None,
        "layer.1.after_attention": "g.2",
        "final_norm": None,
    }
    assert [[record.name for record in graph.records] for graph in recorder.graphs] == [  # type: ignore[attr-defined]
        ["embed", "layer.0.before_attention"],
        ["layer.0.after_attention", "layer.1.before_attention"],
        ["layer.1.after_attention", "final_norm"],
    ]
    assert cpu.main.queued == 0


def test_a_forward_that_ran_fewer_segments_is_an_error(cpu: CpuRuntime) -> None:
    toy = Toy(cpu)
    manager = captured(toy, table("piecewise"))
    with pytest.raises(RuntimeError, match="piecewise graphs of 4 tokens: 1 of 3 pieces were replayed"):  # noqa: SIM117
        with manager.piecewise(PIECES_4):
            cpu.run("embed", toy.hidden, toy.ids)
    assert cpu.segments is None
    with manager.piecewise(PIECES_4):
        toy.forward(4, 2)


def test_a_segment_that_was_not_captured_is_an_error(cpu: CpuRuntime) -> None:
    toy = Toy(cpu)
    manager = captured(toy, table("piecewise"))
    with pytest.raises(RuntimeError, match="segment 'boom' was not there at capture"), manager.piecewise(PIECES_4):
        cpu.run("boom", toy.hidden)
    assert cpu.segments is None


def test_a_segment_that_runs_twice_cannot_be_cut(cpu: CpuRuntime) -> None:
    toy = Toy(cpu)

    def forward() -> None:
        cpu.run("embed", toy.hidden, toy.ids)
        cpu.run("embed", toy.hidden, toy.ids)

    with pytest.raises(RuntimeError, match="'embed' runs twice"), PieceRecorder(cpu, "g"):
        forward()
    assert cpu.segments is None and cpu.capturing is None


def test_a_reset_ends_pieces_that_an_error_left_open(cpu: CpuRuntime) -> None:
    manager = captured(Toy(cpu), table("piecewise"))
    cpu.segments = manager.piecewise(PIECES_4)  # type: ignore[assignment]
    cpu.reset()
    assert cpu.segments is None
