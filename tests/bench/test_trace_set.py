"""The traces that ship: what is written, what is said of it, and that the barrier is where it should be."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import orjson
import pytest

from mrv2lab.bench.trace_set import LATE, SETTINGS, scrub, write_set
from mrv2lab.recording.recording import Recording
from mrv2lab.trace.compare import compare
from mrv2lab.trace.read import load
from mrv2lab.trace.steps import steps
from mrv2lab.trace.syncs import syncs
from tests.steady_clock import steady_clock

STAND_IN_MS = 5.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("set")
    with steady_clock():
        write_set(made, "cpu", requests=3, steps=3, stand_in_ms=STAND_IN_MS)
    return made


def test_every_setting_has_its_files(folder: Path) -> None:
    traces = [f"cpu_{name}{kind}.json.gz" for kind in ("", "_graphs") for name in SETTINGS]
    traces += [f"cpu_{name}_late.json.gz" for name in LATE]
    recordings = [f"cpu_{name}.mrv2rec" for name in SETTINGS if name != "v1_barrier"]
    files = sorted(traces + recordings)
    assert sorted(path.name for path in folder.iterdir()) == sorted(files + [f"{name}.meta.json" for name in files])
    for name in files:
        meta = orjson.loads((folder / f"{name}.meta.json").read_bytes())
        assert meta["sha256"] == hashlib.sha256((folder / name).read_bytes()).hexdigest()
        assert meta["modelled_times"]
    for name in recordings:
        assert len(Recording.load(folder / name)) >= 3


def test_the_barrier_waits_for_late_copies(folder: Path) -> None:
    def barrier_ns(name: str) -> int:
        found = syncs(load(folder / f"cpu_{name}.json.gz", cache=False))
        return int(found.loc[found["barrier"].astype(bool), "api_ns"].max())

    assert barrier_ns("v1_barrier_late") > 0.5 * STAND_IN_MS * 1e6 > barrier_ns("v1_barrier")
    no_barrier = syncs(load(folder / "cpu_mrv2_pinned_copy_late.json.gz", cache=False))
    assert not no_barrier["barrier"].any()


def test_the_files_say_their_batches_and_compare_says_that_they_agree(folder: Path) -> None:
    names = ("cpu_v1_barrier", "cpu_mrv2_uva_pool", "cpu_v1_barrier_graphs", "cpu_mrv2_pinned_copy_late")
    first, *others = (load(folder / f"{name}.json.gz", cache=False) for name in names)
    frame = steps(first)
    assert set(frame["kind"]) == {"decode"} and set(frame["generation_tokens"]) == {3}
    for other in others:
        found = compare(first, other)
        assert found.workload == "The workloads agree in requests and tokens of all 3 common steps (3 decode)."
        assert found.steps["workload"].tolist() == ["same"] * 3


def test_a_graphs_step_is_one_launch_of_the_forward_pass(folder: Path) -> None:
    def forwards(name: str) -> int:
        trace = load(folder / f"cpu_{name}.json.gz", cache=False)
        return int(trace.named(lambda name: "after_attention" in name).sum())

    assert forwards("mrv2_uva_pool") > 0 == forwards("mrv2_uva_pool_graphs")


def test_a_kind_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a kind is one of .* got \['eagre'\]"):
        write_set(tmp_path, "cpu", requests=1, steps=1, kinds=["eagre"])


def test_scrubbing_takes_the_machine_out_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(b'{"host_name": "secret", "traceEvents": [], "a": 1}', mtime=7))
    scrub(path)
    assert gzip.decompress(path.read_bytes()) == b'{"traceEvents":[],"a":1}'
    before = path.read_bytes()
    scrub(path)
    assert path.read_bytes() == before
