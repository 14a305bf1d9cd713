"""The sampler's benchmark in a tiny form: whose rows there are, what they say, who is absent and why."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from mrv2lab.bench import sampler_bench, vllm_kernels
from mrv2lab.bench.penalty_bench import penalties_by_length
from mrv2lab.bench.sampler_batch import AND_DRAWS, OPS, Entrant, SamplerBatch, kept_bytes, our_ways
from mrv2lab.bench.sampler_bench import KEYS, bench
from mrv2lab.bench.sampler_peers import Absent, flashinfer_ways, torch_ways
from mrv2lab.cli import app
from mrv2lab.ops.noise import noise_spec
from tests.sample import oracle

TINY: dict[str, Any] = {"rows": 2, "vocab": 300, "repeats": 2, "lengths": (), "progress": False}


def batch(rows: int = 3, vocab: int = 500, dtype: torch.dtype = torch.float32) -> SamplerBatch:
    return SamplerBatch(rows, vocab, dtype, torch.device("cpu"))


# -- the rows ----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return bench("cpu", **TINY)


def test_every_op_has_ours_and_torchs(figures: dict[str, Any]) -> None:
    for op in OPS:
        rows = [row for row in figures["rows"] if row["op"] == op]
        assert all(tuple(row) == KEYS for row in rows)
        impls = {row["impl"] for row in rows}
        assert "mrv2lab" in impls, op
        assert any(impl.startswith("torch") for impl in impls), op
        assert all(impl.startswith(("mrv2lab", "torch")) for impl in impls)
        dtypes = {row["dtype"] for row in rows}
        assert dtypes == ({"float32"} if op == "penalties" else {"float32", "bfloat16"})
    assert [row["op"] for row in figures["rows"]] == sorted((row["op"] for row in figures["rows"]), key=OPS.index)


def test_figures_are_figures(figures: dict[str, Any]) -> None:
    for row in figures["rows"]:
        assert (row["rows"], row["vocab"]) == (2, 300)
        assert row["median_us"] > 0 <= row["iqr_us"]
        assert row["peak_bytes"] >= 0
        size = 4 if row["op"] == "penalties" or row["dtype"] == "float32" else 2
        bandwidth = 2 * 300 * size / row["median_us"] / 1e3
        assert row["fraction_of_copy_bandwidth"] == pytest.approx(bandwidth / figures["copy_GB_per_s"])
    assert (figures["device"], figures["backend"], figures["failed"]) == ("cpu", "spec", {})


def test_the_absent_are_named_with_the_reason(figures: dict[str, Any]) -> None:
    assert set(figures["absent"]) == {"flashinfer", "vllm"}
    assert "NVIDIA GPU" in figures["absent"]["flashinfer"]
    assert "--vllm-kernels" in figures["absent"]["vllm"]


def test_who_fails_is_named_and_the_others_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(b: SamplerBatch) -> list[Entrant]:
        hoarder = Entrant("greedy", "torch hoarder", lambda: None, owned=lambda: 10**9)
        return [Entrant("greedy", "torch broken", lambda: b.logits.no_such_method()), hoarder, *torch_ways(b)]

    monkeypatch.setattr(sampler_bench, "torch_ways", broken)
    found = bench("cpu", **TINY, ops=("greedy",), dtypes=("float32",))
    assert list(found["failed"]) == ["greedy float32 torch broken"]
    assert "no_such_method" in found["failed"]["greedy float32 torch broken"]
    peaks = {row["impl"]: row["peak_bytes"] for row in found["rows"]}
    assert set(peaks) == {"mrv2lab", "torch argmax", "torch hoarder"}
    assert peaks["torch hoarder"] >= 10**9 > peaks["torch argmax"]


def test_what_was_measured_is_kept_when_a_later_entrant_never_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The file holds the ops before it, and the bar's last words are its name."""

    def endless(b: SamplerBatch) -> list[Entrant]:
        def forever() -> None:
            raise KeyboardInterrupt

        return [Entrant("greedy", "torch endless", forever)]

    monkeypatch.setattr(sampler_bench, "torch_ways", endless)
    out = tmp_path / "sampler.json"
    result = call("--rows", "2", "--vocab", "300", "--repeats", "2", "--peer", "torch", "--out", str(out))
    assert result.exit_code == 130
    *_, bar, said = result.stderr.splitlines()
    assert said.startswith("mrv2lab: interrupted; ")
    assert "greedy float32 torch endless: warms up" in bar.rpartition("sampler:")[2]
    written = json.loads(out.read_text())["figures"]
    assert ({row["op"] for row in written["rows"]}, written["finished"]) == ({"gumbel"}, False)


