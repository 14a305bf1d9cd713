"""``mrv2lab generate`` and ``mrv2lab info`` as a shell sees them: stdout, one line on stderr, the exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from mrv2lab.bench import machine
from mrv2lab.cli import app
from mrv2lab.engine.engine import Engine
from mrv2lab.engine.logprobs import LogprobRows
from mrv2lab.engine.outputs import RequestOutput
from mrv2lab.protocol import Logprobs, SamplingParams, StructuredOutput

KEYS = ["prompt", "token_ids", "text", "finish_reason", "stop_reason", "steps"]
FACTS = (
    "mrv2lab commit python platform cpus torch_threads torch triton flashinfer gpu device kernels stream attention "
    "missing"
).split()


def call(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def generate(*words: str) -> Result:
    return call("generate", "--model", "tiny", "--device", "cpu", *words)


def fails(result: Result, *words: str) -> None:
    """One line on stderr with all the words, nothing on stdout, exit code 2."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("mrv2lab: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


# -- generate ----------------------------------------------------------------------------------------------------------


def test_json_is_one_object_a_line() -> None:
    prompts = ["Once upon a time", 'The owl said:\n"Who?"', "Once upon a time"]
    words = [word for prompt in prompts for word in ("--prompt", prompt)]
    result = generate(*words, "--json", "--max-tokens", "5", "--ignore-eos")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [list(line) for line in lines] == [KEYS] * 3
    assert [line["prompt"] for line in lines] == prompts
    for line in lines:
        assert len(line["token_ids"]) == 5
        assert all(isinstance(token, int) for token in line["token_ids"])
        assert line["finish_reason"] == "length"
        assert line["steps"] >= 5
        assert isinstance(line["text"], str)
    assert lines[0]["token_ids"] == lines[2]["token_ids"]


def test_plain_text_is_prompt_and_continuation() -> None:
    shared = ("--prompt", "Once upon a time", "--max-tokens", "4")
    plain, as_json = generate(*shared), generate(*shared, "--json")
    assert plain.stdout == "Once upon a time" + json.loads(as_json.stdout)["text"] + "\n"


def test_both_runners_write_the_same() -> None:
    shared = ("--prompt", "Once upon a time", "--max-tokens", "4")
    texts = {runner: generate(*shared, "--runner", runner) for runner in ("mrv2", "v1")}
    assert texts["v1"].exit_code == 0
    assert texts["v1"].stdout == texts["mrv2"].stdout == generate(*shared).stdout


def test_the_runner_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def refuse(*names: object, **options: object) -> None:
        made.append((names[1], options["transfer"]))
        raise ValueError("seen")

    monkeypatch.setattr("mrv2lab.engine.engine.Engine", refuse)
    fails(generate("--prompt", "x", "--runner", "v1"), "seen")
    assert made == [("v1", None)]


def test_a_seed_fixes_the_draws() -> None:
    def drawn(seed: str) -> list[int]:
        result = generate("--prompt", "One day", "--temperature", "1.5", "--seed", seed, "--json", "--max-tokens", "12")
        tokens: list[int] = json.loads(result.stdout)["token_ids"]
        return tokens

    assert drawn("7") == drawn("7") != drawn("8")


def test_a_stop_string_ends_the_text() -> None:
    shared = ("--prompt", "Once upon a time", "--json", "--max-tokens", "16")
    whole = json.loads(generate(*shared).stdout)["text"]
    cut = json.loads(generate(*shared, "--stop", "nowhere", "--stop", whole[9:12]).stdout)
    assert (cut["text"], cut["finish_reason"]) == (whole[: whole.index(whole[9:12])], "stop")
    assert cut["stop_reason"] == whole[9:12]


def options_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> SamplingParams:
    """What the command asks of the engine."""
    seen: list[SamplingParams] = []

    def note(self: Engine, prompts: object, params: SamplingParams) -> list[object]:
        seen.append(params)
        return []

    monkeypatch.setattr(Engine, "generate", note)
    result = generate("--prompt", "x", *words)
    assert result.exit_code == 0, result.output
    return seen[0]


def test_every_option_reaches_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--temperature 0.5 --top-k 7 --top-p 0.9 --min-p 0.1 --logprobs 3 --stop a --stop b --regex [0-9]+"
    params = options_of(monkeypatch, *words.split())
    assert params == SamplingParams(
        temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, logprobs=3, stop=("a", "b"),
        structured_output=StructuredOutput(regex="[0-9]+"),
    )  # fmt: skip
    assert options_of(monkeypatch) == SamplingParams()


