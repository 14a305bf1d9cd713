"""The race: what engines are given, how they take turns, what a child answers, and the figures that come of it."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm.auto import tqdm
from typer.testing import CliRunner

from mrv2lab.bench.cli_engine import parsed, table
from mrv2lab.bench.engine_bench import bench, race, ratios, row, settings
from mrv2lab.bench.engine_over_v1 import one_load, over_v1
from mrv2lab.bench.engine_peers import Entrant, entrants
from mrv2lab.bench.engine_pictures import over_v1_picture, race_picture
from mrv2lab.bench.engine_workloads import LARGE, SMALL, RaceWorkload, chosen, sampling_of
from mrv2lab.cli import app

TINY = RaceWorkload("T", 2, 3, 4)


# -- what they are given -----------------------------------------------------------------------------------------------
def test_the_workloads_are_those_of_the_published_comparison() -> None:
    assert [(one.requests, one.prompt_len, one.output_len) for one in LARGE.values()] == [
        (256, 128, 256), (1, 128, 256), (64, 1024, 128),
    ]  # fmt: skip
    assert LARGE.keys() == SMALL.keys()
    assert sampling_of("seeded", 7) == {"temperature": 1.0, "top_p": 0.95, "top_k": 20, "seed": 7}
    assert sampling_of("greedy", 7) == {"temperature": 0.0}


def test_prompts_are_everybodys_and_new_in_every_round() -> None:
    one = RaceWorkload("A", 5, 7, 2)
    prompts = one.prompts(3, 11)
    assert prompts == one.prompts(3, 11) != one.prompts(4, 11)
    assert [len(prompt) for prompt in prompts] == [7] * 5
    assert {token for prompt in prompts for token in prompt} <= set(range(11))
    # What crosses the pipe is the workload, not its prompts.
    message = json.loads(json.dumps(one.message("greedy", 3)))
    assert RaceWorkload(**message["workload"]).prompts(message["repetition"], 11) == prompts


def test_chosen() -> None:
    assert [(one.name, sampling) for one, sampling in chosen((), True)] == [
        ("A", "greedy"), ("A", "seeded"), ("B", "greedy"), ("C", "greedy"),
    ]  # fmt: skip
    assert [one.requests for one, _ in chosen(("C", "B"), True)] == [1, 64]
    with pytest.raises(ValueError, match="workload 'D' is unknown; there are A, B, C"):
        chosen(("D",), True)


def test_entrants() -> None:
    made = entrants(("mrv2", "v1"), ("vllm", "transformers"), {"a": 1}, {"b": 2})
    names = ["mrv2lab mrv2", "mrv2lab v1", "vllm mrv2", "vllm v1", "transformers"]
    assert [one.name for one in made] == names
    assert [one.settings for one in made[1:3]] == [{"a": 1, "runner": "v1"}, {"b": 2}]
    assert [one.takes("seeded") for one in made] == [True] * 4 + [False]
    assert [one.name for one in entrants((), ("vllm-v1",), {}, {})] == ["vllm v1"]
    with pytest.raises(ValueError, match="peer 'sglang' is unknown"):
        entrants((), ("sglang",), {}, {})
    with pytest.raises(ValueError, match="runner 'v3' is unknown"):
        entrants(("v3",), (), {}, {})


def test_peers_get_the_same_limits_and_as_many_kv_bytes() -> None:
    ours, theirs = settings(True, {"num_blocks": 10, "max_num_reqs": 3})
    assert ours["options"]["cudagraph_mode"] == "full_and_piecewise"
    assert not ours["options"]["enable_prefix_caching"]
    # a token: keys and values of 28 layers, 8 heads of 128, two bytes each
    assert theirs == {
        "model": "qwen3-0.6b-shape", "max_num_reqs": 3, "max_num_batched_tokens": 16_384, "max_model_len": 4096,
        "kv_bytes": 10 * 16 * 2 * 28 * 8 * 128 * 2,
    }  # fmt: skip


# -- turns and figures -------------------------------------------------------------------------------------------------
class FakeField:
    """Engines that answer at once with the times they are given."""

    def __init__(self, seconds: dict[str, float], dies: str = "") -> None:
        self.children = {name: types.SimpleNamespace(entrant=Entrant(*name.split())) for name in seconds}
        self.seconds, self.dies = seconds, dies
        self.log: list[tuple[str, int]] = []

    def call(self, name: str, message: dict[str, Any]) -> Any:
        self.log.append((name, message["repetition"]))
        if name == self.dies and message["repetition"]:
            del self.children[name]
            return None
        return {"seconds": self.seconds[name], "distinct_tokens": 9}


def run_race(field: FakeField, repetitions: int) -> Any:
    with tqdm(disable=True) as bar:
        return race(field, [(TINY, "greedy")], repetitions, bar)["T", "greedy"]  # type: ignore[arg-type]


def test_engines_take_turns_and_the_first_round_does_not_count() -> None:
    field = FakeField({"mrv2lab mrv2": 1.0, "vllm mrv2": 2.0})
    walls = run_race(field, 2)
    names = [name.split()[0] for name, _ in field.log]
    assert names == ["mrv2lab", "vllm", "vllm", "mrv2lab", "mrv2lab", "vllm"]
    assert [number for _, number in field.log] == [0, 0, 1, 1, 2, 2]
    assert {name: len(found) for name, found in walls.items()} == {"mrv2lab mrv2": 2, "vllm mrv2": 2}


def test_a_very_slow_engine_has_three_turns_and_a_dead_one_none() -> None:
    field = FakeField({"mrv2lab mrv2": 1.0, "mrv2lab v1": 11.0, "vllm mrv2": 1.0}, dies="vllm mrv2")
    walls = run_race(field, 5)
    assert {name: len(found) for name, found in walls.items()} == {"mrv2lab mrv2": 5, "mrv2lab v1": 3}


def test_no_round_begins_after_the_limit() -> None:
    field, left = FakeField({"mrv2lab mrv2": 1.0}), iter([True, True, False])
    with tqdm(disable=True) as bar:
        walls = race(field, [(TINY, "greedy")], 9, bar, lambda: next(left))  # type: ignore[arg-type]
    assert len(walls["T", "greedy"]["mrv2lab mrv2"]) == 3  # and one before them that does not count


def rows() -> list[dict[str, Any]]:
    walls = {"mrv2lab mrv2": [1.0, 2.0, 1.5], "vllm v1": [3.0, 3.0, 6.0], "transformers -": [6.0, 6.0, 6.0]}
    return [
        row(TINY, "greedy", Entrant(*name.split()), [{"seconds": s, "distinct_tokens": 5} for s in seconds])
        for name, seconds in walls.items()
    ]


def test_a_row() -> None:
    one = rows()[0]
    assert {key: one[key] for key in ("workload", "impl", "runner", "sampling", "repetitions")} == {
        "workload": "T", "impl": "mrv2lab", "runner": "mrv2", "sampling": "greedy", "repetitions": 3,
    }  # fmt: skip
    assert one["output_tokens_per_s"] == pytest.approx(8 / 1.5)  # 2 requests, 4 tokens each
    assert one["ms_per_token"] == pytest.approx(1500 / 4)
    assert one["spread"] == pytest.approx(1 / 1.5)
    assert (one["min_s"], one["max_s"], one["walls_s"]) == (1.0, 2.0, [1.0, 2.0, 1.5])


def test_ratios_are_of_medians_and_their_ranges_of_rounds() -> None:
    first, second = ratios(rows())
    assert (first["of"], first["over"], second["over"]) == ("mrv2lab mrv2", "vllm v1", "transformers")
    assert first["throughput"] == pytest.approx(2.0)
    assert first["throughput_by_round"] == pytest.approx([1.5, 4.0])
    assert first["ms_per_token"] == pytest.approx(0.5)


def test_the_picture_and_the_table_show_every_engine() -> None:
    figures = {"device": "cuda", "model": "m", "rows": rows(), "ratios": ratios(rows()), "absent": {"vllm mrv2": "why"}}
    assert [bar.name for bar in race_picture(figures).data] == ["mrv2lab mrv2", "vllm v1", "transformers"]
    lines = table({**figures, "failed": {"x": "it broke"}})
    assert lines[-2:] == ["absent: vllm mrv2 - why", "failed: x - it broke"]
    assert "tokens/s x 2.00 [1.50..4.00], ms/token x 0.50" in lines[5]


# -- MRV2 over V1 ------------------------------------------------------------------------------------------------------
def test_a_ratio_inside_the_noise_is_reported_as_such() -> None:
    seconds: dict[str, Iterator[float]] = {}

    def call(name: str, message: dict[str, Any]) -> Any:
        if message["do"] == "window":
            return {"seconds": next(seconds[name]), "tokens": 12}
        return {"prepare_inputs": 3.0} if message["do"] == "phases" else {}

    def measured(v1: list[float], mrv2: list[float]) -> Any:
        seconds.update({"mrv2lab v1": iter([9.0, *v1]), "mrv2lab mrv2": iter([9.0, *mrv2])})
        return one_load(call, 4, "steady", "greedy", 3, 8, 24)

    made = measured([2.0, 2.0, 2.0], [1.0, 4.0, 1.0])
    assert (made["ratio"], made["ratio_by_round"], made["resolved"]) == (2.0, [0.5, 2.0], False)
    assert made["output_tokens_per_s"] == {"v1": 6.0, "mrv2": 12.0}
    assert made["host_us"]["v1"] == {"prepare_inputs": 3.0}
    assert measured([2.0] * 3, [1.0] * 3)["resolved"]
    assert one_load(lambda *_: None, 4, "steady", "greedy", 3, 8, 24) is None


# -- all of it ---------------------------------------------------------------------------------------------------------
def test_two_runners_race_on_a_cpu() -> None:
    """Two processes of ours, a tiny workload: a test of the way, not of a speed."""
    made = bench("cpu", workloads=("B",), repetitions=1, compare_runners=False, progress=False)
    assert made["failed"] == {}
    assert [(one["impl"], one["runner"], one["repetitions"]) for one in made["rows"]] == [
        ("mrv2lab", "mrv2", 1), ("mrv2lab", "v1", 1),
    ]  # fmt: skip
    assert made["absent"].keys() == {"vllm mrv2", "vllm v1", "transformers"}
    assert [(one["of"], one["over"]) for one in made["ratios"]] == [("mrv2lab mrv2", "mrv2lab v1")]
    assert made["engines"]["mrv2lab v1"]["versions"]["torch"] == torch.__version__


@pytest.mark.slow
def test_mrv2_over_v1_on_a_cpu(tmp_path: Path) -> None:
    out, page = tmp_path / "engine.json", tmp_path / "engine.html"
    words = ["--device", "cpu", "--repetitions", "2", "--workload", "A", "--json", "--out", out, "--plot", page]
    result = CliRunner().invoke(app, ["bench", "engine", *map(str, words)])
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout)
    assert [one["sampling"] for one in made["rows"]] == ["greedy", "greedy", "seeded", "seeded"]
    found = {(one["kind"], one["sampling"], one["requests"]) for one in made["mrv2_over_v1"]}
    assert found == {(kind, how, n) for kind in ("steady", "churn") for how in ("greedy", "seeded") for n in (1, 4)}
    host = made["mrv2_over_v1"][0]["host_us"]
    assert "prepare_inputs" in host["mrv2"] and "barrier_wait" in host["v1"]
    assert json.loads(out.read_text())["figures"]["rows"] == made["rows"]
    assert page.stat().st_size > 1000
    assert len(over_v1_picture(made).data) == 4
    assert any("not resolved" in line or "x" in line for line in table(made))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--workload", "D"], "workload 'D' is unknown"),
        (["--peer", "sglang"], "peer 'sglang' is unknown"),
        (["--runner", "v3"], "runner 'v3' is unknown"),
        (["--repetitions", "0"], "repetitions must be at least 1, got 0"),
        (["--option", "attention"], "an option is name=value, got 'attention'"),
        (["--device", "tpu"], "device 'tpu' is not here"),
    ],
)
def test_the_command_refuses(words: list[str], said: str) -> None:
    result = CliRunner().invoke(
        app, ["bench", "engine", *(["--device", "cpu"] if "--device" not in words else []), *words]
    )
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("mrv2lab: ") and said in result.stderr


def test_options_are_json_or_text() -> None:
    assert parsed(["attention=triton", "num_blocks=64", "count_nans=true"]) == {
        "attention": "triton", "num_blocks": 64, "count_nans": True,
    }  # fmt: skip


def test_over_v1_has_a_row_a_load() -> None:
    def call(name: str, message: dict[str, Any]) -> Any:
        return {"seconds": 1.0, "tokens": 1} if message["do"] == "window" else {}

    with tqdm(disable=True) as bar:
        assert len(over_v1(call, 1, True, bar)) == 20


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_on_a_gpu() -> None:
    """All that a race needs of ours on a GPU: weights made there, graphs, and an answer of more than one token."""
    made = bench("cuda", workloads=("B",), peers=("none",), repetitions=1, compare_runners=False, progress=False)
    assert made["failed"] == {}
    assert [one["runner"] for one in made["rows"]] == ["mrv2", "v1"]
    assert all(one["distinct_tokens"] > 1 for one in made["rows"])