def test_a_slow_first_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_bench, "SLOW_S", 0.0)
    found = bench("cpu", **TINY, ops=("greedy",), dtypes=("float32",), peers=())
    assert list(found["slow_to_start"]) == ["greedy float32 mrv2lab"]
    assert (found["finished"], found["absent"]) == (True, {})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rows": 0}, "rows must be at least 1"),
        ({"vocab": 1}, "vocab must be at least 2"),
        ({"repeats": 1}, "repeats must be at least 2"),
        ({"ops": ("top_k",)}, "op 'top_k' is not one of gumbel"),
        ({"dtypes": ("float8",)}, "dtype 'float8' is not one of float32"),
        ({"peers": ("sglang",)}, "peer 'sglang' is not one of torch"),
    ],
)
def test_bench_refuses(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        bench("cpu", **{**TINY, **wrong})


def test_peaks_are_seen() -> None:
    """Two of 4 MB at a time, of three."""
    host = sampler_bench._Host()

    def work() -> None:
        first = torch.zeros(10**6)
        second = first + 1
        del first
        second.exp()

    assert 8e6 <= host.peak(work) < 8e6 + 1e5


def test_kept_bytes_are_those_of_the_entrants() -> None:
    want = kept_bytes(3, 500)
    ours = {one.op: one.owned_bytes() for one in our_ways(batch()) if one.impl == "mrv2lab"}
    assert {op: ours[op] for op in want} == want
    assert kept_bytes(256, 151_936)["logprobs"] < 2 * 2**20, "the issue's bound"


# -- entrants do what they say -------------------------------------------------------------------------------------
def outcome(one: Entrant, b: SamplerBatch) -> Any:
    """What it made: the edited logits, or what it returned."""
    if one.before is None:
        return one.run()
    one.before()
    one.run()
    return b.work


def test_ways_of_one_op_keep_the_same_tokens() -> None:
    """Ours, V1's and torch's cuts of a random row without ties; the logits come back before each."""
    b = batch()
    for op, kept in {
        "topk_topp": lambda x: oracle.top_p(oracle.top_k(x, 20), 0.95),
        "top_p": lambda x: oracle.top_p(x, 0.95),
        "min_p": lambda x: oracle.min_p(x, 0.05),
    }.items():
        want = [kept(row) > -oracle.INF for row in b.logits.double().numpy()]
        ways = [
            one
            for one in our_ways(b) + torch_ways(b)
            if one.op == op and "find" not in one.impl and one.impl != AND_DRAWS
        ]
        assert len(ways) >= 2
        for one in ways:
            got = outcome(one, b) > -oracle.INF
            assert got.numpy().tolist() == [row.tolist() for row in want], one.impl
    b.restore()
    assert torch.equal(b.work, b.logits)


def test_a_draw_with_its_cut_draws_from_masked_logits() -> None:
    b = batch(rows=8)
    ways = {(one.op, one.impl): one for one in our_ways(b)}
    for op in ("topk_topp", "top_p", "min_p"):
        masked = outcome(ways[op, "mrv2lab"], b).clone()
        noise = np.stack([noise_spec(int(b.seeds[i]), int(b.positions[k]), 500)
                          for i, k in zip(b.idx_mapping.tolist(), b.logits_indices.tolist(), strict=True)])  # fmt: skip
        want = (masked.numpy() + noise).argmax(axis=1)
        assert ways[op, AND_DRAWS].run().tolist() == want.tolist()  # type: ignore[attr-defined]


def test_ways_of_penalties_agree() -> None:
    b = batch()
    made = [outcome(one, b).clone() for one in our_ways(b) + torch_ways(b) if one.op == "penalties"]
    assert len(made) == 2
    assert not torch.equal(made[0], b.logits)
    torch.testing.assert_close(made[0], made[1], rtol=1e-6, atol=1e-6)


def test_greedy_and_logprobs_agree_with_torch() -> None:
    b = batch()
    ways = {one.op: one for one in torch_ways(b)}
    values, ids, own, rank = ways["logprobs"].run()  # type: ignore[misc]
    row = b.logits[0].double().numpy()
    want_ids, want = oracle.top_logprobs(row, int(b.chosen[0]), 20)
    assert [int(b.chosen[0]), *ids[0].tolist()] == want_ids
    assert [float(own[0]), *values[0].tolist()] == pytest.approx(want, rel=1e-5, abs=1e-5)
    assert int(rank[0]) == oracle.rank(row, int(b.chosen[0]))
    assert ways["greedy"].run().tolist() == b.logits.argmax(-1).tolist()  # type: ignore[attr-defined]


# -- vLLM's files ------------------------------------------------------------------------------------------------------
KERNEL_FILE = """
from vllm.sampling_params import SamplingParams
from vllm.triton_utils import tl, triton
from vllm.utils.math_utils import cdiv, next_power_of_2
from vllm.v1.outputs import LogprobsTensors

@triton.jit
def _kernel(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), 1)

def answer(**given):
    return LogprobsTensors(**given), cdiv(7, 2), next_power_of_2(5)
"""


def write_kernels(folder: Path, text: str = KERNEL_FILE, leave_out: str = "") -> Path:
    for name in vllm_kernels.KERNELS:
        path = folder / (name.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        if name != leave_out:
            path.write_text(text)
    return folder


def test_kernel_files_load_without_vllm(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    with vllm_kernels.kernel_files(write_kernels(tmp_path)) as kernels:
        assert list(kernels) == list(vllm_kernels.KERNELS)
        made, four, eight = kernels[vllm_kernels.LOGPROB].answer(ranks=3)
        assert (made.ranks, four, eight) == (3, 4, 8)
    assert not any(name.partition(".")[0] == "vllm" for name in sys.modules)
    assert not any(isinstance(finder, vllm_kernels._Finder) for finder in sys.meta_path)


def test_kernel_files_put_a_loaded_vllm_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    there = type(sys)("vllm")
    monkeypatch.setitem(sys.modules, "vllm", there)
    with vllm_kernels.kernel_files(write_kernels(tmp_path)):
        assert sys.modules["vllm"] is not there
    assert sys.modules["vllm"] is there


@pytest.mark.parametrize("text", ["raise RuntimeError('no')", "import no_such_module_at_all"])
def test_files_that_do_not_load(tmp_path: Path, text: str) -> None:
    pytest.importorskip("triton")
    with pytest.raises(Absent, match="do not load"), vllm_kernels.kernel_files(write_kernels(tmp_path, text)):
        pass
    assert not any(name.partition(".")[0] == "vllm" for name in sys.modules)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    folder = write_kernels(tmp_path, leave_out=vllm_kernels.MIN_P_FILE)
    found = bench("cpu", **TINY, ops=("greedy",), dtypes=("float32",), vllm_kernels=folder)
    assert found["absent"]["vllm"].endswith("lacks vllm/v1/worker/gpu/sample/min_p.py")


def test_peers_without_a_gpu() -> None:
    with pytest.raises(Absent, match="GPU"):
        flashinfer_ways(batch())
    with pytest.raises(Absent, match="GPU"):
        vllm_kernels.vllm_ways(batch(), {})


# -- penalties against output length -----------------------------------------------------------------------------------
def test_penalties_by_length() -> None:
    rows = penalties_by_length("cpu", lengths=(8, 64), rows=2, vocab=100, repeats=2)
    assert [(row["output_len"], row["impl"]) for row in rows] == [
        (8, "mrv2lab"), (8, "mrv2lab v1"), (64, "mrv2lab"), (64, "mrv2lab v1"),
    ]  # fmt: skip
    assert all(row["median_us"] > 0 for row in rows)
    with pytest.raises(ValueError, match="at least 2"):
        penalties_by_length("cpu", repeats=1)


# -- the command -------------------------------------------------------------------------------------------------------
def call(*words: str) -> Any:
    return CliRunner().invoke(app, ["bench", "sampler", "--device", "cpu", *words])


def test_the_command_prints_one_object(tmp_path: Path) -> None:
    out = tmp_path / "sampler.json"
    result = call("--json", "--rows", "2", "--vocab", "300", "--repeats", "2", "--op", "greedy", "--out", str(out))
    assert (result.exit_code, result.stderr) == (0, "")
    made = json.loads(result.stdout)
    assert {row["op"] for row in made["rows"]} == {"greedy"}
    assert made["machine"]["cpus"]
    written = json.loads(out.read_text())
    assert (written["name"], written["figures"]["rows"]) == ("sampler_cpu", made["rows"])


def test_the_command_prints_a_table() -> None:
    lines = call("--rows", "2", "--vocab", "300", "--repeats", "2", "--op", "min_p").stdout.splitlines()
    assert "no figure of a kernel" in lines[0]
    assert lines[1].split()[:2] == ["op", "rows"]
    assert any(line.startswith("min_p") and line.endswith("  mrv2lab") for line in lines)
    assert any(line.startswith("absent: vllm - ") for line in lines)


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--op", "sort"], "op 'sort'"), (["--rows", "0"], "rows must be"), (["--out", "."], ". is a folder")],
)
def test_the_command_refuses(words: list[str], said: str) -> None:
    result = call(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("mrv2lab: ") and said in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_on_a_gpu() -> None:
    found = bench("cuda", rows=4, vocab=5000, repeats=3, lengths=(16,), progress=False)
    assert (found["backend"], found["failed"]) == ("triton", {})
    assert {row["op"] for row in found["rows"] if row["impl"] == "mrv2lab"} == set(OPS)
