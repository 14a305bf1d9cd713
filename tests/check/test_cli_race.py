"""``mrv2lab race`` as a shell sees it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mrv2lab.cli import app

KEYS = "policy depth stream runner steps corrupted_steps hazards wait_ns waits wrong_tokens error".split()


def call(*words: str) -> Result:
    return CliRunner().invoke(app, ["race", *words])


def facts(*words: str) -> dict[str, Any]:
    result = call(*words, "--steps", "8", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    made: dict[str, Any] = json.loads(result.stdout)
    assert list(made) == KEYS
    return made


def test_unsafe_as_json() -> None:
    made = facts("--policy", "unsafe")
    assert made["corrupted_steps"] == list(range(7))
    assert made["wait_ns"] == 0
    assert made["wrong_tokens"]["6"] == 6
    first = made["hazards"][0]
    assert list(first) == "buffer step kind reader writer between changed".split()
    assert (first["buffer"], first["step"], first["kind"]) == ("prompt_len", 0, "copy")
    assert first["between"] == ["the beginning of update_states", "the end of update_states"]


def test_a_pool_of_one_and_of_two() -> None:
    assert facts("--policy", "uva_pool", "--depth", "1")["hazards"]
    two = facts("--policy", "uva_pool", "--depth", "2")
    assert (two["hazards"], two["corrupted_steps"], two["wait_ns"]) == ([], [], 0)


@pytest.mark.usefixtures("host_clock")
def test_the_barrier_pays_in_time() -> None:
    made = facts("--policy", "barrier")
    assert (made["hazards"], made["corrupted_steps"]) == ([], [])
    assert made["wait_ns"] == made["waits"]["barrier"]["wait_ns"] > 0


def test_in_words() -> None:
    result = call("--policy", "unsafe", "--steps", "4")
    assert result.exit_code == 0
    assert "corrupted steps: 3 [0, 1, 2]" in result.stdout
    assert "(modelled)" in result.stdout
    named = [line.strip() for line in result.stdout.splitlines() if line.startswith("    ")]
    assert len(named) == 8
    assert all(line.partition(": ")[2].isdigit() for line in named)
    quiet = call("--policy", "barrier", "--steps", "4", "--stream", "threaded").stdout
    assert "hazards:         0\nwaited:" in quiet


def test_a_depth_without_a_pool_is_said() -> None:
    result = call("--policy", "barrier", "--depth", "3", "--steps", "3")
    assert result.exit_code == 0
    assert result.stderr == "mrv2lab: --depth changes nothing here: 'barrier' has no pool, only 'uva_pool' has.\n"
    assert call("--policy", "uva_pool", "--depth", "3", "--steps", "3").stderr == ""


@pytest.mark.parametrize(
    ("words", "said"),
    {
        "policy": (["--policy", "hope"], "transfer must be one of"),
        "stream": (["--stream", "fast"], "stream must be one of"),
        "steps": (["--steps", "0"], "steps must lie between 1 and 200, got 0"),
        "depth": (["--policy", "uva_pool", "--depth", "0"], "pool_depth must be a positive integer, got 0"),
        "runner": (["--runner", "v3"], "runner must be one of"),
    }.values(),
)
def test_bad_input(words: list[str], said: str) -> None:
    result = call(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("mrv2lab: ")
    assert said in result.stderr
