"""The memory ledger: formulas against the actual buffers, and mutants whose extra bytes it finds."""

from __future__ import annotations

import dataclasses
import gc
import json
import re
from typing import Any

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from mrv2lab.check import memory_ledger
from mrv2lab.check.memory_formulas import MEANINGS, WIDTHS, evaluate, words
from mrv2lab.check.memory_ledger import growth, measure, predict, rounded_bytes
from mrv2lab.check.memory_tables import lines_of
from mrv2lab.cli import app
from mrv2lab.config import QWEN3_0_6B, CacheConfig, EngineConfig, ModelConfig, RunnerConfig, SchedulerConfig
from mrv2lab.engine.engine import Engine
from mrv2lab.protocol import SamplingParams
from mrv2lab.state import request_state
from mrv2lab.teach.memory_pictures import growth_picture, owners_picture
from tests.slow import mostly_slow

ODD: dict[str, Any] = {"num_blocks": 41, "max_num_reqs": 7, "max_num_batched_tokens": 53, "max_model_len": 101}
FEW_TOKENS: dict[str, Any] = {**ODD, "max_num_reqs": 9, "max_num_batched_tokens": 5, "block_size": 32}
SMALL = ModelConfig(
    vocab_size=4999, hidden_size=24, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, head_dim=4,
    intermediate_size=36, max_position_embeddings=120, qk_norm=True, architecture="Qwen3ForCausalLM",
)  # fmt: skip
"""Odd sizes, so that no two formulas agree by accident; a vocabulary of three blocks with a ragged end."""
TIED = dataclasses.replace(SMALL, tie_word_embeddings=True, qk_norm=False, architecture="LlamaForCausalLM")


# -- formulas ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("formula", "nbytes"),
    [
        ("R x L int32", 7 * 101 * 4),
        ("(R + 1) int64", 64),
        ("R x ceil(L / B) int32", 7 * 7 * 4),
        ("n x pow2(min(1000, V + 1)) float32", 7 * 1024 * 4),
        ("64 x (4 * 4 / 8 + 16) int64", 64 * 18 * 8),
        ("2 * T bool", 106),
        ("R x 0 x 8 float32", 0),
    ],
)
def test_a_formula_is_read_and_evaluated(formula: str, nbytes: int) -> None:
    values = {"R": 7, "L": 101, "B": 16, "n": 7, "V": 4999, "T": 53}
    found = evaluate(formula, values)
    assert (found, type(found)) == (nbytes, int)


@pytest.mark.parametrize("formula", ["R x L", "R x Q int32", "R x open(L) int32", "R x L.real int32", "R ** 2 int32"])
def test_what_is_no_formula_is_refused(formula: str) -> None:
    with pytest.raises(ValueError, match="formula"):
        evaluate(formula, {"R": 7, "L": 101})


def test_rounding() -> None:
    assert [rounded_bytes(n, "device") for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    assert [rounded_bytes(n, "uva") for n in (0, 1, 512, 513)] == [0, 1, 512, 1024]
    assert rounded_bytes(513, "host") == 513


# -- against real engines ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("runner", "transfer", "model", "sizes"),
    mostly_slow(
        [
            ("mrv2", "uva_pool", SMALL, ODD), ("v1", "barrier", SMALL, ODD), ("mrv2", "barrier", TIED, FEW_TOKENS),
            ("v1", "uva_pool", TIED, FEW_TOKENS), ("mrv2", "pinned_copy", SMALL, FEW_TOKENS),
            ("mrv2", "unsafe", TIED, ODD), ("v1", "pinned_copy", TIED, ODD), ("v1", "unsafe", SMALL, FEW_TOKENS),
        ],
        4,
    ),
)  # fmt: skip
def test_every_table_has_the_bytes_of_its_formula(
    runner: Any, transfer: Any, model: ModelConfig, sizes: dict[str, Any]
) -> None:
    with Engine(model, runner, "cpu", transfer=transfer, **sizes) as engine:
        ledger = measure(engine)
        assert ledger.problems == []
        # Not by silence: everything that the runtime knows of is in it, and its sums are the runtime's.
        sums = ledger.by_place()["requested"]
        for place in ("device", "uva", "pinned"):
            actual = sum(one.nbytes for one in engine.rt.registry.buffers() if one.place.value == place)
            assert sums[place] == actual, place
        free = set(ledger.rows[ledger.rows.expected.isna() & ledger.rows.requested.notna()].table)
        assert free <= {"local_max", "local_arg"}
    # The same without an engine, but for scratch that ops size.
    foretold = predict(engine.worker.config if hasattr(engine.worker, "config") else engine.config)
    both = foretold.rows.merge(ledger.rows, on=["table", "place"])
    assert len(both) >= len(foretold.rows) and (both.expected_x.dropna() == both.expected_y.dropna()).all()