def test_a_schema_is_text_or_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    schema = '{"type": "integer"}'
    (tmp_path / "schema.json").write_text(schema, encoding="utf-8")
    want = SamplingParams(structured_output=StructuredOutput(json_schema=schema))
    assert options_of(monkeypatch, "--json-schema", schema) == want
    assert options_of(monkeypatch, "--json-schema", str(tmp_path / "schema.json")) == want


def with_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up answer, so that the command is tested and not the sampler."""

    def answer(self: Engine, prompts: list[str], params: SamplingParams) -> list[RequestOutput]:
        rows = LogprobRows()
        rows.extend(
            Logprobs(np.array([[5, 9]], np.int32), np.array([[-1.5, -0.5]], np.float32), np.array([2], np.int32))
        )
        return [RequestOutput("r0", prompts[0], [1], [5], "!", "length", logprobs=rows)]

    monkeypatch.setattr(Engine, "generate", answer)


def test_logprobs_as_json_and_as_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    with_logprobs(monkeypatch)
    line = json.loads(generate("--prompt", "x", "--logprobs", "1", "--json").stdout)
    assert list(line) == [*KEYS, "logprobs"]
    assert line["logprobs"] == [
        [{"token_id": 5, "logprob": -1.5, "rank": 2}, {"token_id": 9, "logprob": -0.5, "rank": 1}]
    ]
    lines = generate("--prompt", "x", "--logprobs", "1").stdout.splitlines()
    assert lines[0] == "x!" and lines[1].split() == ["position", "token_id", "logprob", "rank", "chosen", "text"]
    assert lines[2].split()[:5] == ["0", "5", "-1.5", "2", "True"]


@pytest.mark.parametrize(
    ("words", "said"),
    {
        "no text": (["--prompt", ""], ["the prompt is empty"]),
        "no text among others": (["--prompt", "One day", "--prompt", ""], ["the prompt is empty"]),
        "not a number": (
            ["--prompt", "x", "--temperature", "nan"],
            [">= 0 and finite, as float32, got nan"],
        ),
        "negative": (
            ["--prompt", "x", "--temperature", "-1"],
            [">= 0 and finite, as float32, got -1.0"],
        ),
        "no tokens": (["--prompt", "x", "--max-tokens", "0"], ["max_tokens must be an integer >= 1, got 0"]),
        "too many tokens": (["--prompt", "x", "--max-tokens", "99999"], ["exceeds max_model_len 1024"]),
        "seed": (["--prompt", "x", "--seed", str(2**64)], ["64-bit integer", str(2**64)]),
        "model": (["--prompt", "x", "--model", "huge"], ["no model 'huge'", "tiny, tiny-draft, smollm2"]),
        "device": (["--prompt", "x", "--device", "tpu"], ["device 'tpu' is unknown; use 'auto', 'cpu', 'cuda'"]),
        "transfer": (["--prompt", "x", "--transfer", "fast"], ["transfer", "'pinned_copy', 'uva_pool'", "got 'fast'"]),
        "top_k": (["--prompt", "x", "--top-k", "-1"], ["top_k must be an integer >= 0, got -1"]),
        "top_p": (["--prompt", "x", "--top-p", "0"], ["top_p must be > 0 and <= 1, got 0.0"]),
        "logprobs": (["--prompt", "x", "--logprobs", "21"], ["logprobs must be at most max_logprobs = 20, got 21"]),
        "two forms": (["--prompt", "x", "--regex", "a", "--json-schema", "{}"], ["one of json_schema, regex, choice"]),
        "no schema": (["--prompt", "x", "--json-schema", "nowhere.json"], ["No such file", "nowhere.json"]),
        "schema no JSON": (["--prompt", "x", "--json-schema", "{a}"], ["json_schema is no JSON"]),
        "runner": (["--prompt", "x", "--runner", "v3"], ["runner must be one of"]),
        "not unicode": (["--prompt", "x\udcff"], ["not valid Unicode"]),
    }.values(),
    ids=lambda words: "-".join(words)[:40].encode("ascii", "replace").decode(),
)
def test_what_is_wrong_is_one_line(words: list[str], said: list[str]) -> None:
    fails(generate(*words), *said)


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    fails(generate("--prompt", "x", "--model", str(tmp_path)), "config.json is missing")


def test_an_error_of_many_lines_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("a tensor\n  is missing:\n\n  x")

    monkeypatch.setattr("mrv2lab.engine.engine.load_model", refuse)
    fails(generate("--prompt", "x"), "mrv2lab: a tensor is missing: x\n")


def test_cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fails(generate("--prompt", "x", "--device", "cuda"), "device 'cuda' was asked for", "use device='cpu' or 'auto'")


def test_no_prompt_at_all_is_usage() -> None:
    result = call("generate")
    assert result.exit_code == 2
    assert "--prompt" in result.stderr


# -- info --------------------------------------------------------------------------------------------------------------


def facts() -> dict[str, object]:
    result = call("info", "--json")
    assert result.exit_code == 0, result.output
    made: dict[str, object] = json.loads(result.stdout)
    return made


def test_info_on_this_machine() -> None:
    made = facts()
    assert list(made) == FACTS
    assert made["torch"] == torch.__version__
    assert made["device"] == ("cuda" if torch.cuda.is_available() else "cpu")


def test_info_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made = facts()
    assert (made["gpu"], made["device"], made["kernels"]) == (None, "cpu", "spec (NumPy and torch)")
    assert "everything runs on the CPU" in made["missing"]["gpu"]  # type: ignore[index]
    plain = call("info")
    assert "missing: gpu - " in plain.stdout
    assert "None" not in plain.stdout
    assert "attention" in plain.stdout and "torch (auto)" in plain.stdout


def test_info_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """``None`` in ``sys.modules`` is how Python marks what cannot be imported."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    made = facts()
    assert made["triton"] is None
    assert made["missing"]["triton"].startswith("pip install triton (Linux only); needed on a GPU")  # type: ignore[index]


