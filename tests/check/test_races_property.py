"""Random scripts of writes, publishes, copies and waits, against a model that keeps the bytes and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mrv2lab.check.host_reads import HostReads
from mrv2lab.check.races import RaceDetector
from mrv2lab.runtime.cpu import CpuRuntime
from tests.check import race_lines as lines

BUFFERS = 2
WIDTH = 3

Action = tuple[str, int, int]
"""What, which buffer, and a value for those that write."""
SCRIPTS = st.lists(
    st.tuples(st.sampled_from(["numpy", "publish", "copy", "copy", "wait"]), st.integers(0, 1), st.integers(0, 2)),
    max_size=14,
)


@dataclass
class Model:
    """Copies run at a wait. Hazards and corruption are sets of copies, numbered in order."""

    values: list[int] = field(default_factory=lambda: [0] * BUFFERS)
    pending: list[tuple[int, int, int]] = field(default_factory=list)
    """(copy, buffer, the value it should see)"""
    copies: int = 0
    hazards: dict[int, bool] = field(default_factory=dict)
    """Copy -> whether a byte was changed."""
    corrupted: set[int] = field(default_factory=set)

    def look(self) -> set[int]:
        changed = {copy for copy, buffer, value in self.pending if self.values[buffer] != value}
        self.hazards |= dict.fromkeys(changed, True)
        return changed

    def wait(self) -> None:
        self.corrupted |= self.look()
        self.pending = []

    def act(self, what: str, buffer: int, value: int) -> None:
        if what == "wait":
            self.wait()
        elif what == "numpy":
            self.values[buffer] = value  # nobody is told
        else:
            self.look()
            if what == "publish":
                for copy, of, _ in self.pending:
                    if of == buffer:
                        self.hazards[copy] = self.hazards.get(copy, False) or self.values[buffer] != value
                self.values[buffer] = value
            else:
                self.pending.append((self.copies, buffer, self.values[buffer]))
                self.copies += 1


def check_script(script: list[Action], detector: lines.Detector = RaceDetector) -> None:
    rt, model = CpuRuntime(), Model()
    hosts = [rt.empty(WIDTH, torch.int32, name=f"b{i}", place="pinned") for i in range(BUFFERS)]
    target = rt.zeros(WIDTH, torch.int32, name="target")
    for host in hosts:
        host.zero_()
    with detector(rt) as races:
        for what, buffer, value in script:
            model.act(what, buffer, value)
            if what == "numpy":
                hosts[buffer].numpy()[:] = value
            elif what == "publish":
                rt.publish(hosts[buffer], np.full(WIDTH, value, np.int32))
            elif what == "copy":
                rt.h2d(target, hosts[buffer])
                rt.end_step()  # so that a step is a copy
            else:
                rt.synchronize()
    model.wait()
    assert {hazard.step: hazard.changed for hazard in races.hazards} == model.hazards
    assert len(races.hazards) == len(model.hazards)
    assert set(races.corrupted_steps) == model.corrupted


@given(SCRIPTS)
@settings(max_examples=150)
def test_hazards_and_corruption_are_the_models(script: list[Action]) -> None:
    check_script(script)


SCRIPT_OF: dict[type[HostReads], list[Action]] = {
    lines.ComparesAfterTheFact: [("copy", 0, 0), ("numpy", 0, 1), ("wait", 0, 0)],
    lines.TrustsTheChokepoints: [("copy", 0, 0), ("numpy", 0, 1), ("wait", 0, 0)],
    lines.TrustsTheDevice: [("copy", 0, 0), ("numpy", 0, 1), ("copy", 1, 0), ("numpy", 0, 0), ("wait", 0, 0)],
    lines.IgnoresPublishes: [("copy", 0, 0), ("publish", 0, 0)],
    lines.NeverDone: [("copy", 0, 0), ("wait", 0, 0), ("publish", 0, 1)],
}
"""The shortest scripts that tell a mutant from the detector; the third is a write that is taken back in time."""


@pytest.mark.parametrize("kind", SCRIPT_OF)
def test_mutants_differ_from_the_model(kind: type[HostReads]) -> None:
    check_script(SCRIPT_OF[kind])
    with pytest.raises(AssertionError):
        check_script(SCRIPT_OF[kind], lines.with_reads(kind))
