"""What each panel of the step explorer is given equals what stood on the device around that step."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mrv2lab.engine.engine import Engine
from mrv2lab.observer import PHASES
from mrv2lab.protocol import SamplingParams
from mrv2lab.recording import replay_trace
from mrv2lab.recording.replay import Replay
from mrv2lab.recording.replay_checksum import table_checksum
from mrv2lab.recording.schema import Array, MarkRecord, SpanRecord, StepRecord, TopK
from mrv2lab.recording.view import StepView, step_view
from mrv2lab.recording.view_times import timeline
from tests.engine.small import MODEL
from tests.recording.runs import ASYNC, SIZES, SYNC, Capture, Run, random_run

BLOCK = SIZES["block_size"]
NUMBERS = "prompt_len prefill_len total_len num_computed_tokens last_sampled_tokens temperature".split()
BY_COLUMN = {"num_blocks": (0, None), "next_prefill_tokens": (0, None), "draft_tokens": (None, 0)}


@pytest.fixture(scope="module", params=[SYNC, ASYNC], ids=["sync", "async"])
def run(request: pytest.FixtureRequest) -> Run:
    run = random_run(120, request.param, seed=7)
    run.texts = {token: f"<{token}>" for token in range(61)}
    return run


@pytest.fixture
def mine(run: Run) -> Run:
    """A run to be spoiled."""
    return copy.deepcopy(run)


def column_of(tables: dict[str, Array], name: str) -> Array:
    """A column of the rows panel, from whole tables."""
    if name in BY_COLUMN:
        first, second = BY_COLUMN[name]
        return tables[name][0] if first == 0 else tables[name][:, second or 0]
    return tables[name]


def check_rows(run: Run, index: int, view: StepView) -> None:
    """The rows before the step are the device's after the previous one; with every change made, after this one."""
    names = [column["name"] for column in view.meta["row_columns"] if column["kind"] in ("int", "token", "float")]
    assert set(names) == {*NUMBERS, *BY_COLUMN}
    now: dict[str, list[Any]] = {name: view.columns[f"rows.{name}"].tolist() for name in names}
    if index:
        for name in names:
            assert now[name] == column_of(run.live[index - 1], name).tolist(), name
    now["request"] = view.columns["rows.request"].tolist()
    for change in view.meta["changes"]:
        if change["column"] in now:
            held = now[change["column"]][change["row"]]
            assert held == pytest.approx(change["before"]), change
            now[change["column"]][change["row"]] = change["after"]
    for name in names:
        assert now[name] == pytest.approx(column_of(run.live[index], name).tolist()), name
    requests = view.meta["requests"]
    assert {requests[r]: row for row, r in enumerate(now["request"]) if r >= 0} == run.owners[index]


def check_texts(run: Run, index: int, view: StepView) -> None:
    live = run.live[index]
    for row in run.owners[index].values():
        text = "".join(f"<{token}>" for token in live["all_token_ids"][row, : live["total_len"][row]])
        assert view.meta["tails"][str(row)] == text[-40:]
        assert view.meta["seeds"][str(row)] == str(live["seeds"][row])
        of_row = [c for c in view.meta["changes"] if c["row"] == row]
        texts = [c for c in of_row if c["column"] == "all_token_ids"]
        assert not texts or texts[-1]["after"] == text[-40:]
        blocks = [c for c in of_row if c["column"] == "block_table.0"]
        ids = live["block_table.0"][row, : live["num_blocks"][0, row]].tolist()
        assert not blocks or blocks[-1]["after"].removeprefix("… ") == " ".join(map(str, ids[-8:]))


