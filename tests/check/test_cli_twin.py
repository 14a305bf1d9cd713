"""``mrv2lab twin`` as a shell sees it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mrv2lab.check import workloads
from mrv2lab.check.compare import NearReport
from mrv2lab.check.twin import TwinReport
from mrv2lab.cli import app
from mrv2lab.teach import mutants


def call(*words: str) -> Result:
    return CliRunner().invoke(app, ["twin", *words])


def test_json() -> None:
    result = call("--a", "v1", "--b", "mrv2", "--workloads", "2", "--seed", "0", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    facts = json.loads(result.stdout)
    assert facts["equal"] is True and facts["difference"] is None
    assert (facts["equality"], facts["workloads"]) == ("exact", 2)
    assert facts["rows"] > facts["steps"] > 20


def test_a_sentence() -> None:
    result = call("--a", "v1-unordered", "--workloads", "1", "--seed", "3")
    assert result.exit_code == 0
    assert result.stdout.startswith("v1-unordered and mrv2 are equal (near): 1 workloads, ")


def test_every_sampling_parameter() -> None:
    result = call("--sampling", "all", "--workloads", "2", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    facts = json.loads(result.stdout)
    assert facts["equal"] is True and facts["tokens"] > 0
    with mutants.v1_prompt_logprobs_off_by_one():
        result = call("--sampling", "all", "--workloads", "2", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["difference"]["tensor"] == "prompt_logprobs"


@pytest.mark.parametrize("as_json", [True, False])
def test_a_difference_is_printed_and_exits_with_1(as_json: bool) -> None:
    """The bug is MRV2's, so V1 does not have it."""
    with mutants.new_block_overwrites_first():
        result = call("--workloads", "5", *(["--json"] if as_json else []))
    assert result.exit_code == 1
    if as_json:
        facts = json.loads(result.stdout)
        assert facts["equal"] is False and facts["workloads"] <= 5
        assert {"step", "tensor", "request", "at", "a", "b", "text"} <= facts["difference"].keys()
        assert facts["difference"]["tensor"] in ("slot_mapping", "block_table")
        assert facts["setting"]["loop"] in ("sync", "async")
    else:
        assert "v1 and mrv2 differ (exact)" in result.stdout
        assert "slot_mapping of request" in result.stdout or "block_table of request" in result.stdout


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"steps": 0, "rows": 0, "tokens": 0}, "nothing was compared"),
        ({"excused": 9}, "more tokens are excused than chance explains"),
    ],
    ids=["nothing", "excused"],
)
def test_it_says_why_two_differ_without_a_difference(
    change: dict[str, int], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_twin(*_: Any, **__: Any) -> TwinReport:
        steps, near = change.get("steps", 5), NearReport(change.get("rows", 99), change.get("tokens", 99))
        near.excused = change.get("excused", 0)
        return TwinReport("near", ("a", "b"), steps, near, None, {}, None)

    monkeypatch.setattr(workloads, "run_twin", run_twin)
    result = call("--workloads", "1")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[1:] == [why]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--a", "v2"], "a side of a twin is one of mrv2, v1, v1-unordered, got 'v2'"),
        (["--device-b", "tpu"], "device 'tpu' is unknown"),
        (["--sampling", "some"], "sampling must be 'plain' or 'all', got 'some'"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str) -> None:
    result = call(*words)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("mrv2lab: ") and result.stderr.count("\n") == 1
    assert said in result.stderr
