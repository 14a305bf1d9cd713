"""Launches made again: by the same arguments alone, and never for an object that has taken another's place."""

from __future__ import annotations

import gc
import importlib.util
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mrv2lab.ops import _repeat
from mrv2lab.ops._launch import CachedLauncher
from mrv2lab.ops._repeat import MAX_KEPT, PATIENCE, Repeats
from mrv2lab.ops.pos_seq_lens import pos_seq_lens
from tests.ops.test_launch import Tensor, kinds, make

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def start(launcher: Any, table: Any, others: tuple[Any, ...], count: int) -> None:
    """The launcher of an op: its grid and a stride follow from its arguments."""
    launcher[(len(others), 2)](table, 20, count, W=8)


def repeats(launch: Callable[..., None] = start) -> tuple[Repeats, CachedLauncher, list[Any], Any]:
    launcher, log, triton = make()
    return Repeats(launch, launcher), launcher, log, triton


def described(launcher: CachedLauncher, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each launch from now on whose arguments are described."""
    seen: list[int] = []
    describe = launcher.describe

    def note(*args: Any) -> Any:
        seen.append(1)
        return describe(*args)

    monkeypatch.setattr(launcher, "describe", note)
    return seen


def check_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    again, launcher, log, triton = repeats()
    table, others = Tensor(512), (Tensor(), Tensor())
    for _ in range(2):
        again((table, others, 300))
    seen = described(launcher, monkeypatch)
    triton.runtime.driver.active.get_current_stream = lambda index: 77
    again((table, (others[0], others[1]), int("300")))
    assert log[-1] == ("cached", 1, (2, 2, 1), 77, "f1", ((4, 1, 0), None, None, None, 512, 20, 300, 8))
    assert seen == []
    for args in ((table, others, 301), (Tensor(512), others, 300), (table, (Tensor(), others[1]), 300)):
        again(args)
    again((table, others[:1], 300))
    assert log[-1][2] == (1, 2, 1)
    assert len(seen) == 4
    assert log[-4][-1][6] == 301


def test_the_same_arguments_are_described_once(monkeypatch: pytest.MonkeyPatch) -> None:
    check_the_same(monkeypatch)


def check_forgets() -> None:
    again, _, log, _ = repeats()
    other = Tensor()
    again((Tensor(), (), 5))
    log.clear()
    for address in range(0, 1600, 16):
        table = Tensor(512 + address)
        for _ in range(2):
            again((table, (other,), 5))
        assert len(again._known) == 1, "an id that comes again must not find a launch of the former object"
        del table
    gc.collect()
    assert again._known == {}


def test_a_launch_is_forgotten_with_its_tensors() -> None:
    check_forgets()


def changes() -> dict[str, Callable[[CachedLauncher, Any], Any]]:
    def hook(launcher: CachedLauncher, triton: Any) -> None:
        triton.knobs.runtime.launch_enter_hook = lambda metadata: None

    def debug(launcher: CachedLauncher, triton: Any) -> None:
        triton.knobs.runtime.debug = True

    def a_global(launcher: CachedLauncher, triton: Any) -> None:
        launcher.real.used_global_vals["WIDTH", 0][1]["WIDTH"] = 9

    def device(launcher: CachedLauncher, triton: Any) -> None:
        triton.device.index = 1

    return {one.__name__: one for one in (hook, debug, a_global, device)}


@pytest.mark.parametrize("case", changes())
def test_what_changes_a_launch_is_asked_each_time(case: str) -> None:
    again, launcher, log, triton = repeats()
    args = (Tensor(), (Tensor(),), 5)
    for _ in range(3):
        again(args)
    assert kinds(log) == ["plain", "cached", "cached"]
    changes()[case](launcher, triton)
    again(args)
    assert kinds(log)[3:] == ["plain"]


def twice(launcher: Any, table: Any, others: Any, count: int) -> None:
    start(launcher, table, others, count)
    start(launcher, table, others, count)


def early(launcher: Any, table: Any, others: Any, count: int) -> None:
    launcher[(1,)](table, 20, count, W=8, PDL=False)


def test_what_the_arguments_alone_do_not_say_is_not_kept() -> None:
    for launch in (twice, early):
        again, _, log, _ = repeats(launch)
        for _ in range(4):
            again((Tensor(), (), 5))
        assert again._known == {}
        assert kinds(log)[2:] == ["cached"] * (len(log) - 2)
    for odd in (0.5, "a", (3,), [1]):  # a float is not its identity
        again, _, _, _ = repeats(lambda launcher, table, odd: launcher[(1,)](table, 20, 5, W=8))
        for _ in range(4):
            again((Tensor(), odd))
        assert again._known == {}


def test_host_tensors_go_as_the_address_that_the_driver_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Tensor(4096, cuda=False)
    monkeypatch.setattr(_repeat, "device_address", lambda tensor: tensor.data_ptr() + 1)
    again, _, log, _ = repeats()
    for _ in range(3):
        again((host, (), 5))
    assert [entry[-1][4] for entry in log[1:]] == [host, 4097]
    reference = weakref.ref(host)
    log.clear()
    del host
    assert reference() is None, "kept alive for having been launched"
    host = Tensor(4096, cuda=False)
    monkeypatch.setattr(_repeat, "device_address", lambda tensor: _repeat._NOWHERE)
    again, _, log, _ = repeats()
    for _ in range(3):
        again((host, (), 5))
    assert [entry[-1][4] for entry in log[1:]] == [host, host]


def test_no_more_is_kept_than_is_of_use() -> None:
    again, _, _, _ = repeats()
    table = Tensor()
    for count in range(8 * MAX_KEPT):
        again((table, (), count))
        assert len(again._known) <= PATIENCE + count // PATIENCE
    for count in range(3 * MAX_KEPT):
        again((table, (), count))
        again((table, (), count))  # known now and then, which ends the run of new ones
        assert len(again._known) <= MAX_KEPT


MUTANTS: list[tuple[str, str, Callable[..., None]]] = [
    ("weakref.ref(tensor, forget)", "(lambda: tensor)", lambda monkeypatch: check_forgets()),
    ("arg if type(arg) is int else ", "0 if type(arg) is int else ", check_the_same),
    ("tuple(map(id, arg)) if", "len(arg) if", check_the_same),
]


@pytest.mark.parametrize("bug", range(len(MUTANTS)))
def test_mutants_are_caught(bug: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong, check = MUTANTS[bug]
    source = Path(_repeat.__file__).read_text(encoding="utf-8")
    assert source.count(right) == 1
    names: dict[str, Any] = {"__name__": "mutant"}
    exec(compile(source.replace(right, wrong), "mutant", "exec", dont_inherit=True), names)
    monkeypatch.setattr("tests.ops.test_repeat.Repeats", names["Repeats"])
    with pytest.raises(AssertionError):
        check(monkeypatch)


@pytest.mark.gpu
@needs_triton
def test_a_launch_that_is_made_again_writes_what_the_first_did() -> None:
    """On another stream, from pinned memory, into a graph, and behind a tensor that took another's address."""
    launcher = pos_seq_lens.kernel.launcher()
    assert isinstance(launcher, CachedLauncher)
    again = Repeats(pos_seq_lens.launch, launcher)
    counts = torch.arange(5, 14, dtype=torch.int32).pin_memory()
    rows = torch.tensor([7, 3, 1, 0], dtype=torch.int32, device="cuda")
    starts = torch.arange(0, 15, 3, dtype=torch.int32, device="cuda")
    positions = torch.empty(20, dtype=torch.int64, device="cuda")
    seq_lens = torch.empty(9, dtype=torch.int32, device="cuda")
    wanted = [5 + row + 3 for row in (7, 3, 1, 0)] + [0] * 5
    args = (rows, starts, counts, positions, seq_lens, 4)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for turn in range(5):
        seq_lens.fill_(-1)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream if turn % 2 else torch.cuda.current_stream()):
            again(args)
        torch.cuda.synchronize()
        assert seq_lens.tolist() == wanted
    assert len(again._known) == 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again(args)
    seq_lens.fill_(-1)
    graph.replay()
    assert seq_lens.tolist() == wanted
    for _ in range(4):
        del rows, args
        rows = torch.tensor([0, 1, 2, 3], dtype=torch.int32, device="cuda")
        args = (rows, starts, counts, positions, seq_lens, 4)
        again(args)
        assert seq_lens.tolist() == [8, 9, 10, 11] + [0] * 5
