"""The panel runs what it shows: widgets and plain Python do the same, and what cannot be is a sentence."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mrv2lab.engine.workload import burst
from mrv2lab.recorder import workload_panel
from mrv2lab.recorder.workload_form import OWN, WorkloadForm, mix_sampling, parse_range
from mrv2lab.recorder.workload_panel import WorkloadPanel

QUICK: dict[str, Any] = {
    "requests": 3,
    "prompt_len": "4-8",
    "max_tokens": "5",
    "steps": 8,
    "device": "cpu",
    "model": "tiny-draft",
}
PATIENCE_S = 60


def panel(**values: Any) -> WorkloadPanel:
    return WorkloadPanel(**QUICK | values)


# -- the same in Python ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"v1": False, "mrv2_policy": "pinned_copy", "async_scheduling": False},
        {"arrivals": "steady", "every": 2, "sampled": 0.7, "temperature": 1.1, "seeded": 0.5, "seed": 5, "steps": 0},
        {"mrv2": False, "v1_policy": "uva_pool", "model": "tiny", "sampled": 1.0},
    ],
    ids=["both", "mrv2", "mixed", "v1"],
)
def test_the_code_shown_makes_the_same_runs(values: dict[str, Any]) -> None:
    one = panel(**values)
    code = one.settings()
    runs = one.run(PATIENCE_S)
    space: dict[str, Any] = {}
    exec(code, space)
    assert list(runs) == list(space["runs"]) == ["A", "B"][: one.form().num_settings]
    for name, run in runs.items():
        same = space["runs"][name]
        assert run.error is None and run.report is not None
        assert run.token_ids == same.token_ids != []
        assert run.settings == same.settings
        assert run.figures["steps"] == same.figures["steps"]


def test_the_code_of_a_csv_file(tmp_path: Path) -> None:
    path = tmp_path / "it's a table.csv"
    path.write_text("step,prompt_len,max_tokens\n0,4,3\n2,5,3\n", encoding="utf-8")
    one = panel(arrivals="csv", csv=str(path), v1=False)
    space: dict[str, Any] = {}
    exec(one.settings(), space)
    runs = one.run(PATIENCE_S)
    assert runs["A"].token_ids == space["runs"]["A"].token_ids
    assert [len(ids) for ids in runs["A"].token_ids] == [3, 3]


def test_the_code_follows_the_controls_and_the_names() -> None:
    one = panel()
    assert "transfer" not in one._code.value and "burst(3, " in one._code.value
    one.controls["mrv2_policy"].value = "pinned_copy"
    one.controls["requests"].value = 4
    assert "'transfer': 'pinned_copy'" in one._code.value and "burst(4, " in one._code.value
    assert one._code.value == one.settings()
    one.controls["prompt_len"].value = "many"
    assert one._code.value == "# prompt length must be a number of tokens or a range like 8-32, got 'many'"


def test_mutant_a_panel_with_another_seed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = workload_panel.run_settings

    def other(workload: Any, settings: Any, **how: Any) -> Any:
        return real(burst(len(workload), prompt_len=(4, 8), max_tokens=5, seed=99), settings, **how)

    monkeypatch.setattr(workload_panel, "run_settings", other)
    with pytest.raises(AssertionError):
        test_the_code_shown_makes_the_same_runs({"v1": False})


# -- runs --------------------------------------------------------------------------------------------------------------


def test_runs_get_letters_and_stay() -> None:
    one = panel(v1=False)
    assert list(one.run(PATIENCE_S)) == ["A"]
    one.controls["v1"].value = True
    assert list(one.run(PATIENCE_S)) == ["B", "C"]
    assert list(one.runs) == ["A", "B", "C"]
    assert list(one.frame().columns) == ["A: mrv2", "B: v1", "C: mrv2"]
    assert one.message.startswith("Done: B and C.")
    assert "<table" in one._figures.value and not one.run_button.disabled and one.cancel_button.disabled
    assert not one.running


def test_the_code_is_of_the_runs_just_made_until_a_control_changes() -> None:
    one = panel()
    before = one._code.value
    assert before.startswith("# runs A and B\n")
    one.run(PATIENCE_S)
    assert one._code.value == before
    assert one.settings().startswith("# runs C and D\n")
    one.controls["requests"].value = 4
    assert one._code.value == one.settings()


def test_figures_are_in_words() -> None:
    one = panel(v1=False)
    one.run(PATIENCE_S)
    assert "median step, µs" in one._figures.value and "step_us" not in one._figures.value
    assert ("step_us", "") in one.frame().index


def test_overlay() -> None:
    one = panel(v1_policy="barrier")
    with pytest.raises(ValueError, match="nothing has run yet"):
        one.overlay()
    one.run(PATIENCE_S)
    both, alone = one.overlay(), one.overlay("B", height=300)
    assert both.traces == (one.runs["A"].trace, one.runs["B"].trace)
    assert alone.traces == (one.runs["B"].trace,)
    with pytest.raises(ValueError, match="no run 'Z'; there is A, B"):
        one.overlay("A", "Z")
    both.close()
    alone.close()


def held(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Runs that stand before their second step: events that say that one stands, and let it go on."""
    stands, go = threading.Event(), threading.Event()
    real = WorkloadPanel._go_on

    def hold(self: WorkloadPanel, form: Any, names: Any, name: str, turns: int) -> bool:
        if turns == 1:
            stands.set()
            assert go.wait(PATIENCE_S)
        return real(self, form, names, name, turns)

    monkeypatch.setattr(WorkloadPanel, "_go_on", hold)
    return stands, go


