"""The memory ledger behind a warm-up: tables that come with a request, and arrays that grow, to the byte."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from mrv2lab.attention import make_backend
from mrv2lab.check.memory_ledger import Ledger, measure, predict
from mrv2lab.engine import warm_up, worker
from mrv2lab.engine.engine import Engine
from mrv2lab.memory import staged_write
from mrv2lab.memory.diffs import PackedDiffs
from mrv2lab.protocol import SamplingParams
from mrv2lab.runner_v1 import prepare
from mrv2lab.runner_v1.logprobs import LogprobsBuffers
from mrv2lab.runtime import transfer
from mrv2lab.runtime.transfer import PinnedCopy
from mrv2lab.runtime.uva import next_power_of_2
from mrv2lab.sample import token_logprobs
from mrv2lab.sample.custom import CustomProcessors
from tests.attention.test_engine import MODEL, stand_in
from tests.slow import mostly_slow

POLICIES = ("uva_pool", "barrier", "pinned_copy", "unsafe")
SIZES: dict[str, Any] = {
    "device": "cpu", "num_blocks": 64, "block_size": 4, "max_model_len": 63, "max_num_reqs": 5,
    "max_num_batched_tokens": 17, "progress": False,
}  # fmt: skip
MEASURED: dict[str, Any] = {"num_blocks": None, "memory_bytes": 1 << 26}


def engine_of(runner: Any, **options: Any) -> Engine:
    """Of two KV groups. Under ``unsafe`` the device does not trail, so that nothing is read too late."""
    if options.get("transfer") == "unsafe":
        options["lag"] = 0
    return Engine(MODEL, runner, **{**SIZES, **options})


def use(engine: Engine) -> None:
    """Requests with every wish, and a step of nobody."""
    warm_up.first_use(engine.worker, engine.worker.config)
    engine.worker.runner.dummy_run(3)
    engine.rt.synchronize()  # what is queued keeps its temporaries


def check(engine: Engine) -> Ledger:
    """The ledger has no problem, and not by silence: every buffer is in it, with its formula's bytes."""
    ledger = measure(engine)
    assert ledger.problems == []
    rows = ledger.rows[ledger.rows.requested.notna()]
    assert set(rows[rows.expected.isna()].table) <= {"local_max", "local_arg", "flashinfer.workspace"}
    exact = rows[rows.expected.notna()]
    assert (exact.requested == exact.expected).all()
    sums = ledger.by_place()["requested"]
    for place in ("device", "uva", "pinned"):
        assert sums[place] == sum(one.nbytes for one in engine.rt.registry.buffers() if one.place.value == place)
    return ledger


def names(ledger: Ledger) -> set[str]:
    """Tables that are there, or that should be."""
    return set(ledger.rows.drop(ledger.left_out.index).table)


# -- no problem at any time --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("graphs", "transfer", "runner"),
    mostly_slow(itertools.product(("none", "full_decode_only", "piecewise"), POLICIES, ("mrv2", "v1")), 8),
)
def test_before_and_behind_the_first_use(runner: Any, transfer: str, graphs: str) -> None:
    with engine_of(runner, transfer=transfer, cudagraph_mode=graphs) as engine:
        before = check(engine)
        use(engine)
        behind = check(engine)
        # What has come was announced, and with what it would.
        late = names(behind) - names(before)
        assert {"processed_logits", "logprobs.0.ids", "logprobs.1.ranks.host"} <= late
        assert before.rows[before.rows.table.isin(late)].when.ne("").all()
        for wishes in (
            {"logprobs": 3, "temperature": 0.8, "top_k": 4},
            {"presence_penalty": 0.4, "prompt_logprobs": 2},
        ):
            params = SamplingParams(max_tokens=9, ignore_eos=True, **wishes)  # type: ignore[arg-type]
            engine.generate([[1, 2, 3, 4], [5, 6, 7]], params)
            engine.rt.synchronize()
            check(engine)


@pytest.mark.parametrize(
    ("runner", "transfer", "graphs"),
    mostly_slow(
        [
            ("mrv2", "uva_pool", "none"), ("v1", "barrier", "full_decode_only"),
            *itertools.product(("mrv2", "v1"), POLICIES, ("none", "full_decode_only")),
        ],
        2,
    ),
)  # fmt: skip
def test_behind_a_memory_profile(runner: Any, transfer: str, graphs: str) -> None:
    with engine_of(runner, transfer=transfer, cudagraph_mode=graphs, **MEASURED) as engine:
        engine.rt.synchronize()
        assert "logprobs.0.ids" in names(check(engine))
        use(engine)
        check(engine)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, MEASURED, {"cudagraph_mode": "full"}, {"async_scheduling": False}])
