"""A standing step as the explorer shows it: every panel is what the device has, and later what the recording says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mrv2lab.engine.engine import Engine
from mrv2lab.recorder import readback
from mrv2lab.recorder.live import LiveSource
from mrv2lab.recording.view import StepView
from mrv2lab.recording.view_rows import values_before
from tests.recorder.runs import busy_engine, work
from tests.recorder.test_live import engine_with_work
from tests.recorder.test_paused import LAUNCH


class Device:
    """What the device has at this moment, read without the code under test."""

    def __init__(self, engine: Engine) -> None:
        rt, self.runner = engine.rt, engine.worker.runner
        self.tables = {name: rt.read(table).numpy() for name, table in self.runner.tables().items()}
        self.columns = values_before(self.tables)
        self.owners = dict(self.runner.req_states.req_id_to_index)
        logits = self.runner.logits
        self.logits = rt.read(logits).float() if logits is not None else None


def check_rows(view: StepView, before: Device, now: Device) -> None:
    """The panel's values before the step, with the changes that it names, are the present ones."""
    meta, columns = view.meta, view.columns
    names = meta["requests"]
    shown = {names[i]: row for row, i in enumerate(columns["rows.request"].tolist()) if i >= 0}
    assert shown == before.owners
    after = {name: columns[f"rows.{name.removeprefix('rows.')}"].copy() for name in before.columns}
    for name, values in before.columns.items():
        np.testing.assert_array_equal(columns[name], values)
    owners = {row: names[i] for row, i in enumerate(columns["rows.request"].tolist()) if i >= 0}
    for change in meta["changes"]:
        column = f"rows.{change['column']}"
        if column in after:
            assert after[column][change["row"]] == np.array(change["before"], after[column].dtype), change
            after[column][change["row"]] = change["after"]
        elif change["column"] == "request":
            owners.pop(change["row"], None)
            if change["after"] >= 0:
                owners[change["row"]] = names[change["after"]]
    for name, values in now.columns.items():
        np.testing.assert_array_equal(after[name], values, name)
    assert {req_id: row for row, req_id in owners.items()} == now.owners
    for row in now.owners.values():
        assert meta["seeds"][str(row)] == str(int(now.tables["seeds"][row]))
        ids = now.tables["all_token_ids"][row, : now.tables["total_len"][row]]
        assert " ".join(map(str, ids)).endswith(meta["tails"][str(row)])


def check_batch(view: StepView, before: Device, now: Device) -> None:
    """The gather panel and the block tables."""
    meta, columns, tables = view.meta, view.columns, now.tables
    rows = [one["row"] for one in meta["batch"]]
    r, t = len(rows), len(columns["tokens.input_ids"])
    assert rows == tables["idx_mapping"][:r].tolist()
    assert [now.owners[meta["requests"][one["request"]]] for one in meta["batch"]] == rows
    np.testing.assert_array_equal(columns["batch.query_start_loc"], tables["query_start_loc"][: r + 1])
    np.testing.assert_array_equal(columns["batch.num_scheduled"], np.diff(tables["query_start_loc"][: r + 1]))
    np.testing.assert_array_equal(columns["batch.seq_lens"], tables["seq_lens"][:r])
    np.testing.assert_array_equal(columns["tokens.input_ids"], tables["input_ids"][:t])
    np.testing.assert_array_equal(columns["tokens.positions"], tables["positions"][:t])
    np.testing.assert_array_equal(columns["tokens.slots"], tables["slot_mappings"][0, :t])
    np.testing.assert_array_equal(columns["tokens.logits_indices"], tables["logits_indices"][:r])
    for i, ids in enumerate(meta["tables"]):
        assert ids == tables["input_block_table.0"][i, : len(ids)].tolist()
        assert ids == tables["block_table.0"][rows[i], : tables["num_blocks"][0, rows[i]]].tolist()