def test_cancel_ends_the_run_at_its_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    stands, go = held(monkeypatch)
    one = panel()
    one.run_button.click()
    assert stands.wait(PATIENCE_S)
    assert one.running and one.run_button.disabled and not one.cancel_button.disabled
    assert not one.start()
    assert "A run is going on" in one.message
    one.cancel_button.click()
    go.set()
    assert one._thread is not None
    one._thread.join(PATIENCE_S)
    assert list(one.runs) == ["A"]
    assert one.runs["A"].figures["steps"] == 1
    assert "Cancelled" in one.message and not one.run_button.disabled
    assert "'B'" in one.settings()  # the name that was not used
    assert list(one.run(PATIENCE_S)) == ["B", "C"]


def test_a_run_that_is_waited_for_too_shortly_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    _, go = held(monkeypatch)
    one = panel(v1=False)
    with pytest.raises(TimeoutError, match=r"panel\.cancel\(\)"):
        one.run(0.01)
    go.set()
    assert one._thread is not None
    one._thread.join(PATIENCE_S)
    assert one.runs["A"].error is None


def test_the_time_limit_ends_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(float(second) for second in range(10**6))
    monkeypatch.setattr(workload_panel, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    one = panel(time_limit_s=4.0, steps=0)
    one.run(PATIENCE_S)
    assert one.runs["A"].figures["steps"] <= 4
    assert list(one.runs) == ["A"]
    assert "Stopped at the time limit of 4 s" in one.message


# -- what cannot be ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("requests", 0, "requests must be at least 1, got 0"),
        ("steps", -1, "steps must be at least 0"),
        ("prompt_len", "8-4", "prompt length must be at least 1 and its range must not fall, got '8-4'"),
        ("max_tokens", "", "output length must be a number"),
        ("model", "  ", "no model is given"),
        ("v1", False, "no runner is chosen"),
        ("time_limit_s", float("nan"), "the time limit must be a number"),
        ("arrivals", "csv", "no file is given"),
    ],
)
def test_bad_input_is_a_sentence_and_everything_stays(field: str, value: Any, sentence: str) -> None:
    one = panel(mrv2=field != "v1")
    before = {name: control.value for name, control in one.controls.items()}
    one.controls[field].value = value
    one.run_button.click()
    assert one.message.startswith("Cannot run: ") and sentence in one.message
    assert not one.running and one.runs == {}
    now = {name: control.value for name, control in one.controls.items()}
    assert {name for name in now if now[name] != before[name]} <= {field}
    with pytest.raises(ValueError, match="Cannot run"):
        one.run()


def test_too_many_requests_are_refused_before_any_is_made() -> None:
    one = panel()
    one.controls["requests"].value = 10**9
    assert one._code.value == "# requests must be at most 100,000, got 1,000,000,000"
    assert not one.start()