@pytest.mark.parametrize("transfer", POLICIES)
@pytest.mark.parametrize("runner", ["mrv2", "v1"])
def test_behind_a_warm_up(runner: Any, transfer: str, options: dict[str, Any]) -> None:
    with engine_of(runner, transfer=transfer, **options) as engine:
        engine.warm_up(progress=False)
        check(engine)
        engine.warm_up(progress=False)
        check(engine)


@pytest.mark.parametrize("runner", ["mrv2", "v1"])
def test_nans_that_are_counted(runner: Any) -> None:
    with engine_of(runner, count_nans=True) as engine:
        use(engine)
        assert {"num_nans.0", "num_nans.1.host"} <= names(check(engine))


@pytest.mark.parametrize("runner", ["mrv2", "v1"])
def test_a_mode_that_a_backend_turned_down(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """flashinfer has no full graphs, so nothing of V1's has to stay at one address."""
    monkeypatch.setattr(worker, "make_backend", stand_in)
    for mode in ("full_decode_only", "full_and_piecewise"):
        graphs: dict[str, Any] = {"cudagraph_mode": mode, "transfer": "uva_pool"}
        with engine_of(runner, attention="flashinfer", **graphs) as engine:
            ledger = check(engine)
            assert ("block_table.0.uva0" in names(ledger)) == (runner == "v1" and mode == "full_decode_only")
            assert {"flashinfer.1.page_indices", "flashinfer.staging.5"} <= names(ledger)
            # A prediction knows it too: it names no table that is not there, and misses none.
            foretold = predict(engine.worker.config)
            assert names(foretold) | {"local_max", "local_arg", "flashinfer.workspace"} >= names(ledger)
            assert names(foretold) <= names(ledger)


def test_a_backend_that_the_prediction_cannot_foresee(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a backend said counts, not what its name lets expect: `torch` has full graphs on a CPU alone."""

    def without_full_graphs(rt: Any, config: Any) -> Any:
        made = make_backend(rt, config)
        made.full_graphs = False
        return made

    monkeypatch.setattr(worker, "make_backend", without_full_graphs)
    with engine_of("v1", transfer="uva_pool", cudagraph_mode="full_decode_only", attention="torch") as engine:
        assert "block_table.0.uva0" in names(check(engine))


def test_scratch_of_triton_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(worker, "make_backend", stand_in)
    with engine_of("mrv2", attention="triton") as engine:
        rows = check(engine).rows.set_index("table")
    assert rows.requested["attention.partial"] == 8192 * 2 * 16 * 4  # 2 query heads a KV head


def test_what_grows_is_not_foretold() -> None:
    """But an array that there is from the start has its first size."""
    with engine_of("v1") as engine:
        rows = predict(engine.worker.config).rows.set_index("table")
        use(engine)
        grown = measure(engine).rows.set_index("table")
    assert rows.expected.isna()["logprobs.0.ids"]
    assert rows.when["logprobs.0.ids"] == "a request with logprobs"
    assert (rows.expected["prompt_token_ids"], rows.when["prompt_token_ids"]) == (8, "")
    assert grown.expected["prompt_token_ids"] > 8 and grown.expected["logprobs.0.ids"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("options", [{"cudagraph_mode": "full_decode_only"}, {"num_blocks": None}])
@pytest.mark.parametrize("runner", ["mrv2", "v1"])
def test_on_a_gpu(runner: Any, options: dict[str, Any]) -> None:
    """Compiled kernels, warmed up and captured."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()  # others may be on the GPU
    share = (total - free) / total + 0.03
    few = {"num_blocks": 64, "gpu_memory_utilization": share, "device": "cuda", "dtype": "bfloat16"}
    with engine_of(runner, **{**few, **options}) as engine:
        for _ in range(2):
            engine.rt.synchronize()
            assert measure(engine).problems == []
            use(engine)


# -- mutants -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("used", "runner"), mostly_slow(itertools.product((True, False), ("mrv2", "v1")), 1))
def test_an_element_more_is_found_in_every_buffer(runner: Any, used: bool) -> None:
    """One buffer after the other is said to be a byte larger, which is less than an element of most."""
    with engine_of(runner) as engine:
        if used:
            use(engine)
        buffers = engine.rt.registry._buffers
        for key, one in list(buffers.items()):
            if one.name in ("local_max", "local_arg"):
                continue
            buffers[key] = dataclasses.replace(one, nbytes=one.nbytes + 1)
            problems = measure(engine).problems
            assert len(problems) == 1 and problems[0].startswith(f"{one.name}: "), one
            buffers[key] = one


def test_logprobs_of_a_row_more_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    made = token_logprobs.LogprobsBuffers.__init__

    def wider(self: Any, rt: Any, name: str, *, max_rows: int, max_top: int) -> None:
        made(self, rt, name, max_rows=max_rows + 1, max_top=max_top)

    monkeypatch.setattr(token_logprobs.LogprobsBuffers, "__init__", wider)
    with engine_of("mrv2") as engine:
        assert measure(engine).problems == []
        use(engine)
        found = {problem.partition(": ")[0] for problem in measure(engine).problems}
    parts = [part for each in ("ids", "values", "ranks") for part in (each, f"{each}.host")]
    assert found == {f"{what}.{i}.{part}" for what in ("logprobs", "prompt_logprobs") for i in (0, 1) for part in parts}


def test_a_scratch_of_a_token_more_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_more(self: Any, tokens: int) -> Any:
        self._row, self._tokens = (
            self.rt.zeros(self._vocab_size, torch.float32, name="custom.row"),
            self.rt.zeros(2049, torch.int32, name="custom.tokens"),
        )
        return self._row, self._tokens

    monkeypatch.setattr(CustomProcessors, "_buffers", one_more)
    with engine_of("mrv2") as engine:
        use(engine)
        assert measure(engine).problems == ["custom.tokens: 8,196 bytes in device, but 2048 int32 is 8,192"]


def test_diffs_that_are_outgrown_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for a few diffs: the first batch has another slab made, and keeps the old one."""

    def less(transfers: Any, name: str, dtype: Any, expected: int, row_lens: Any = ()) -> PackedDiffs:
        return PackedDiffs(transfers, name, dtype, 4 if name == "block_tables" else expected, row_lens)

    monkeypatch.setattr(staged_write, "PackedDiffs", less)
    with engine_of("mrv2", transfer="barrier") as engine:
        assert [problem.partition(": ")[0] for problem in measure(engine).problems] == [
            "block_tables.diffs", "block_tables.diffs.pinned",
        ]  # fmt: skip


@pytest.mark.parametrize("first", [False, True])
def test_v1s_arrays_of_an_element_more_are_found(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At first, or whenever they grow."""
    upload, power = PinnedCopy.upload, next_power_of_2
    if first:
        monkeypatch.setattr(PinnedCopy, "upload", lambda self, name, size, dtype: upload(self, name, size + 1, dtype))
    else:
        monkeypatch.setattr(transfer, "next_power_of_2", lambda n: power(n) + 1)
    with engine_of("v1", transfer="barrier") as engine:
        fresh = {problem.partition(": ")[0] for problem in measure(engine).problems}
        use(engine)
        used = {problem.partition(": ")[0] for problem in measure(engine).problems}
    assert bool(fresh) == first
    assert {"output_token_ids", "grammar.bitmask"} <= (fresh if first else used)


def test_v1s_logprobs_of_an_element_more_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    made = LogprobsBuffers._make
    monkeypatch.setattr(LogprobsBuffers, "_make", lambda self, part, size, *rest: made(self, part, size + 1, *rest))
    with engine_of("v1") as engine:
        use(engine)
        assert len(measure(engine).problems) == 2 * 6


def test_pointers_that_pile_up_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One set more for each step, which is never used again."""

    def each_time(self: Any, tables: Any) -> torch.Tensor:
        made: torch.Tensor = self.rt.adopt(
            torch.tensor([table.data_ptr() for table in tables], dtype=torch.uint64), "block_table.pointers"
        )
        self._pointers[len(self._pointers),] = made
        return made

    monkeypatch.setattr(prepare.InputPreparation, "_pointers_to", each_time)
    with engine_of("v1", transfer="uva_pool") as engine:
        use(engine)
        (problem,) = measure(engine).problems
        assert problem.endswith("bytes in device, but min(m, P) x G uint64 is 32")


def test_a_temporary_that_is_kept_is_found() -> None:
    """V1's prompt logits go with their step: they are no table."""
    with engine_of("v1") as engine:
        use(engine)
        kept = engine.rt.empty((3, MODEL.vocab_size), torch.float32, name="prompt_logits")
        assert measure(engine).problems == [f"prompt_logits: {kept.nbytes} bytes in device that no formula explains"]
