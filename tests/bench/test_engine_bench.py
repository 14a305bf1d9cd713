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

from mrv2lab.bench import engine_bench
from mrv2lab.bench import result as result_module
from mrv2lab.bench.cli_engine import table
from mrv2lab.bench.engine_bench import bench, race, ratios, row, settings
from mrv2lab.bench.engine_options import allotted, parsed
from mrv2lab.bench.engine_over_v1 import one_load, over_v1
from mrv2lab.bench.engine_peers import Entrant, entrants
from mrv2lab.bench.engine_pictures import over_v1_picture, race_picture
from mrv2lab.bench.engine_workloads import LARGE, SMALL, RaceWorkload, chosen, sampling_of
from mrv2lab.bench.result import RESULTS
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

    def __init__(self, seconds: dict[str, float], dies: str = "", compiles: float = 0) -> None:
        self.children = {name: types.SimpleNamespace(entrant=Entrant(*name.split())) for name in seconds}
        self.seconds, self.dies, self.compiles = seconds, dies, compiles
        self.log: list[tuple[str, int]] = []

    def call(self, name: str, message: dict[str, Any]) -> Any:
        self.log.append((name, message["repetition"]))
        if name == self.dies and message["repetition"]:
            del self.children[name]
            return None
        seconds = self.seconds[name] + (self.compiles if not message["repetition"] else 0)
        return {"seconds": seconds, "distinct_tokens": 9}


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


def test_who_compiles_in_the_round_that_does_not_count_is_not_slow() -> None:
    walls = run_race(FakeField({"mrv2lab mrv2": 1.0, "transformers -": 2.0}, compiles=30), 5)
    assert {name: len(found) for name, found in walls.items()} == {"mrv2lab mrv2": 5, "transformers -": 5}


@pytest.mark.parametrize("on_gpu", [True, False])
def test_a_load_has_room_however_many_rounds_are_asked_for(on_gpu: bool) -> None:
    """Its requests keep growing, all of them at once: a round too many, and V1 beside MRV2 is a tale of preemptions."""
    room = ours(on_gpu)
    asked: list[dict[str, Any]] = []
    turned: list[int] = []

    def call(name: str, message: dict[str, Any]) -> Any:
        if message["do"] == "load":
            asked.append(message)
        if message["do"] in ("window", "phases") and name == "mrv2lab mrv2":
            turned.append(message["steps"])
        return {"seconds": 1.0, "tokens": 8}

    steps, prompt_len, count = (32, 128, 256) if on_gpu else (4, 24, 4)
    assert one_load(call, count, "steady", "greedy", 1000, steps, prompt_len) is not None
    assert 0 < sum(turned) + 16 < asked[0]["longest"], "they outlive the measurement"
    assert asked[0]["longest"] + prompt_len <= room["max_model_len"]
    assert count * -(-(prompt_len + sum(turned) + 16) // 16) < room["num_blocks"]


def ours(on_gpu: bool) -> dict[str, int]:
    """Room that our engine has in the race."""
    made = settings(on_gpu, {})[0]["options"]
    return {"max_model_len": made.get("max_model_len", 256), "num_blocks": made.get("num_blocks", 512)}


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
    assert first["throughput_range"] == pytest.approx([1.5, 4.0])
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
    assert (made["ratio"], made["ratio_range"], made["resolved"]) == (2.0, [0.5, 2.0], False)
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
    facts = made["engines"]["mrv2lab v1"]
    assert facts["versions"]["torch"] == torch.__version__
    assert (facts["attention"], facts["graphs"], facts["num_blocks"]) == ("torch", "none", 512), "what ran"


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
        (["--limit", "0"], "limit is a time in seconds and must be positive, got 0"),
        (["--limit", "nan"], "must be positive, got nan"),
        (["--vllm-site", "nowhere"], "vllm_site nowhere is no folder"),
        (["--option", "attention=tritn"], "attention must be one of"),
        (["--option", "atention=torch"], "unknown option 'atention'"),
        (["--option", "dtype=float8"], "dtype must be one of"),
        (["--option", "count_nans=flase"], "option 'count_nans' is bool, got 'flase'"),
        (["--option", "seed=abc"], "option 'seed' is int or None, got 'abc'"),
        (["--option", "max_model_len=4096"], "exceeds the model's max_position_embeddings"),
        (["--option", "device=cuda"], "option 'device' cannot be given here: the race chooses it"),
        (["--option", "observer=None"], "option 'observer' cannot be given here: its value is a Python object"),
        (["--runner", "v1", "--option", "fused_prepare=true"], "fused_prepare is for runner='mrv2'"),
        (["--out", "tests"], "tests is a folder; name a file in it"),
        (["--plot", "README.md/race.html"], "README.md/race.html cannot be written"),
    ],
)
def test_the_command_refuses_before_a_process_is_started(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_bench, "Child", None)
    monkeypatch.chdir(Path(__file__).parents[2])
    result = CliRunner().invoke(
        app, ["bench", "engine", *(["--device", "cpu"] if "--device" not in words else []), *words]
    )
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("mrv2lab: ") and said in result.stderr