@pytest.mark.parametrize("graphs", mostly_slow(["full_decode_only", "none"], 1))
def test_v1_has_no_slots_for_what_a_graph_reads(graphs: str) -> None:
    """And without graphs, where the tables are the host's, dummy runs have tables of their own."""
    options: dict[str, Any] = {"transfer": "uva_pool", "cudagraph_mode": graphs, "progress": False}
    with Engine(SMALL, "v1", "cpu", **ODD, **options) as engine:
        assert measure(engine).problems == []
        engine.worker.runner.dummy_run(5)
        assert measure(engine).problems == []


@pytest.mark.parametrize("options", mostly_slow([{"async_scheduling": False}, {"pool_depth": 3}], 1))
def test_slots_follow_the_steps_in_flight(options: dict[str, Any]) -> None:
    with Engine(SMALL, "mrv2", "cpu", **ODD, **options) as engine:
        assert measure(engine).problems == []


def test_a_lazy_table_is_checked_once_it_is_there() -> None:
    with Engine(SMALL, "mrv2", "cpu", **ODD) as engine:
        name = "output_bin_counts"
        assert measure(engine).rows.set_index("table").requested.isna()[name]
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2, presence_penalty=1.0, ignore_eos=True))
        row = measure(engine).rows.set_index("table").loc[name]
        assert row.requested == row.expected == 7 * 4999 * 4


# -- mutants -----------------------------------------------------------------------------------------------------------
class Wider(request_state.StagedWriteTensor):
    """A table one column wider than its requests can be long: nothing reads the column, so no token changes."""

    def __init__(self, rt: Any, transfers: Any, name: str, shape: Any, *rest: Any, **more: Any) -> None:
        if name == "all_token_ids":
            shape = (shape[0], shape[1] + 1)
        super().__init__(rt, transfers, name, shape, *rest, **more)


def test_a_table_one_column_wider_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_state, "StagedWriteTensor", Wider)
    with Engine(SMALL, "mrv2", "cpu", **ODD) as engine:
        assert measure(engine).problems == [f"all_token_ids: {7 * 102 * 4:,} bytes in uva, but R x L int32 is 2,828"]


def test_a_table_that_nobody_wrote_down_is_found_and_one_that_is_gone() -> None:
    with Engine(SMALL, "v1", "cpu", **ODD) as engine:
        kept = engine.rt.zeros(5, torch.int32, name="forgotten")
        assert measure(engine).problems == ["forgotten: 20 bytes in device that no formula explains"]
        del kept
        engine.rt.registry._buffers = {
            key: one for key, one in engine.rt.registry._buffers.items() if one.name != "seq_lens"
        }
        gc.collect()
        assert measure(engine).problems == ["seq_lens: R int32 in device, but there is no such buffer"]


def test_a_wrong_formula_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def lines(config: EngineConfig) -> Any:
        changed = {"num_rejected": "(R + 1) int32"}
        return [dataclasses.replace(one, formula=changed.get(one.name, one.formula)) for one in lines_of(config)]

    monkeypatch.setattr(memory_ledger, "lines_of", lines)
    with Engine(SMALL, "mrv2", "cpu", **ODD) as engine:
        assert measure(engine).problems == ["num_rejected: 28 bytes in device, but (R + 1) int32 is 32"]


