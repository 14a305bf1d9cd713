"""A step source without an engine: a small imitation of scheduler and runner, enough to fill every panel.

Hostile on purpose: request ids and token texts hold markup, control characters and a right-to-left override.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.recording.view import StepView

ATTACK = "<img src=x onerror=alert(1)>"
IDS = ("alice", "bob", ATTACK, "dave\n\u202eevad", "erin-with-quite-a-long-request-id-0123456789", "frank")
WORDS = (
    "Once",
    " upon",
    " a",
    " time",
    ",",
    " there",
    " was",
    " a",
    " little",
    " girl",
    "\n",
    ATTACK,
    " ",
    "\u202e",
    "…",
)
COLUMNS = {
    "prompt_len": ("uva", "int"),
    "prefill_len": ("uva", "int"),
    "total_len": ("device", "int"),
    "num_computed_tokens": ("device", "int"),
    "num_blocks": ("uva", "int"),
    "last_sampled_tokens": ("device", "token"),
    "temperature": ("uva", "float"),
}
PHASES = "schedule update_states apply_writes prepare_inputs gather prepare_attn forward logits sample copy_output"
STOPS = ["before", "update_states", "apply_writes", "sample", "postprocess"]


def text_of(token: int) -> str:
    """What token ``token`` says."""
    return WORDS[token % len(WORDS)]


class FakeSource:
    """``num_steps`` steps in which ``ids`` arrive two a step; every fourth step preempts the newest request."""

    def __init__(
        self,
        num_steps: int = 10,
        *,
        rows: int = 8,
        ids: tuple[str, ...] = IDS,
        arrivals: int = 2,
        prompt: int = 9,
        block_size: int = 4,
        top_k: int = 5,
        live: bool = False,
        mode: str = "record",
        runner: str = "mrv2",
        title: str = "fake.rec",
        shift: int = 0,
        texts: bool = True,
        timed: bool = True,
    ) -> None:
        self.live, self.title, self.closed = live, title, 0
        self.rows, self.block_size, self.top_k, self.shift = rows, block_size, top_k, shift
        self.mode, self.runner, self.texts, self.timed, self.prompt = mode, runner, texts, timed, prompt
        self.arrivals = arrivals
        self.fails: Exception | None = None
        """What ``view`` and ``advance`` raise, if anything."""
        self.num_blocks = max(rows * 6, 48)
        self.waiting = list(ids)
        self.free_rows = list(range(rows))
        self.free_blocks = list(range(1, self.num_blocks))
        self.row_of: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.values = {
            name: np.zeros(rows, np.float32 if kind == "float" else np.int32) for name, (_, kind) in COLUMNS.items()
        }
        self.steps: list[StepView] = []
        for _ in range(num_steps):
            self._step()

    def __len__(self) -> int:
        return len(self.steps)

    def view(self, index: int) -> StepView:
        if self.fails is not None:
            raise self.fails
        if not 0 <= index < len(self.steps):
            raise IndexError(f"step {index} is outside 0..{len(self.steps) - 1}")
        view = self.steps[index]
        view.meta["count"] = len(self.steps)
        return view

    def advance(self, unit: str) -> str | None:
        if self.fails is not None:
            raise self.fails
        if len(self.steps) >= 40:
            return "Nothing to do: no request is waiting or running."
        self._step()
        return None

    def close(self) -> None:
        self.closed += 1

    # -- the imitation -----------------------------------------------------------------------------------------------

    def _step(self) -> None:
        number = len(self.steps)
        names: list[str] = sorted(self.tokens)
        removed: list[str] = []
        words: list[str] = []
        changes: list[dict[str, Any]] = []
        diffs: list[dict[str, Any]] = []
        before = {f"rows.{name}": column.copy() for name, column in self.values.items()}
        if number % 4 == 3 and len(self.row_of) > 1:
            victim = next(reversed(self.row_of))
            removed.append(victim)
            words.append(f"{victim} preempted: 2 blocks needed, 1 free")
        new = [self.waiting.pop(0) for _ in range(min(self.arrivals, len(self.waiting), len(self.free_rows)))]
        names = sorted({*names, *new})
        index = {name: i for i, name in enumerate(names)}
        owners = np.full(self.rows, -1, np.int32)
        for name, row in self.row_of.items():
            owners[row] = index[name]
        before["rows.request"] = owners

        def change(phase: str, column: str, row: int, after: Any, writer: str, by: str) -> None:
            old = owners[row] if column == "request" else self.values[column][row]
            if column != "request":
                self.values[column][row] = after
            changes.append(
                {
                    "phase": phase, "column": column, "row": row, "before": old.item(), "after": after,
                    "writer": writer, "by": by,
                }
            )  # fmt: skip

        for name in removed:
            row = self.row_of.pop(name)
            self.free_rows.append(row)
            self.free_blocks += self.tables.pop(row)
            self.waiting.append(name)
            change("update_states", "request", row, -1, "cpu", "remove_request")
        started: dict[str, int] = {}
        for name in new:
            row = self.row_of[name] = self.free_rows.pop()
            tokens = self.tokens.setdefault(name, [(7 * len(name) + i + self.shift) % 60 for i in range(self.prompt)])
            started[name] = row
            words.append(f"{name} admitted to row {row}: {len(tokens)} tokens to prefill")
            change("update_states", "request", row, index[name], "cpu", "add_request")
            self.tables[row] = []
            for column, value in {"prompt_len": self.prompt, "prefill_len": len(tokens), "temperature": 0.7}.items():
                change("apply_writes", column, row, value, "cpu", "publish")
            for column, value in {"total_len": len(tokens), "num_computed_tokens": 0}.items():
                change("apply_writes", column, row, value, "cpu", "apply_write")
                diffs.append(_diff(column, row, index[name], 0, [value]))
            diffs.append(_diff("all_token_ids", row, index[name], 0, tokens))
        batch = sorted(self.row_of, key=lambda name: (name in started, self.row_of[name]))
        scheduled, computed, sampled, reasons = [], [], [], {}
        for name in batch:
            row, tokens = self.row_of[name], self.tokens[name]
            done = int(self.values["num_computed_tokens"][row])
            count = min(len(tokens) - done, 16)
            need = -(-(done + count) // self.block_size) - len(self.tables[row])
            if need > 0:
                start = len(self.tables[row])
                blocks = [self.free_blocks.pop(0) for _ in range(min(need, len(self.free_blocks)))]
                self.tables[row] += blocks
                diffs.append(_diff("block_table.0", row, index[name], start, blocks))
                change("apply_writes", "num_blocks", row, len(self.tables[row]), "cpu", "publish")
            scheduled.append(count)
            computed.append(done)
        columns = self._batch_columns(batch, scheduled, computed)
        for i, name in enumerate(batch):
            row, tokens = self.row_of[name], self.tokens[name]
            change("postprocess", "num_computed_tokens", row, computed[i] + scheduled[i], "gpu", "post_update")
            if computed[i] + scheduled[i] < len(tokens):
                sampled.append([])
                continue
            token = (31 * number + 17 * row + self.shift) % 60
            sampled.append([token])
            tokens.append(token)
            change("postprocess", "last_sampled_tokens", row, token, "gpu", "post_update")
            change("postprocess", "total_len", row, len(tokens), "gpu", "post_update")
        meta = self._meta(number, names, index, words, changes, diffs, batch, scheduled, sampled)
        meta |= {
            "new": [index[n] for n in new],
            "preempted": [index[n] for n in removed],
            "removed": [index[n] for n in removed],
        }
        meta["finish_reasons"] = reasons
        self.steps.append(StepView(meta, before | columns))

    def _batch_columns(
        self, batch: list[str], scheduled: list[int], computed: list[int]
    ) -> dict[str, np.ndarray[Any, Any]]:
        starts = np.concatenate([[0], np.cumsum(scheduled)]).astype(np.int32)
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        written = np.zeros(self.num_blocks, np.int32)
        fill = np.zeros(self.num_blocks, np.int32)
        owner = np.full(self.num_blocks, -1, np.int32)
        shared = np.zeros(self.num_blocks, np.int32)
        owner[0] = -2
        logits = []
        for i, name in enumerate(batch):
            table = self.tables[self.row_of[name]]
            for position in range(computed[i], computed[i] + scheduled[i]):
                block = table[position // self.block_size]
                ids.append(self.tokens[name][position])
                positions.append(position)
                slots.append(block * self.block_size + position % self.block_size)
                written[block] += 1
            for j, block in enumerate(table):
                owner[block] = self.row_of[name]
                shared[block] = 1
                fill[block] = min(max(computed[i] + scheduled[i] - j * self.block_size, 0), self.block_size)
            if computed[i] + scheduled[i] >= len(self.tokens[name]):
                logits.append(int(starts[i + 1]) - 1)
        if len(batch) > 1:
            shared[self.tables[self.row_of[batch[0]]][0]] = 2
        as_int = {
            "batch.num_scheduled": scheduled, "batch.num_computed": computed,
            "batch.seq_lens": np.add(scheduled, computed), "batch.query_start_loc": starts, "tokens.input_ids": ids,
            "tokens.positions": positions, "tokens.slots": slots, "tokens.logits_indices": logits,
            "pages.owner": owner, "pages.shared": shared, "pages.fill": fill, "pages.written": written,
        }  # fmt: skip
        return {name: np.asarray(values, np.int32) for name, values in as_int.items()}

    def _meta(
        self, number: int, names: list[str], index: dict[str, int], words: list[str], changes: list[Any],
        diffs: list[Any], batch: list[str], scheduled: list[int], sampled: list[list[int]],
    ) -> dict[str, Any]:  # fmt: skip
        rng = np.random.default_rng(number)
        tokens = {t for diff in diffs for t in diff["values"]} | {t for name in batch for t in self.tokens[name]}
        top = None
        if self.top_k:
            ids = [[*row, *((row[0] + 1 + k) % 60 for k in range(self.top_k - 1))] for row in sampled if row]
            top = {
                "token_ids": ids,
                "logits": [(12 - np.cumsum(rng.random(self.top_k))).round(3).tolist() for _ in ids],
            }
            tokens |= {t for row in ids for t in row}
        spans, marks = self._times(rng) if self.timed else ([], [])
        kinds = [
            "decode" if n == 1 else "prefill" if row else "chunk" for n, row in zip(scheduled, sampled, strict=True)
        ]
        column_list = [
            {"name": n, "title": n.removesuffix("_tokens"), "place": p, "dtype": "int32", "kind": k}
            for n, (p, k) in COLUMNS.items()
        ]
        return {
            "index": number, "count": number + 1, "step": 100 + number, "title": self.title, "mode": self.mode,
            "live": self.live, "paused_after": "gather" if self.mode == "step" else None, "runner": self.runner,
            "device": "cpu", "backend": "spec", "transfer": "uva_pool", "modelled": True, "block_size": self.block_size,
            "num_blocks": self.num_blocks, "max_num_reqs": self.rows, "requests": names,
            "texts": {t: text_of(t) if self.texts else None for t in tokens},
            "notes": [] if self.top_k else ["No logits were kept: Recorder(engine, top_k=8) keeps the greatest."],
            "diverged": None, "words": words, "phases": STOPS,
            "row_columns": [
                {"name": "request", "title": "request", "place": "host", "dtype": "", "kind": "request"}, *column_list,
                {"name": "all_token_ids", "title": "text", "place": "uva", "dtype": "int32", "kind": "text"},
            ],
            "changes": changes,
            "tails": {self.row_of[n]: "".join(map(text_of, self.tokens[n]))[-40:] for n in self.row_of},
            "seeds": {row: str(2**63 + row) for row in self.row_of.values()}, "diffs": diffs, "resumed": [],
            "finished": [], "unscheduled": [], "tables": [list(self.tables[self.row_of[n]]) for n in batch],
            "batch": [
                {"request": index[n], "row": self.row_of[n], "kind": k} for n, k in zip(batch, kinds, strict=True)
            ],
            "gauges": {"running": len(batch), "waiting": len(self.waiting), "free_blocks": len(self.free_blocks)},
            "sampled": sampled, "top_k": top, "spans": spans, "marks": marks, "device_phases": [], "gap": None,
            "checked": {"ok": True, "tables": 9} if number % 4 == 0 else None,
        }  # fmt: skip

    def _times(self, rng: np.random.Generator) -> tuple[list[Any], list[Any]]:
        spans, marks, at, device = [], [], 0.0, 60.0
        for phase in [*PHASES.split(), "postprocess", "wait_output", "update_from_output"]:
            length = float(rng.uniform(20, 140)) * (4 if phase == "forward" else 1)
            spans.append(_span(phase, at, at + length, 0, device))
            if phase == "sample":
                spans.append(_span("sample/argmax", at + 5, at + length / 2, 1, device))
            wait = phase == "wait_output"
            for k in range({"forward": 8, "apply_writes": 3}.get(phase, 1)):
                time = at + length * (k + 1) / 9
                run = phase not in ("schedule", "update_states", "wait_output", "update_from_output")
                start = max(device, time)
                device = start + float(rng.uniform(8, 60)) if run else device
                marks.append(
                    {
                        "kind": "synchronize" if wait else "h2d" if phase == "apply_writes" else "kernel",
                        "name": f"{phase}.{k}", "stream": "copy" if phase == "copy_output" else "main",
                        "phase": phase,
                        "time": at + length if wait else time, "device_start": start if run else None,
                        "device_end": device if run else None, "nbytes": 4096 * (k + 1),
                        "wait": length * 0.9 if wait else 0,
                        "reads": ["idx_mapping"], "writes": ["input_ids"], "site": "model_runner.py:97", "added": False,
                    }
                )  # fmt: skip
            at += length
        return spans, marks


def _span(name: str, start: float, end: float, depth: int, device: float) -> dict[str, Any]:
    return {"name": name, "start": start, "end": end, "depth": depth, "device_end": device, "added": False}


def _diff(table: str, row: int, request: int, start: int, values: list[int]) -> dict[str, Any]:
    return {
        "table": table, "row": row, "request": request, "start": start, "length": len(values), "values": values[:64],
        "by": "apply_write",
    }  # fmt: skip


def big_source(num_steps: int = 4, rows: int = 1024) -> FakeSource:
    """Every one of 1,024 rows live and decoding, after one step of prefill."""
    ids = tuple(f"request-{i:04d}" for i in range(rows))
    return FakeSource(num_steps, rows=rows, ids=ids, arrivals=rows, prompt=6, block_size=16)