def check_pages(view: StepView, before: Device, now: Device) -> None:
    """Who holds each block, how much of its KV is valid, and where the step writes."""
    size, tables = view.meta["block_size"], now.tables
    shared, fill, written = (np.zeros(view.meta["num_blocks"], np.int32) for _ in range(3))
    for row in now.owners.values():
        for i, block in enumerate(tables["block_table.0"][row, : tables["num_blocks"][0, row]].tolist()):
            shared[block] += 1
            fill[block] = max(fill[block], min(max(tables["num_computed_tokens"][row] - i * size, 0), size))
    if view.meta["paused_after"] in BEHIND_GATHER:
        for slot in tables["slot_mappings"][0, : len(view.columns["tokens.slots"])].tolist():
            written[slot // size] += 1
    np.testing.assert_array_equal(view.columns["pages.shared"], shared)
    np.testing.assert_array_equal(view.columns["pages.fill"], fill)
    np.testing.assert_array_equal(view.columns["pages.written"], written)
    owner = view.columns["pages.owner"]
    assert owner[0] == -2
    assert ((owner[1:] >= 0) == (shared[1:] > 0)).all()
    for block in np.flatnonzero(owner >= 0).tolist():
        assert block in tables["block_table.0"][owner[block], : tables["num_blocks"][0, owner[block]]]


def check_diffs(view: StepView, before: Device, now: Device) -> None:
    """Before they are applied, the diffs of the panel are the staged ones; then the device has them."""
    staged = {
        (name, diff.row, diff.start, tuple(diff.values.tolist()))
        for name, diffs in now.runner.staged().items()
        for diff in diffs
    }
    shown = {(diff["table"], diff["row"], diff["start"], tuple(diff["values"])) for diff in view.meta["diffs"]}
    if view.meta["paused_after"] == "update_states":
        assert shown == staged
    elif view.meta["paused_after"] == "apply_writes":
        for name, row, start, values in shown:
            table = now.tables[name]
            matrix = table if table.ndim > 1 else table[:, None]
            assert matrix[row, start : start + len(values)].tolist() == list(values)


def check_outputs(view: StepView, before: Device, now: Device) -> None:
    meta = view.meta
    if meta["paused_after"] == "logits":
        assert now.logits is not None
        best = torch.topk(now.logits, 3, dim=1)
        assert meta["top_k"]["token_ids"] == best.indices.tolist()
        np.testing.assert_array_equal(np.float32(meta["top_k"]["logits"]), best.values.numpy())
    if meta["paused_after"] == "postprocess":
        last = now.tables["last_sampled_tokens"]
        for one, ids in zip(meta["batch"], meta["sampled"], strict=True):
            assert (one["kind"] == "chunk") == (not ids)
            assert not ids or ids[-1] == last[one["row"]]


CHECKS = (check_rows, check_batch, check_pages, check_diffs, check_outputs)
BEHIND_GATHER = set(LAUNCH[LAUNCH.index("gather") :])


def compare_every_panel(steps: int = 25, **options: Any) -> Counter[str]:
    """Step a busy engine phase by phase; every panel against the device. Counts what was seen."""
    seen: Counter[str] = Counter()
    with busy_engine(**options) as engine:
        source = LiveSource(engine, top_k=3)

        def through(i: int) -> None:
            if i % 3 or not engine.has_work():
                return
            before: Device | None = None
            while True:
                assert source.advance("phase") is None
                paused = engine.observer.live()._paused  # type: ignore[attr-defined]
                view = source.view(len(source) - 1)
                if not paused.open or view.meta["paused_after"] not in LAUNCH:
                    break
                now = Device(engine)
                before = before or now
                phase = view.meta["paused_after"]
                assert (phase, view.meta["mode"], view.meta["live"]) == (paused.phase, "step", True)
                for check in CHECKS:
                    if check is not check_batch or phase in BEHIND_GATHER:
                        check(view, before, now)
                seen[phase] += 1
                seen.update(f"{change['writer']} {change['by']}" for change in view.meta["changes"])
            assert source.advance("step") is None

        work(engine, steps, after=through)
        source.close()
    return seen


@pytest.mark.parametrize(
    "options", [{"async_scheduling": False}, {}, {"transfer": "pinned_copy", "stream": "threaded"}]
)
def test_every_panel_of_a_standing_step_is_what_the_device_has(options: dict[str, Any]) -> None:
    seen = compare_every_panel(40, max_num_batched_tokens=9, **options)
    assert min(seen[phase] for phase in LAUNCH) >= 5
    writers = {name for name in seen if " " in name}
    assert writers == {
        "cpu add_request",
        "cpu remove_request",
        "cpu publish",
        "cpu fused_apply_write",
        "gpu prefill_inputs",
        "gpu post_update",
    }


@pytest.mark.gpu
def test_every_panel_of_a_standing_step_is_what_a_gpu_has() -> None:
    compare_every_panel(device="cuda")


def test_mutant_a_reading_that_is_late_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    read, held = readback.read_tables, [None]

    def late(engine: Engine) -> Any:
        now, held[0] = held[0], read(engine)  # type: ignore[call-overload]
        return now or held[0]

    monkeypatch.setattr(readback, "read_tables", late)
    with pytest.raises(AssertionError):
        compare_every_panel(async_scheduling=False)


def test_mutant_slots_of_another_batch_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    of = readback.BatchTrace.of
    monkeypatch.setattr(readback.BatchTrace, "of", lambda *args: replace(of(*args), slots=of(*args).slots - 1))
    with pytest.raises(AssertionError):
        compare_every_panel(async_scheduling=False)


def test_a_standing_step_and_its_replay_say_the_same() -> None:
    """Once settled, the step is shown from the recording, rebuilt; nothing but the source of the picture changes."""
    with engine_with_work() as engine:
        source = LiveSource(engine, top_k=2)
        source.advance("step")
        while True:
            source.advance("phase")
            view = source.view(1)
            if view.meta["paused_after"] == "wait_output":
                read = view
            elif view.meta["paused_after"] == "update_from_output":
                replayed = view
                break
        source.close()
    assert list(read.columns) == list(replayed.columns)
    for name, values in read.columns.items():
        np.testing.assert_array_equal(values, replayed.columns[name], name)

    def real(view: StepView) -> list[str]:
        """A replay also knows what was overwritten by itself; within a phase the order is each one's own."""
        return sorted(str(change) for change in view.meta["changes"] if change["before"] != change["after"])

    assert real(read) == real(replayed)
    for part in "step requests words phases diffs batch tables sampled top_k tails seeds new removed".split():
        assert read.meta[part] == replayed.meta[part], part