def check_gather(run: Run, index: int, view: StepView) -> None:
    """Batch, tokens, slots and block tables are what stands in the device's input buffers."""
    live, record, columns = run.live[index], run.steps[index], view.columns
    r, t = len(record.rows), int(record.num_scheduled.sum())
    assert [entry["row"] for entry in view.meta["batch"]] == (live["idx_mapping"][:r].tolist() if r else [])
    assert [view.meta["requests"][entry["request"]] for entry in view.meta["batch"]] == record.req_ids
    if not r:
        assert all(len(columns[name]) == 0 for name in columns if name.startswith("tokens."))
        return
    assert columns["batch.query_start_loc"].tolist() == live["query_start_loc"][: r + 1].tolist()
    assert columns["batch.seq_lens"].tolist() == live["seq_lens"][:r].tolist()
    assert columns["batch.num_scheduled"].tolist() == record.num_scheduled.tolist()
    assert columns["batch.num_computed"].tolist() == (live["seq_lens"][:r] - record.num_scheduled).tolist()
    assert columns["tokens.input_ids"].tolist() == live["input_ids"][:t].tolist()
    assert columns["tokens.positions"].tolist() == live["positions"][:t].tolist()
    assert columns["tokens.slots"].tolist() == live["slot_mappings"][0, :t].tolist()
    assert columns["tokens.logits_indices"].tolist() == live["logits_indices"][:r].tolist()
    for i, table in enumerate(view.meta["tables"]):
        assert table == live["input_block_table.0"][i, : live["num_blocks"][0, record.rows[i]]].tolist()
    assert len(view.meta["tables"]) == r