def test_two_threads_start_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    one, go_on, form = panel(), threading.Barrier(2), WorkloadPanel.form
    inside: list[int] = []

    def slow_form(self: WorkloadPanel) -> WorkloadForm:
        inside.append(1)
        threading.Event().wait(0.05)  # long enough for the other to come in, if it could
        return form(self)

    def start(started: list[bool]) -> None:
        go_on.wait(PATIENCE_S)
        started.append(one.start())

    monkeypatch.setattr(WorkloadPanel, "form", slow_form)
    started: list[bool] = []
    monkeypatch.setattr(one, "_work", lambda *args: threading.Event().wait(0.3))
    threads = [threading.Thread(target=start, args=(started,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert sorted(started) == [False, True] and inside == [1]


def test_a_csv_file_that_is_not_there_is_a_sentence() -> None:
    one = panel(arrivals="csv", csv="nowhere/work.csv")
    one.run_button.click()
    assert one.message.startswith(
        "Cannot run: the CSV file nowhere/work.csv cannot be used: it cannot be read (No such file or directory)"
    )


def test_a_csv_file_that_is_wrong_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "work.csv"
    path.write_text("step,prompt_len\n0,many\n", encoding="utf-8")
    one = panel(arrivals="csv", csv=str(path))
    one.run_button.click()
    assert one.message == (
        f"Cannot run: the CSV file {path} cannot be used: line 2: prompt_len must be an integer, got 'many'"
    )


def test_a_model_that_is_not_there_is_a_sentence_and_the_panel_goes_on() -> None:
    one = panel(model="no-such-<b>model</b>")
    assert one.run(PATIENCE_S) == {}
    assert one.message.startswith("A failed: ") and "no-such-" in one.message
    assert "<b>model" not in one._status.value  # inert
    one.controls["model"].value = "tiny-draft"
    assert list(one.run(PATIENCE_S)) == ["A", "B"]


def test_a_thread_that_breaks_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload_panel, "run_settings", lambda *a, **b: 1 // 0)
    one = panel()
    one.run(PATIENCE_S)
    assert one.message.startswith("The run broke off: ZeroDivisionError")
    assert not one.run_button.disabled


def test_bad_values_to_begin_with() -> None:
    with pytest.raises(ValueError, match="requests"):
        WorkloadPanel(requests=0)
    with pytest.raises(TypeError, match="pigeons"):
        WorkloadPanel(pigeons=1)


def test_an_empty_panel_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert panel().message == "Nothing has run yet: press Run. No CUDA device here: device times are modelled."
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    message = panel().message
    assert "NVIDIA H200: device times are measured." in message and "Nsight" in message


def test_every_control_has_a_label_and_can_be_reached() -> None:
    one = panel()
    assert set(one.controls) == set(WorkloadForm.__dataclass_fields__)
    shown = [control for row in one.children for control in getattr(row, "children", ())]
    assert set(map(id, one.controls.values())) <= set(map(id, shown))
    for control in [*one.controls.values(), one.run_button, one.cancel_button, one._bar, one._code]:
        assert control.description.strip()
        assert getattr(control, "tabbable", None) is not False
    assert 'role="status"' in one._status.value and 'aria-live="polite"' in one._status.value


def test_controls_that_do_not_apply_are_disabled() -> None:
    one = panel()
    assert one.controls["every"].disabled and one.controls["csv"].disabled
    one.controls["arrivals"].value = "csv"
    assert one.controls["requests"].disabled and not one.controls["csv"].disabled
    one.controls["arrivals"].value = "steady"
    assert not one.controls["every"].disabled and not one.controls["requests"].disabled


# -- the mix -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampled", "seeded", "counts"), [(0, 1, (8, 0, 0)), (1, 0, (0, 8, 0)), (0.5, 0.25, (4, 3, 1))]
)
def test_shares_of_the_mix(sampled: float, seeded: float, counts: tuple[int, int, int]) -> None:
    work = burst(8, temperature=0.3)
    mixed = mix_sampling(work, temperature=0.9, sampled=sampled, seeded=seeded, seed=1)
    params = [arrival.params for arrival in mixed]
    greedy = sum(one.temperature == 0 and one.seed is None for one in params)
    drawn = sum(one.temperature == 0.9 and one.seed is None for one in params)
    own = sum(one.temperature == 0.9 and one.seed is not None for one in params)
    assert (greedy, drawn, own) == counts
    assert [(a.step, a.prompt, a.params.max_tokens) for a in mixed] == [
        (a.step, a.prompt, a.params.max_tokens) for a in work
    ]
    assert mixed == mix_sampling(work, temperature=0.9, sampled=sampled, seeded=seeded, seed=1)


@pytest.mark.parametrize("how", [{"sampled": 1.5}, {"seeded": -0.1}, {"temperature": 0.0}, {"temperature": np.nan}])
def test_mixes_that_cannot_be(how: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(how))):
        mix_sampling(burst(2), **how)


def test_ranges() -> None:
    assert [parse_range(text, "x") for text in ("16", " 8 - 32 ", "8..32", "8 to 32")] == [
        16,
        (8, 32),
        (8, 32),
        (8, 32),
    ]
    for text in ("0", "-3", "1-", "a", "3-2", "1.5", "9" * 20):
        with pytest.raises(ValueError, match="x must be"):
            parse_range(text, "x")


def test_the_runners_own_policy_is_left_to_the_engine() -> None:
    form = WorkloadForm(v1_policy=OWN, mrv2_policy="barrier", device="cpu")
    assert form.settings(["A", "B"]) == {
        "A": {"runner": "v1", "device": "cpu", "async_scheduling": True},
        "B": {"runner": "mrv2", "device": "cpu", "transfer": "barrier", "async_scheduling": True},
    }