# -- what one can do with it -------------------------------------------------------------------------------------------
def config(runner: Any = "mrv2", **sizes: int) -> EngineConfig:
    transfer: Any = "barrier" if runner == "v1" else "uva_pool"
    chosen: Any = {"max_num_reqs": 1024, "max_model_len": 4096, "max_num_batched_tokens": 8192, **sizes}
    return EngineConfig(
        QWEN3_0_6B, CacheConfig(8192), SchedulerConfig(**chosen), RunnerConfig(runner=runner, transfer=transfer)
    )


def test_the_largest_tables_lie_where_they_should() -> None:
    """MRV2's token ids are in host memory that kernels read, V1's in pageable memory; the device's largest table is the
    logits' own scratch."""
    rows = predict(config()).state().rows.set_index("table")
    assert (rows.place["all_token_ids"], rows.expected["all_token_ids"]) == ("uva", 1024 * 4096 * 4)
    rows = predict(config("v1")).state().rows.set_index("table")
    assert rows.place["input_batch.token_ids_cpu"] == "host"
    kv = predict(config()).rows.query("owner == 'engine/worker.py'").expected.sum()
    assert kv == 8192 * 16 * 2 * 28 * 8 * 128 * 2


def test_partial_sums_are_where_a_plan_splits_products() -> None:
    """Lazy, since only compiled kernels split; 8 sums of 128 tokens of Qwen3-0.6B."""
    row = predict(config()).rows.set_index("table").loc["partials"]
    assert (row.expected, row.needed) == (8 * 128 * 1024 * 4, False)
    other = dataclasses.replace(config(), model=dataclasses.replace(QWEN3_0_6B, dtype="float32"))
    assert "partials" not in set(predict(other).rows.table)


def test_growth_and_pictures() -> None:
    grown = growth(config(), "max_model_len", [1024, 2048, 4096])
    assert list(grown.columns) == ["device", "uva", "pinned", "host"]
    # twice the tokens: twice the token ids in UVA; block tables on the device, a 16th as wide, twice
    assert (grown.uva.diff().dropna() == [1024 * 1024 * 4, 1024 * 2048 * 4]).all()
    assert (grown.device.diff().dropna() == [2 * 1024 * 64 * 4, 2 * 1024 * 128 * 4]).all()
    picture = growth_picture(grown)
    assert [bar.name for bar in picture.data] == list(grown.columns)
    assert sum(float(bar.y[0]) for bar in picture.data) == pytest.approx(grown.iloc[0].sum() / 1e6)
    owners = predict(config()).state().by_owner()
    assert isinstance(owners, pd.DataFrame) and "state/request_state.py" in owners_picture(owners).data[1].y
    with pytest.raises(ValueError, match="'policy' does not size a table"):
        growth(config(), "policy", [1])


def test_words_are_all_there() -> None:
    known = words(config())
    assert list(known) == list(MEANINGS)
    for runner in ("mrv2", "v1"):
        for line in lines_of(config(runner)):
            assert not line.formula or evaluate(line.formula, known) >= 0
            assert line.place in ("device", "uva", "pinned", "host")
            assert not line.formula or line.formula.rpartition(" ")[2] in WIDTHS


# -- the command -------------------------------------------------------------------------------------------------------
def call(*given: str) -> Any:
    return CliRunner().invoke(app, ["memory", *given])


