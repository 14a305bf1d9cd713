"""Made-up recordings: a header, one small step with everything in it, and a run of the size that row JP7 speaks of."""

from __future__ import annotations

from typing import Any

import numpy as np

from mrv2lab.recording.schema import (
    Diff,
    Header,
    MarkRecord,
    NewRequest,
    Publish,
    SpanRecord,
    StepRecord,
    TopK,
)

VOCABULARY = 151_936
LAYERS = 28
Table = tuple[tuple[int, ...], str]


def header(rows: int = 8, max_model_len: int = 32, **changes: Any) -> Header:
    """A header with one table of each kind."""
    config = {
        "model": {"name": "made-up", "vocab_size": VOCABULARY, "eos_token_ids": [2]},
        "cache": {"num_blocks": 64, "block_size": 16},
        "scheduler": {"max_num_reqs": rows, "max_model_len": max_model_len, "max_num_batched_tokens": 2048},
    }
    tables: dict[str, Table] = {
        "all_token_ids": ((rows, max_model_len), "int32"),
        "total_len": ((rows,), "int32"),
        "num_computed_tokens": ((rows,), "int32"),
        "block_table.0": ((rows, max_model_len // 16), "int32"),
        "last_sampled_tokens": ((rows,), "int64"),
        "seeds": ((rows,), "int64"),
        "temperature": ((rows,), "float32"),
    }
    facts = {
        "mode": "record",
        "runner": "mrv2",
        "device": "NVIDIA H200",
        "modelled": False,
        "config": config,
        "backend": "triton",
        "tables": tables,
        "epoch_host_ns": 10**15,
        "epoch_unix_ns": 1_700_000_000 * 10**9,
        "versions": {"mrv2lab": "0.0", "noise": "1"},
    }
    return Header(**facts | changes)


def step(number: int = 0, rows: int = 2) -> StepRecord:
    """A small step in which nothing is empty but the keyframe."""
    return StepRecord(
        step=number,
        new=[NewRequest("a", 7, 3, 3, 0, [[1, 2]], 0.5, -(2**63), True, 16)],
        removed=[("z", 6)],
        finished=["z"],
        preempted=["y"],
        unscheduled=["x"],
        decisions=[("preempt", "y", 2, 1)],
        gauges={"running": 2, "load": 0.25},
        new_blocks={"b": [[5]]},
        req_ids=[f"r{i}" for i in range(rows)],
        rows=np.arange(7, 7 - rows, -1, dtype=np.int32),
        num_scheduled=np.ones(rows, np.int32),
        has_prefill=True,
        diffs=[
            Diff("all_token_ids", 7, 0, np.array([11, 12, 13], np.int32)),
            Diff("seeds", 7, 0, np.array([-(2**63)], np.int64)),
        ],
        publishes=[Publish("temperature", np.array([7], np.int64), np.array([0.5], np.float32))],
        sampled=[[100 + i] for i in range(rows)],
        finish_reasons={"r0": "stop"},
        top_k=TopK(np.array([[5, 6]] * rows, np.int32), np.array([[1.5, -2.25]] * rows, np.float32)),
        spans=[SpanRecord("forward", 1000, 2000, 0, 2500), SpanRecord("forward/checksum", 1200, 1300, 1, added=True)],
        marks=[
            MarkRecord(
                "kernel", "gather", "main", ("a",), ("b", "c"), "runner.py:7", 64, 0, 1100, "gather", 1101, 1150
            ),
            MarkRecord("h2d", "rows", "main", (), ("rows",), None, 256, 12, 1200, "prepare_inputs"),
        ],
        paused=True,
        checksums={"total_len": 2**64 - 1},
    )


class Run:
    """A run of ``requests`` requests with prompts of 512 tokens: random tokens, ids and times, real proportions."""

    def __init__(self, requests: int = 64, rows: int = 1024, max_model_len: int = 4096, seed: int = 0) -> None:
        self.header = header(rows, max_model_len)
        self.requests, self.rows = requests, rows
        self._rng = np.random.default_rng(seed)
        self._clock = 5_000_000
        self._device = 5_000_000
        self._ids = [f"request-{self._rng.integers(2**63):x}" for _ in range(requests)]
        self._descriptors = self._chokepoints()

    def steps(self, count: int) -> list[StepRecord]:
        """The first ``count`` steps; the first admits everybody."""
        return [self._step(number) for number in range(count)]

    def _chokepoints(self) -> list[tuple[str, str, str, tuple[str, ...], tuple[str, ...], str, str]]:
        """About 110 of them: three segments a layer, and what stands around the model."""
        runner = "mrv2lab/runner/model_runner.py"
        marks = [
            (
                "h2d" if i % 3 else "kernel",
                f"prepare.{i}",
                "main",
                ("idx_mapping",),
                (f"input.{i}",),
                f"{runner}:{i}",
                p,
            )
            for i, p in enumerate(
                ["update_states"] * 4 + ["apply_writes"] * 4 + ["prepare_inputs"] * 6 + ["gather"] * 6
            )
        ]
        for layer in range(LAYERS):
            for segment in ("before_attention", "attention", "after_attention"):
                name = f"layers.{layer}.{segment}"
                marks.append(("run", name, "main", ("hidden", "kv"), ("hidden",), f"{runner}:300", "forward"))
        for kind, name, phase in (
            ("run", "lm_head", "logits"),
            ("kernel", "gumbel_sample", "sample"),
            ("kernel", "post_update", "postprocess"),
            ("d2h", "sampled", "copy_output"),
            ("record", "copied", "copy_output"),
            ("synchronize", "copied", "wait_output"),
        ):
            marks.append((kind, name, "copy", ("logits",), ("sampled",), f"{runner}:400", phase))
        return marks

    def _tick(self, mean_ns: float) -> int:
        self._clock += int(self._rng.gamma(4, mean_ns / 4))
        return self._clock

    def _step(self, number: int) -> StepRecord:
        rng, r = self._rng, self.requests
        rows = np.arange(self.rows - 1, self.rows - 1 - r, -1, dtype=np.int32)
        made = StepRecord(number, req_ids=list(self._ids), rows=rows, num_scheduled=np.ones(r, np.int32))
        if number == 0:
            self._admit(made)
        made.gauges = {"running": r, "waiting": 0, "free_blocks": 4096 - 4 * number, "in_flight": 2}
        for i in rng.choice(r, r // 16, replace=False).tolist():
            block = int(rng.integers(1, 8192))
            made.new_blocks[self._ids[i]] = [[block]]
            made.diffs.append(Diff("block_table.0", int(rows[i]), 32 + number // 16, np.array([block], np.int32)))
        made.sampled = [[token] for token in rng.integers(0, VOCABULARY, r).tolist()]
        if number % 16 == 0:
            made.checksums = {name: int(rng.integers(2**63)) for name in self.header.tables}
        for kind, name, stream, reads, writes, site, phase in self._descriptors:
            wait = int(rng.gamma(4, 500_000)) if kind == "synchronize" else 0
            time = self._tick(9_000) + wait
            self._clock = time
            start = max(time, self._device)
            self._device = start + int(rng.gamma(20, 1_500))
            nbytes = int(rng.integers(1, 64)) * 1024 if kind in ("h2d", "d2h") else len(name) * 65_536
            made.marks.append(
                MarkRecord(kind, name, stream, reads, writes, site, nbytes, wait, time, phase, start, self._device)
            )
        begin = made.marks[0].time_ns
        for i in range(13):
            begin, end = begin + 300, begin + int(rng.gamma(9, 40_000))
            made.spans.append(SpanRecord(f"phase{i}", begin, end, i % 2, end + int(rng.gamma(4, 100_000))))
            begin = end
        self._tick(400_000)
        return made

    def _admit(self, made: StepRecord) -> None:
        """512 tokens of prompt for everybody, on top of a keyframe of an engine that nobody had used."""
        made.keyframe = {name: np.zeros(shape, dtype) for name, (shape, dtype) in self.header.tables.items()}
        made.has_prefill = True
        made.num_scheduled[:] = 512
        for i, req_id in enumerate(self._ids):
            row = int(made.rows[i])
            blocks = self._rng.integers(1, 8192, 32).tolist()
            seed = int(self._rng.integers(-(2**63), 2**63))
            made.new.append(NewRequest(req_id, row, 512, 512, 0, [blocks], 0.8, seed, True, 256))
            prompt = self._rng.integers(0, VOCABULARY, 512, dtype=np.int32)
            made.diffs.append(Diff("all_token_ids", row, 0, prompt))
            made.diffs.append(Diff("total_len", row, 0, np.array([512], np.int32)))
            made.diffs.append(Diff("block_table.0", row, 0, np.array(blocks, np.int32)))
        made.publishes.append(
            Publish("temperature", made.rows.astype(np.int64), np.full(self.requests, 0.8, np.float32))
        )