def test_options_are_json_or_python_or_text() -> None:
    words = ["attention=triton", "num_blocks=64", "count_nans=true", "lag=None", "warm_up=False", "protected=a, b"]
    assert parsed([*words, "cudagraph_capture_sizes=1,2,4", "reorder=none"]) == {
        "attention": "triton", "num_blocks": 64, "count_nans": True, "lag": None, "warm_up": False,
        "protected": ["a", "b"], "cudagraph_capture_sizes": [1, 2, 4], "reorder": "none",
    }  # fmt: skip
    assert parsed(["sizes=[1,2]", "sizes=8,"]) == {"sizes": [8]}


def test_an_option_of_one_runner_goes_to_that_one() -> None:
    options = {"fused_prepare": False, "reorder": "mrv2", "lag": 1}
    given, left_out = allotted(["mrv2", "v1"], "tiny", {"threads": 1}, {**options, "fused_prepare": True})
    assert given == {
        "mrv2": {"threads": 1, "fused_prepare": True, "lag": 1}, "v1": {"threads": 1, "reorder": "mrv2", "lag": 1},
    }  # fmt: skip
    assert {runner: list(why) for runner, why in left_out.items()} == {"mrv2": ["reorder"], "v1": ["fused_prepare"]}
    assert "is for runner='mrv2'" in left_out["v1"]["fused_prepare"]
    assert allotted(["mrv2", "v1"], "tiny", {}, {"fused_prepare": False})[1] == {}, "V1 has it as well, and it is False"


# -- what the command says of a race -----------------------------------------------------------------------------------
def command(monkeypatch: pytest.MonkeyPatch, figures: dict[str, Any], *words: str) -> Any:
    """The command over a race that nobody runs."""

    def raced(*_: Any, save: Any, **__: Any) -> dict[str, Any]:
        save(figures)
        return figures

    monkeypatch.setattr(engine_bench, "bench", raced)
    return CliRunner().invoke(app, ["bench", "engine", *words])


FIGURES: dict[str, Any] = {"device": "cpu", "rows": [], "ratios": [], "absent": {}, "failed": {}}


@pytest.mark.parametrize("what", ["failed", "absent"])
def test_an_engine_of_ours_that_did_not_run_is_an_exit_code(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    result = command(monkeypatch, {**FIGURES, what: {"mrv2lab v1": "it broke"}})
    assert (result.exit_code, result.stderr) == (1, "mrv2lab: did not run to the end: mrv2lab v1\n")
    assert f"{what}: mrv2lab v1 - it broke" in result.stdout.splitlines()
    assert command(monkeypatch, {**FIGURES, what: {"vllm v1": "it broke"}}).exit_code == 0, "a peer may be away"


def test_what_was_measured_is_shown_where_it_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(result_module, "write_result", full)
    made = command(monkeypatch, {**FIGURES, "absent": {"vllm v1": "why"}}, "--out", str(tmp_path / "race.json"))
    assert (made.exit_code, made.stderr) == (2, "mrv2lab: no space left on device\n")
    assert made.stdout.splitlines()[-1] == "absent: vllm v1 - why"


def test_files_are_written_into_new_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out, page = tmp_path / "new" / "race.json", tmp_path / "newer" / "race.html"
    figures = {**FIGURES, "options_left_out": {"mrv2lab v1": {"fused_prepare": "it is MRV2's"}}}
    made = command(monkeypatch, figures, "--out", str(out), "--plot", str(page))
    assert (made.exit_code, made.stderr) == (0, "")
    assert made.stdout.splitlines()[-1] == "left out: fused_prepare of mrv2lab v1 - it is MRV2's"
    assert json.loads(out.read_text())["figures"] == figures and page.stat().st_size > 1000


def test_shipped_results_have_the_keys_that_are_read() -> None:
    """Files that were measured before a key was renamed are renamed with it."""
    keys = {"ratios": "throughput_range", "mrv2_over_v1": "ratio_range"}
    read = 0
    for path in RESULTS.glob("*.json"):
        figures = json.loads(path.read_text())["figures"]
        for table_, key in keys.items():
            for one in figures.get(table_, []) if isinstance(figures, dict) else []:
                assert len(one[key]) == 2 and one[key][0] <= one[key][1], path.name
                read += 1
    assert read > 0


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