def test_the_command_needs_no_weights() -> None:
    result = call("--model", "qwen3-0.6b-shape", "--max-num-reqs", "64", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    made = json.loads(result.stdout)
    assert made["words"]["V"] == QWEN3_0_6B.vocab_size and made["problems"] == []
    rows = {row["table"]: row for row in made["rows"]}
    assert rows["all_token_ids"]["expected"] == 64 * 1024 * 4 and rows["all_token_ids"]["requested"] is None
    assert "model.norm.weight" not in rows
    assert made["by_place"]["uva"]["requested"] > 64 * 1024 * 4
    assert {"local_max", "local_arg", "output_bin_counts"} <= set(made["left_out"])
    assert made["meanings"].keys() == made["words"].keys() == MEANINGS.keys()


def lines_by_place(*given: str) -> dict[str, list[tuple[str, int, int]]]:
    """place -> (table, how many, bytes) of its line and of the lines under it, as the command prints them."""
    result = call(*given)
    assert (result.exit_code, result.stderr) == (0, "")
    made: dict[str, list[tuple[str, int, int]]] = {}
    for line in result.stdout[: result.stdout.index("\n\n")].splitlines()[1:]:
        name, count, nbytes = re.match(r"\s*(.+?)\s+([\d,]+)\s+([\d,]+)", line).groups()  # type: ignore[union-attr]
        if not line.startswith(" "):
            place = name
        made.setdefault(place, []).append((name, int(count.replace(",", "")), int(nbytes.replace(",", ""))))
    return made


@pytest.mark.parametrize("given", [(), ("--each",), ("--all", "--runner", "v1"), ("--all", "--each")])
def test_the_printed_lines_are_sorted_and_add_up(given: tuple[str, ...]) -> None:
    """Whatever is folded into a line, the lines of a place have its tables and its bytes, the largest first."""
    made = lines_by_place(*given)
    by_place = json.loads(call(*given, "--json").stdout)["by_place"]
    assert made.keys() == {"device", "uva", "pinned", "host"}
    for place, ((_, tables, total), *lines) in made.items():
        assert total == by_place[place]["requested"]
        assert (sum(count for _, count, _ in lines), sum(n for _, _, n in lines)) == (tables, total)
        sizes = [n for name, _, n in lines if name != "smaller ones"]
        assert sizes == sorted(sizes, reverse=True)
        if "--each" in given:
            assert all(count == 1 for _, count, _ in lines)
        else:
            assert all(n >= 0.01 * total for n in sizes) and len(lines) < 25


def test_layers_and_slots_share_a_line() -> None:
    made = lines_by_place("--model", "qwen3-0.6b-shape", "--all", "--num-blocks", "100", "--block-size", "32")
    one = 100 * 32 * 8 * 128 * 2
    assert ("key_cache.*", 28, 28 * one) in made["device"]
    assert ("block_tables.diffs.uva*", 2, 2 * 81_984) in lines_by_place()["uva"]


def test_what_the_sums_leave_out_is_said() -> None:
    said = call("--max-num-reqs", "8", "--max-num-batched-tokens", "64").stdout.splitlines()
    at = said.index("not in the sums:")
    counts, mask = 8 * 2048 * 4, 8 * 2048 // 8
    assert (
        f"  with a request with penalties: {counts + mask:,} device (prompt_bin_mask, output_bin_counts)" in said[at:]
    )
    assert "  with count_nans: 64 device, 64 pinned (num_nans.*)" in said[at:]
    assert any(line.startswith("  as large as the op wants it") and "local_max, local_arg" in line for line in said)
    assert "  with a step: what batches want (block_table.pointers)" in call("--runner", "v1").stdout.splitlines()
    at = said.index("words of the formulas:")
    assert said[at + 1 : at + 3] == [
        "  R = 8                 requests at most, max_num_reqs",
        "  L = 1,024             tokens of a request at most, max_model_len",
    ]


def test_the_sums_of_a_prediction_are_the_measured_ones_but_for_what_is_said() -> None:
    with Engine(SMALL, "mrv2", "cpu", **ODD) as engine:
        ledger = measure(engine)
        foretold = predict(engine.config)
    free = ledger.rows[ledger.rows.expected.isna() & ledger.rows.requested.notna()]
    assert set(free.table) <= set(foretold.left_out.table)
    missing = ledger.by_place()["requested"] - foretold.by_place()["requested"]
    assert missing.to_dict() == {"device": int(free.requested.sum()), "uva": 0, "pinned": 0, "host": 0}
    assert missing["device"] > 0


def test_drafts_size_tables_by_formula() -> None:
    """K drafts: a row keeps K of them, and a step returns K + 1 tokens a request."""
    rows = {row["table"]: row["expected"] for row in json.loads(
        call("--max-num-reqs", "4", "--num-speculative-tokens", "3", "--json").stdout)["rows"]}  # fmt: skip
    assert (rows["draft_tokens"], rows["sampled.0"], rows["logprobs.rows"]) == (4 * 3 * 8, 4 * 4 * 8, 16 * 4)


def test_tables_that_graphs_read_lie_elsewhere() -> None:
    words_ = ("--runner", "v1", "--transfer", "uva_pool", "--json")
    names = {
        mode: {row["table"] for row in json.loads(call(*words_, "--cudagraph-mode", mode).stdout)["rows"]}
        for mode in ("none", "full_decode_only")
    }
    assert "block_table.0.uva0" in names["none"] - names["full_decode_only"]
    assert "block_table.0" in names["full_decode_only"] - names["none"]


def test_the_command_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    words_ = ("--measure", "--device", "cpu", "--max-num-reqs", "8", "--max-num-batched-tokens", "64", "--all")
    result = call(*words_)
    assert (result.exit_code, result.stderr) == (0, "")
    said = result.stdout.splitlines()
    assert said[-1] == (
        "every table that has a formula has its bytes; without one, and in the sums: local_max, local_arg (128 bytes)"
    )
    assert any(line.startswith("  model.layers.*.mlp.gate_proj.weight") for line in said)
    monkeypatch.setattr(request_state, "StagedWriteTensor", Wider)
    result = call(*words_)
    assert result.exit_code == 1
    assert result.stderr.startswith("differs: all_token_ids")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--model", "huge"], "no model 'huge'"),
        (["--runner", "v3"], "runner must be one of"),
        (["--transfer", "fast"], "transfer must be one of"),
        (["--max-num-reqs", "0"], "max_num_reqs must be a positive integer, got 0"),
        (["--block-size", "24"], "block_size must be a power of two, got 24"),
        (["--cudagraph-mode", "ful"], "cudagraph_mode must be one of"),
        (["--num-speculative-tokens", "-1"], "num_speculative_tokens must be an integer >= 0, got -1"),
        (["--num-speculative-tokens", "2", "--measure"], "no engine verifies drafts yet"),
        (["--num-speculative-tokens", "2", "--runner", "v1"], "no engine verifies drafts yet"),
    ],
)
def test_the_command_refuses(given: list[str], said: str) -> None:
    result = call(*given)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("mrv2lab: ") and said in result.stderr


# -- a real allocator --------------------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("runner", ["mrv2", "v1"])
def test_the_allocator_was_asked_for_the_same(runner: Any) -> None:
    """PyTorch keeps what was requested apart from what it gave: the first is the ledger's sum to the byte, the second
    lies between the sum of the rounded tables and 1 MiB more for each large one."""
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_stats()
    with Engine(SMALL, runner, "cuda", dtype="bfloat16", **ODD) as engine:
        torch.cuda.synchronize()
        gc.collect()
        after = torch.cuda.memory_stats()
        ledger = measure(engine)
    assert ledger.problems == []
    taken = {
        what: after[f"{what}_bytes.all.current"] - before[f"{what}_bytes.all.current"]
        for what in ("requested", "allocated")
    }
    device = ledger.by_place().loc["device"]
    assert taken["requested"] == device["requested"]
    large = int((ledger.rows.query("place == 'device'").requested.fillna(0) >= 1 << 20).sum())
    assert device["rounded"] <= taken["allocated"] <= device["rounded"] + large * (1 << 20)