@pytest.mark.parametrize(
    ("package", "remedy"),
    [("flashinfer", "pip install -e '.[flashinfer]'"), ("llguidance", "pip install -e '.[grammar]'")],
)
def test_info_names_extras_that_are_missing(monkeypatch: pytest.MonkeyPatch, package: str, remedy: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    said = facts()["missing"][package]  # type: ignore[index]
    assert said.startswith("optional: in a checkout: ") and remedy in said


def test_info_names_a_package_by_what_installed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"flashinfer-python": "0.6.1"}
    module = ModuleType("flashinfer")
    module.__spec__ = ModuleSpec("flashinfer", None)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(machine.importlib.metadata, "version", lambda name: versions.get(name, "1"))
    made = facts()
    assert made["flashinfer"] == "0.6.1" and "flashinfer" not in made["missing"]  # type: ignore[operator]


@pytest.mark.parametrize("triton", [True, False])
def test_info_on_a_gpu(monkeypatch: pytest.MonkeyPatch, triton: bool) -> None:
    """What ``device="auto"`` takes; without Triton that is an error, so it is not said to work."""
    if not triton:
        monkeypatch.setitem(sys.modules, "triton", None)
    elif "triton" in facts()["missing"]:  # type: ignore[operator]
        pytest.skip("no Triton here")
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    made = facts()
    assert (made["gpu"], made["device"], made["stream"]) == ("NVIDIA H200", "cuda", "CUDA streams")
    assert made["kernels"] == ("triton (compiled)" if triton else None)
    assert made["attention"] == ("triton (auto), torch" if triton else None)
    assert "gpu" not in made["missing"]  # type: ignore[operator]
    assert triton or "the GPU cannot be used without it" in made["missing"]["triton"]  # type: ignore[index]


WITHOUT_TORCH = "import sys; sys.modules['torch'] = sys.modules['triton'] = None; from mrv2lab.cli import app; app()"


@pytest.mark.parametrize("words", [("info",), ("info", "--json"), ("generate", "--prompt", "x")])
def test_without_torch(words: tuple[str, ...]) -> None:
    """In a process of its own, so that nothing is loaded already."""
    command = [sys.executable, "-c", WITHOUT_TORCH, *words]
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=root)
    if words[0] == "generate":
        assert done.returncode == 2
        assert done.stderr == "mrv2lab: generating text needs torch; in a checkout: pip install -e '.[engine]'\n"
        return
    assert (done.returncode, done.stderr) == (0, "")
    if "--json" in words:
        made = json.loads(done.stdout)
        assert [made[name] for name in ("torch", "torch_threads", "gpu", "device", "attention")] == [None] * 5
        assert list(made["missing"])[:2] == ["torch", "triton"]
    else:
        assert "missing: torch - in a checkout: pip install -e '.[engine]'" in done.stdout
