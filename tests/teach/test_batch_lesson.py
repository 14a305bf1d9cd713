"""What the lesson on the persistent batch counts, against what its figures draw and what its words claim."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

import mrv2lab
from mrv2lab.engine.engine import Engine
from mrv2lab.engine.workload import steady
from mrv2lab.model.load import load_model
from mrv2lab.teach import mutants
from mrv2lab.teach.batch_lesson import (
    Load,
    Rows,
    batch_alone,
    bus,
    churn,
    drive,
    hunt,
    observe,
    pause_and_preempt,
    request,
    result_table,
)
from mrv2lab.teach.batch_lesson import totals as sums
from mrv2lab.teach.batch_pictures import bus_picture, condense_picture, rows_picture

SMALL = {"device": "cpu", "num_blocks": 64, "max_num_reqs": 8, "max_model_len": 256}


def jumps(seen: list[Rows]) -> int:
    return sum(now[name] != then[name] for then, now in pairwise(seen) for name in now.keys() & then.keys())


def test_rows_jump_in_v1_alone() -> None:
    workload = steady(10, every=2, prompt_len=6, max_tokens=(5, 20), seed=4).resolve(2048)
    history: dict[str, list[Rows]] = {"v1": [], "mrv2": []}
    texts = []
    for kind, seen in history.items():
        with Engine("tiny", kind, **SMALL) as engine:  # type: ignore[arg-type]
            texts.append(drive(engine, workload, seen))
    assert texts[0] == texts[1]
    assert jumps(history["v1"]) > 0 == jumps(history["mrv2"])
    figure = rows_picture(history, {"v1": "a", "mrv2": "b"})
    assert len(figure.data) == 2 * 10
    cues = {(trace.line.color, trace.line.dash, trace.marker.symbol) for trace in figure.data[:10]}
    assert len(cues) == 10


@pytest.mark.parametrize(("gap", "late", "moves"), [(0, 0, False), (3, 0, False), (3, 1, True)])
def test_a_hole_is_closed_where_nobody_comes_in_time(gap: int, late: int, moves: bool) -> None:
    with Engine("tiny", "v1", async_scheduling=False, **SMALL) as engine:
        log = observe(Load(engine, 6, gap=gap, late=late, prompt=20), 15)
    assert bool(sums(log)["row_moves"]) is moves


def test_bytes_of_condense_follow_the_length() -> None:
    short, long = churn(16, 64, 1, steps=10)[0], churn(16, 640, 1, steps=10)[0]
    assert 5 < long / short < 10
    assert batch_alone(2).add_request(request("a", 17, 17)) == 0
    figure = condense_picture({"x": ((64, 640), ((short, 1.0), (long, 2.0)))})
    assert list(figure.data[0].y) == [short / 1024, long / 1024]


def test_v1_copies_more_often() -> None:
    frames = {}
    for kind in ("v1", "mrv2"):
        with Engine("tiny", kind, **SMALL) as engine:  # type: ignore[arg-type]
            frames[kind] = bus(observe(Load(engine, 4, prompt=20), 8), 8)
    assert frames["v1"].loc["all", "times a step"] == 7
    assert frames["mrv2"].loc[["idx_mapping", "query_start_loc"], "times a step"].tolist() == [1, 1]
    sent = {kind: [frame.loc["all", "bytes a step"]] for kind, frame in frames.items()}
    assert [trace.name for trace in bus_picture({"t": ("requests", (4,), sent)}).data] == ["V1", "MRV2"]


def test_a_pause_costs_v1_a_row_twice() -> None:
    columns = ["rows left", "rows taken", "token ids sent again"]
    v1, mrv2 = (pause_and_preempt(kind)[columns].values.tolist() for kind in ("v1", "mrv2"))
    assert v1 == [[0, 0, 0], [1, 0, 0], [0, 1, 49], [0, 1, 50]]
    assert mrv2 == [[0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 1, 50]]


def test_a_hunt_tells_found_from_escaped_and_from_an_error() -> None:
    configs = []
    for kind, options in (("v1", {"reorder": "mrv2"}), ("mrv2", {})):
        with Engine("tiny", kind, **SMALL, **options) as engine:
            configs.append(engine.config)
    chosen = [mutants.row_keeps_tokens, mutants.row_keeps_seed, mutants.row_leaks]
    weights = load_model("tiny").weights
    found = hunt(chosen, steady(14, every=2, prompt_len=8, max_tokens=(5, 24)).resolve(1000), *configs, weights)["here"]
    assert found["row_keeps_tokens"] == "found"
    assert found["row_keeps_seed"] == "escapes"  # all are greedy
    assert found["row_leaks"].startswith("error: no free row")


def test_the_shipped_figures_say_what_the_lesson_says() -> None:
    path = max(Path(mrv2lab.__file__).parent.glob("bench/results/*h200-runners.json"))
    table = result_table(json.loads(path.read_text())["figures"])
    assert table.loc[("H2D copies", "v1"), ("steady", 256)] == "7.0"
    assert table.loc[("H2D copies", "mrv2"), ("steady", 256)] == "2.0"
    assert table.loc[("H2D bytes", "v1"), ("steady", 256)] == "141,572"
    own = table.loc["runner's own phases (µs)"].map(lambda text: int(text.replace(",", "")))
    assert all(own.loc["v1", ("steady", n)] < own.loc["mrv2", ("steady", n)] for n in (1, 16, 64))
    assert abs(own.loc["v1", ("steady", 256)] / own.loc["mrv2", ("steady", 256)] - 1) < 0.05