def check_pages(run: Run, index: int, view: StepView) -> None:
    """Block by block, the plain way."""
    live = run.live[index]
    holders: dict[int, list[tuple[int, int]]] = {}
    for row in run.owners[index].values():
        for place, block in enumerate(live["block_table.0"][row, : live["num_blocks"][0, row]].tolist()):
            valid = min(max(int(live["num_computed_tokens"][row]) - place * BLOCK, 0), BLOCK)
            holders.setdefault(block, []).append((row, valid))
    slots = live["slot_mappings"][0]
    written = (slots[slots >= 0] // BLOCK).tolist() if len(run.steps[index].rows) else []
    for block in range(SIZES["num_blocks"]):
        held = holders.get(block, [])
        owner = -2 if block == 0 else held[0][0] if held else -1
        expected = (owner, len(held), max([valid for _, valid in held], default=0), written.count(block))
        names = "owner shared fill written".split()
        assert tuple(int(view.columns[f"pages.{name}"][block]) for name in names) == expected, block


CHECKS: list[Callable[[Run, int, StepView], None]] = [check_rows, check_texts, check_gather, check_pages]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_every_panel_equals_a_readback(run: Run, check: Callable[[Run, int, StepView], None]) -> None:
    replay = Replay(run)
    known = [i for i, record in enumerate(run.steps) if record.sampled is not None or not record.req_ids]
    assert len(known) >= 118
    for index in np.random.default_rng(0).permutation(known).tolist():
        check(run, index, step_view(replay, index))


def test_shared_blocks_occur(run: Run) -> None:
    replay = Replay(run)
    assert max(step_view(replay, index).columns["pages.shared"].max() for index in range(100)) > 1


# -- mutants -----------------------------------------------------------------------------------------------------------


def failing(run: Run) -> set[str]:
    """Checks that fail on some step."""
    replay, failed = Replay(run), set()
    for index in range(110):
        view = step_view(replay, index)
        for check in CHECKS:
            try:
                check(run, index, view)
            except AssertionError:
                failed.add(check.__name__)
    return failed


def test_no_check_fails_without_a_mutant(run: Run) -> None:
    assert failing(run) == set()


def test_a_tracer_blind_to_kernels_is_found(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_trace, "is_row_table", lambda name: name not in ("total_len", "num_computed_tokens"))
    monkeypatch.setattr(replay_trace.Tracer, "_small_tables", lambda self: {
        name: table.copy() for name, table in self._state.tables.items()
    })  # fmt: skip
    assert "check_rows" in failing(run)


def test_a_batch_looked_at_too_late_is_found(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters advance in postprocess: a batch copied behind it shows the next step's."""
    of = replay_trace.BatchTrace.of.__func__  # type: ignore[attr-defined]

    def late(cls: Any, state: Any, record: Any) -> Any:
        batch = of(cls, state, record)
        batch.num_computed = batch.num_computed + record.num_scheduled
        return batch

    monkeypatch.setattr(replay_trace.BatchTrace, "of", classmethod(late))
    assert failing(run) == {"check_gather"}


def test_pages_of_rows_that_are_gone_are_found(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrv2lab.recording.replay_program.State.move_rows", lambda self, record: self.owners.update(
        {new.req_id: new.row for new in record.new}
    ))  # fmt: skip
    assert "check_pages" in failing(run)


# -- the rest of meta --------------------------------------------------------------------------------------------------


def test_meta_is_json_and_complete(run: Run) -> None:
    """Every name of the contract is there, and nothing JSON cannot say."""
    from mrv2lab.recording import view as module

    replay = Replay(run)
    contract = (module.__doc__ or "").split("``meta``::")[1].split("``columns``::")
    promised, columns = (
        {name for line in re.findall(r"^    (\S.*?)(?:  .*| \[.*)?$", part, re.M) for name in line.split(", ")}
        for part in contract
    )
    assert {"index", "words", "max_num_reqs", "checked", "finish_reasons"} <= promised and "pages.fill" in columns
    for index in range(0, 120, 7):
        view = step_view(replay, index)
        assert promised == set(view.meta)
        assert {name for name in columns if "<" not in name} <= set(view.columns)
        json.dumps(view.meta, allow_nan=False)
        assert {array.dtype.name for array in view.columns.values()} == {"int32", "float32"}
        stops = view.meta["phases"]
        assert stops[0] == "before" and stops[1:] == sorted(stops[1:], key=PHASES.index)
        assert {change["phase"] for change in view.meta["changes"]} <= set(stops)


def test_every_named_token_has_an_entry_in_texts(run: Run) -> None:
    replay = Replay(run)
    for index in range(0, 120, 7):
        view = step_view(replay, index)
        named = {*view.columns["tokens.input_ids"].tolist(), *(t for row in view.meta["sampled"] or () for t in row)}
        named |= {c["after"] for c in view.meta["changes"] if c["column"] in ("last_sampled_tokens", "draft_tokens")}
        named |= {v for diff in view.meta["diffs"] if diff["table"] == "all_token_ids" for v in diff["values"]}
        assert all(view.meta["texts"][str(token)] == f"<{token}>" for token in named)


def test_a_new_owner_overwrites_every_table(run: Run) -> None:
    """What ``add_request`` must not forget, though a value may be the one that stood there."""
    replay, seen = Replay(run), 0
    for index, record in enumerate(run.steps[:100]):
        view = step_view(replay, index)
        for new in record.new:
            of_row = [c for c in view.meta["changes"] if c["row"] == new.row and c["phase"] == "apply_writes"]
            assert {(c["column"], c["by"]) for c in of_row} == {
                *((name, "publish") for name in "prompt_len prefill_len num_blocks temperature seed".split()),
                *((name, "fused_apply_write") for name in "all_token_ids total_len num_computed_tokens".split()),
                ("block_table.0", "fused_apply_write"),
            }
            assert {c["writer"] for c in of_row} == {"cpu"}
            seen += any(c["before"] == c["after"] for c in of_row)
    assert seen


def test_a_step_in_words_and_kinds() -> None:
    """A prompt of 20 in chunks of 14 and 6, then decodes, beside a short one."""
    with Engine(MODEL, device="cpu", **SIZES | SYNC) as engine:
        capture = Capture(engine)
        engine.submit(list(range(20, 40)), SamplingParams(3, ignore_eos=True), request_id="long")
        engine.submit([50, 51], SamplingParams(2, ignore_eos=True), request_id="short")
        while engine.has_work():
            capture.step()
    replay = Replay(capture.run)
    views = [step_view(replay, index).meta for index in range(len(capture.run.steps))]
    assert [[(v["requests"][e["request"]], e["kind"]) for e in v["batch"]] for v in views] == [
        [("long", "chunk")],
        [("short", "prefill"), ("long", "prefill")],
        [("long", "decode"), ("short", "decode")],
        [("long", "decode")],
        [],
    ]
    assert [v["words"] for v in views] == [
        [
            "long gets 14 of the 20 tokens it could compute: a step's tokens are limited",
            "long enters row 7: 20 prompt tokens, of which 0 cached",
            "long prefills a chunk: 14 of the 20 tokens left",
        ],
        [
            "short enters row 6: 2 prompt tokens, of which 0 cached",
            "short prefills 2 tokens",
            "long prefills 6 tokens",
        ],
        ["2 requests decode one token each", "short ended (length); its row 6 is freed at the next step"],
        [
            "row 6 is free again: short ended",
            "long decodes one token",
            "long ended (length); its row 7 is freed at the next step",
        ],
        ["row 7 is free again: long ended", "nobody computes anything: the runner only hears who is gone"],
    ]
    assert views[0]["phases"] == ["before", "update_states", "apply_writes", "prepare_inputs", "gather", "sample",
                                  "postprocess"]  # fmt: skip
    assert views[4]["phases"] == ["before", "update_states"]
    assert views[2]["finish_reasons"] == {str(views[2]["requests"].index("short")): "length"}


def test_what_is_missing_is_said(mine: Run) -> None:
    mine.texts = {}
    mine.steps[50].spans = [SpanRecord("forward", 1000, 3000)]
    meta = step_view(Replay(mine), 50).meta
    assert [note.split(";")[0] for note in meta["notes"]] == [
        "token texts are not known (no tokenizer)",
        "logits were not recorded",
        "device times were not recorded",
    ]
    assert set(meta["texts"].values()) == {None}
    assert set("".join(meta["tails"].values())) <= set("0123456789 ")


def test_times_count_from_the_first_span(mine: Run) -> None:
    record = mine.steps[50]
    record.spans = [SpanRecord("forward", 7_000, 9_500, 0, 12_000), SpanRecord("schedule", 5_000, 6_000)]
    record.marks = [
        MarkRecord("h2d", "x", "main", ("a",), ("b",), "f.py:3", 8, 1_500, 8_000, "forward", 10_000, 11_000, True)
    ]
    meta = step_view(Replay(mine), 50).meta
    assert meta["spans"] == [
        {"name": "forward", "start": 2.0, "end": 4.5, "depth": 0, "device_end": 7.0, "added": False},
        {"name": "schedule", "start": 0.0, "end": 1.0, "depth": 0, "device_end": None, "added": False},
    ]
    assert meta["marks"] == [
        {
            "kind": "h2d", "name": "x", "stream": "main", "phase": "forward", "time": 3.0, "device_start": 5.0,
            "device_end": 6.0, "nbytes": 8, "wait": 1.5, "reads": ["a"], "writes": ["b"], "site": "f.py:3",
            "added": True,
        }
    ]  # fmt: skip


def test_logits_come_as_they_are_and_what_is_not_finite_as_null(mine: Run) -> None:
    mine.steps[50].top_k = TopK(np.array([[60, 3]], np.int32), np.array([[np.inf, 0.1]], np.float32))
    meta = step_view(Replay(mine), 50).meta
    assert meta["top_k"] == {"token_ids": [[60, 3]], "logits": [[None, 0.1]]}
    assert "logits" in meta["phases"] and "60" in meta["texts"]


def test_a_checked_step_and_a_diverged_one(mine: Run) -> None:
    for index in (15, 31):
        mine.steps[index].checksums = {n: table_checksum(n, mine.live[index]) for n in ("total_len", "seeds")}
    mine.steps[31].checksums["seeds"] ^= 2
    replay = Replay(mine)
    assert step_view(replay, 15).meta["checked"] == {"ok": True, "tables": 2}
    assert step_view(replay, 16).meta["checked"] is None
    assert step_view(replay, 16).meta["diverged"] is None
    assert step_view(replay, 31).meta["checked"] == {"ok": False, "tables": 2}
    sentence = f"step {mine.steps[31].step}: seeds on the device differs from the rebuilt one"
    assert step_view(replay, 40).meta["diverged"] == sentence


def test_a_step_in_flight_and_one_that_is_not_known(mine: Run) -> None:
    index = next(i for i in range(40, 100) if len(mine.steps[i].rows) and len(mine.steps[i + 1].rows))
    mine.steps[index].sampled = mine.steps[index + 1].sampled = None
    replay = Replay(mine)
    view = step_view(replay, index)
    assert "the tokens of this step are not known yet; its state is shown up to its gather" in view.meta["notes"]
    assert view.meta["sampled"] is None and not {"sample", "postprocess"} & set(view.meta["phases"])
    ids = view.columns["tokens.input_ids"].tolist()
    assert ids == mine.live[index]["input_ids"][: len(ids)].tolist()
    check_pages(mine, index, view)  # the KV is written all the same
    lost = step_view(replay, index + 1)
    assert any("is not known" in note for note in lost.meta["notes"])
    assert lost.meta["batch"] == [] and lost.meta["step"] == mine.steps[index + 1].step


def test_strings_stay_raw(mine: Run) -> None:
    """The widget makes them inert; a view that escaped them would show them twice escaped."""
    evil = '<img src=x onerror="alert(1)">\u202e'
    mine.texts = dict.fromkeys(range(61), evil)
    record = next(record for record in mine.steps if record.req_ids)
    mine.steps[:] = [record]
    record.owners = {evil: 7}
    record.req_ids = [evil] * len(record.req_ids)
    meta = step_view(Replay(mine), 0, title=evil).meta
    assert meta["title"] == evil and evil in meta["requests"] and evil in meta["texts"].values()


def test_what_a_live_source_says(run: Run) -> None:
    said: dict[str, Any] = {"title": "live engine", "live": True, "paused_after": "gather", "count": 9}
    meta = step_view(Replay(run), 3, texts={1: "one"}, **said).meta
    assert (meta["title"], meta["live"], meta["paused_after"], meta["count"]) == ("live engine", True, "gather", 9)
    assert (meta["mode"], meta["transfer"], meta["max_num_reqs"], meta["block_size"]) == ("record", "uva_pool", 8, 4)
    assert meta["texts"].get("1", "one") == "one"


# -- the timeline ------------------------------------------------------------------------------------------------------


def timed(*spans: tuple[str, int, int, int]) -> dict[str, Any]:
    """The timeline of spans (name, start, end, device end), in microseconds."""
    record = StepRecord(0, spans=[SpanRecord(n, a * 1000, b * 1000, device_end_ns=d * 1000) for n, a, b, d in spans])
    return timeline(record)


def test_phases_on_the_device_follow_each_other() -> None:
    made = timed(("schedule", 0, 10, -1), ("gather", 10, 20, 40), ("forward", 20, 50, 90), ("sample", 60, 70, 65))
    bars = [(bar["name"], bar["device_start"], bar["device_end"]) for bar in made["device_phases"]]
    assert bars == [("gather", 10, 40), ("forward", 40, 90)]
    assert made["spans"][3]["device_end"] == 65
    assert made["gap"] is None


def test_a_device_end_before_its_span_is_not_its_own() -> None:
    made = timed(("gather", 100, 110, 120), ("prepare_attn", 130, 140, 120))
    assert [span["device_end"] for span in made["spans"]] == [20, None]


def test_the_time_until_the_output_is_fetched_may_be_left_out() -> None:
    made = timed(("forward", 0, 100, 150), ("wait_output", 5000, 5010, -1), ("update_from_output", 5010, 5020, -1))
    assert made["gap"] == {"at": 150, "hidden": 5000 - 150 - 8}
    assert [span["start"] for span in made["spans"]] == [0, 5000, 5010], "the times themselves stay what they are"
    assert timed(("forward", 0, 100, 150), ("wait_output", 160, 170, -1))["gap"] is None
