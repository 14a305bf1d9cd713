"""Frames, pictures and exercises of the lesson on graphs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pandas as pd
import pytest

from mrv2lab.engine.engine import Engine
from mrv2lab.protocol import SamplingParams
from mrv2lab.teach import graph_exercises, graph_lesson, graph_pictures

TOKENS = [1] * 20 + [3] * 10 + [5] * 10 + [12] * 4 + [40]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """After five requests whose prompts take full, piecewise and eager steps."""
    options: dict[str, Any] = {
        "cudagraph_mode": "full_and_piecewise",
        "cudagraph_capture_sizes": (1, 2, 4, 8),
        "max_num_reqs": 8,
        "max_model_len": 64,
        "num_blocks": 64,
    }
    with Engine("tiny", device="cpu", progress=False, **options) as made:
        for length in (3, 3, 20, 2, 4):
            made.submit(list(range(1, length + 1)), SamplingParams(max_tokens=length, ignore_eos=True))
            made.step()
        while made.has_work():
            made.step()
        yield made


# -- frames ------------------------------------------------------------------------------------------------------------


def test_every_step_has_a_reason(engine: Engine) -> None:
    frame = graph_lesson.steps(engine.worker.runner.graphs.stats)
    assert set(frame["mode"]) == {"full", "piecewise", "eager"}
    assert (frame["why"].str.len() > 0).all()
    eager = frame[frame["mode"] == "eager"].iloc[0]
    assert (eager["tokens"] > 8, eager["padding"]) == (True, 0)
    full = frame[frame["mode"] == "full"]
    assert (full["tokens"] == full["requests"]).all()


def test_reasons_and_shapes_count_the_same_steps(engine: Engine) -> None:
    manager = engine.worker.runner.graphs
    every = graph_lesson.steps(manager.stats)
    why, shapes = graph_lesson.reasons(manager.stats), graph_lesson.shapes(manager)
    assert why["steps"].sum() == len(every) == shapes["steps"].sum() + (every["mode"] == "eager").sum()
    assert why["padding"].sum() == shapes["padding"].sum() == every["padding"].sum() > 0
    assert "n tokens; plain decodes in one graph" in why.index
    assert "n tokens padded to 8; piecewise: attention runs outside the graphs, over the n there are" in why.index


def test_padding_of_sizes_by_hand() -> None:
    assert graph_lesson.padding_of([1, 3, 5, 9], (4, 8)) == 3 + 1 + 3
    assert graph_lesson.padding_of([9], (4, 8)) == 0  # eager


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 9])
def test_best_sizes_against_every_choice(most: int) -> None:
    values = sorted(set(TOKENS))
    choices = [
        subset
        for n in range(1, min(most, len(values)) + 1)
        for subset in itertools.combinations(values, n)
        if subset[-1] == values[-1]
    ]
    least = min(graph_lesson.padding_of(TOKENS, subset) for subset in choices)
    best = graph_lesson.best_sizes(TOKENS, most)
    assert len(best) <= most and graph_lesson.padding_of(TOKENS, best) == least


def test_graphs_launch_a_forward_with_less() -> None:
    frame = graph_lesson.launch_share((1, 4), steps=3, device="cpu")
    assert list(frame.columns) == ["requests", "way", "forward_us", "step_us", "share"]
    assert frame[["requests", "way"]].to_numpy().tolist() == [[1, "eager"], [4, "eager"], [1, "graph"], [4, "graph"]]
    assert (frame["share"] > 0).all() and (frame["share"] < 1).all()


# -- pictures ----------------------------------------------------------------------------------------------------------


def test_pictures_have_units_and_a_second_cue(engine: Engine) -> None:
    manager = engine.worker.runner.graphs
    shapes = graph_pictures.shapes_picture(manager.rows(), manager.stats)
    assert shapes.layout.xaxis.title.text == "steps"
    assert {bar.name: bar.marker.pattern.shape for bar in shapes.data} == {"full": "", "piecewise": "/", "eager": "."}
    drawn = sum(sum(bar.x) for bar in shapes.data)
    assert drawn == len(graph_lesson.steps(manager.stats))
    padding = graph_pictures.padding_picture(manager.stats)
    waste = graph_lesson.steps(manager.stats)["padding"].sum()
    assert f"Padding: {waste} of" in padding.layout.title.text
    assert sum(padding.data[-1].y) == waste


def test_the_launch_picture_draws_both_ways() -> None:
    frame = pd.DataFrame(
        {"requests": [1, 8] * 2, "way": ["eager"] * 2 + ["graph"] * 2, "forward_us": [50.0] * 4, "step_us": [200.0] * 4}
    )
    figure = graph_pictures.launch_picture(frame)
    assert [(line.name, list(line.y)) for line in figure.data] == [("eager", [25, 25]), ("graph", [25, 25])]
    assert figure.layout.yaxis.title.text == "launching / step (%)"


# -- exercises ---------------------------------------------------------------------------------------------------------


def _dispatch(reqs: int, tokens: int, longest: int) -> tuple[str, int] | None:
    if longest == 1:
        return "full", next(size for size in (1, 2, 4, 6) if size >= tokens)
    size = next((size for size in (1, 2, 4, 8) if size >= tokens), None)
    return None if size is None else ("piecewise", size)


def test_dispatch() -> None:
    assert graph_exercises.check_dispatch(_dispatch).right
    for wrong, hint in (
        (lambda r, t, q: None, "Some captured size holds it"),
        (lambda r, t, q: ("piecewise", t), "Is every request a plain decode"),
        (lambda r, t, q: _dispatch(r, t, q) or ("piecewise", 16), "No captured size holds 9 tokens"),
        (lambda r, t, q: ("full", 8) if (q, t) == (1, 5) else _dispatch(r, t, q), "no full graph has more than 6"),
    ):
        verdict = graph_exercises.check_dispatch(wrong)
        assert not verdict.right and hint in verdict.reason


def test_sizes() -> None:
    check = graph_exercises.check_sizes
    assert check(graph_lesson.best_sizes(TOKENS, 4), TOKENS).right
    for wrong, hint in (
        ((8, 16, 40), "computed for nothing; 4 sizes can do with"),
        ((1, 12), "1 steps are larger than 12"),
        ((1, 2, 3, 4, 40), "more than 4"),
        ((), "positive integers"),
        ((0,), "positive integers"),
    ):
        verdict = check(wrong, TOKENS)
        assert not verdict.right and hint in verdict.reason


def _pad(reqs: int, tokens: int, starts: Any, lens: Any, table: Any, slots: Any) -> None:
    starts[reqs + 1 :] = tokens
    lens[reqs:] = 0
    table[reqs:] = 0
    slots[tokens:] = -1


def test_padding() -> None:
    assert graph_exercises.check_padding(_pad).right

    def mutant(forgotten: str) -> Any:
        def pad(reqs: int, tokens: int, *arrays: Any) -> None:
            names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
            given = dict(zip(names, arrays, strict=True))
            _pad(reqs, tokens, *(given[n].copy() if n == forgotten else given[n] for n in names))

        return pad

    for name, hint in (
        ("query_start_loc", "query_start_loc[3] is"),
        ("seq_lens", "seq_lens[2] is 40"),
        ("block_table", "row 2 of the block table"),
        ("slot_mapping", "slot_mapping[2] is 46"),
    ):
        verdict = graph_exercises.check_padding(mutant(name))
        assert not verdict.right and hint in verdict.reason
    verdict = graph_exercises.check_padding(lambda reqs, tokens, starts, *_: starts.fill(0))
    assert "you changed query_start_loc[:3]" in verdict.reason
    verdict = graph_exercises.check_padding(lambda reqs, tokens, starts, *_: starts.fill(tokens / 0))
    assert "raised ZeroDivisionError" in verdict.reason


@pytest.mark.parametrize("name", graph_lesson.MOVABLE)
def test_a_buffer_that_moved_makes_graphs_wrong_and_the_audit_names_it(engine: Engine, name: str) -> None:
    manager, params = engine.worker.runner.graphs, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompts = [[5, 6, 7], [8, 9, 10]]

    def tokens() -> list[list[int]]:
        return [output.token_ids for output in engine.generate(prompts, params)]

    good = tokens()
    assert "no buffer has moved" in graph_exercises.check_moved(manager, name).reason
    with graph_lesson.moved_buffer(engine, name):
        assert tokens() != good
        assert graph_exercises.check_moved(manager, name).right
        assert "write the buffer's name" in graph_exercises.check_moved(manager, None).reason
        other = next(one for one in graph_lesson.MOVABLE if one != name)
        assert graph_exercises.check_moved(manager, other).reason == f"{other!r} is where it was"
        assert "no buffer that graphs touch: " in graph_exercises.check_moved(manager, "weights").reason
    assert tokens() == good and not manager.audit()


def test_only_inputs_can_be_moved(engine: Engine) -> None:
    with pytest.raises(ValueError, match="got 'logits'"), graph_lesson.moved_buffer(engine, "logits"):
        pass
    with graph_lesson.moved_buffer(engine, seed=3):
        assert engine.worker.runner.graphs.audit()


def test_launches(engine: Engine) -> None:
    manager = engine.worker.runner.graphs
    layers = engine.config.model.num_hidden_layers
    right = {"eager": 3 * layers + 2, "piecewise": 2 * layers + 1, "full": 1}
    assert graph_exercises.check_launches(manager, **right).right
    for name in right:
        verdict = graph_exercises.check_launches(manager, **(right | {name: 7}))
        assert not verdict.right and verdict.reason.startswith(f"{name}: ")
