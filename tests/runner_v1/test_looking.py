"""Looking into the V1 runner, writing over its tokens, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from mrv2lab.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig, SpecConfig
from mrv2lab.recorder.paused import paused_step
from mrv2lab.recorder.recorder import Recorder
from mrv2lab.runner_v1 import ModelRunnerV1
from mrv2lab.runner_v1.buffers import BUFFERS
from mrv2lab.runtime import make_runtime
from tests.engine.small import MODEL
from tests.runner_v1.small import greedy, v1

# -- looking -----------------------------------------------------------------------------------------------------------


def test_rows_are_the_batch() -> None:
    with v1() as engine:
        assert len(engine.rows()) == 0
        for i in range(3):
            engine.submit([1 + i, 2, 3], greedy(9), request_id="abc"[i])
        engine.step()
        engine.step()
        engine.abort("a")
        engine.step()
        rows = engine.rows()
        assert rows["request"].tolist() == ["c", "b"], "the last row filled the hole"
        assert rows["placeholders"].tolist() == [3, 3]
        assert rows["total_len"].tolist() == [6, 6]
        assert rows["num_computed"].tolist() == [4, 4]
        assert rows["text"][0] == "3 2 3 -1 -1 -1"


def test_tables_have_the_names_of_the_buffers() -> None:
    with v1() as engine:
        runner = engine.worker.runner
        names = {name.partition(".")[0] for name in runner.tables()}
        assert names == {*BUFFERS, "positions", "seq_lens", "logits_indices", "slot_mappings"}
        assert set(BUFFERS) <= {name.partition(".")[0] for name in runner.host_tables()}
        assert runner.staged() == {}
        for name, table in runner.tables().items():
            assert engine.rt.read(table).numpy() is not None, name


def test_force_writes_tokens_over_the_sampled_ones() -> None:
    with v1() as engine:
        runner, seen = engine.worker.runner, []
        engine.rt.register("test.force", lambda sampled, token: sampled.fill_(token))

        def force(req_ids: list[str], sampled_ids: Any) -> None:
            seen.append((list(req_ids), tuple(sampled_ids.shape)))
            engine.rt.run("test.force", sampled_ids, 17 + len(seen), writes=(sampled_ids,))

        runner.force = force
        made = engine.generate([[1, 2, 3], [4, 5]], greedy(3))
        assert [output.token_ids for output in made] == [[18, 19, 20]] * 2
        assert seen == [(["r0", "r1"], (2, 1))] * 3


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"protected": ("block_tables",)},
            "names 'block_tables', which is no buffer of V1; its buffers: .*'input_ids'",
        ),
        ({"protected": "input_ids"}, r"must be None \(all\) or a tuple of buffer names, got 'input_ids'"),
        ({"protected": (), "transfer": "uva_pool"}, "transfer='uva_pool' has no such barrier; use runner='v1'"),
        ({"protected": (), "async_scheduling": False}, "for asynchronous scheduling only; set async_scheduling=True"),
        ({"protected": (), "runner": "mrv2"}, "runner='mrv2' with transfer='uva_pool' has no such barrier"),
        ({"reorder": "sorted"}, "reorder must be one of .*'decode_first'.*, got 'sorted'"),
        ({"reorder": "mrv2", "runner": "mrv2"}, "reorder='mrv2' is for runner='v1': MRV2 sorts each batch"),
        ({"runner": "v2"}, r"runner must be one of \('mrv2', 'v1'\), got 'v2'"),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_bad_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        v1(**options)


def test_drafts_are_refused() -> None:
    config = EngineConfig(
        MODEL,
        CacheConfig(num_blocks=9, block_size=4),
        SchedulerConfig(max_num_reqs=2, max_model_len=16),
        RunnerConfig(runner="v1", transfer="barrier", device="cpu"),
        SpecConfig(2),
    )
    with pytest.raises(ValueError, match="no rejection sampler yet, so it cannot verify drafts; set num_spec"):
        ModelRunnerV1(config, make_runtime(config.runner), None, None)  # type: ignore[arg-type]


def test_the_two_calls_alternate() -> None:
    with v1() as engine:
        runner = engine.worker.runner
        with pytest.raises(RuntimeError, match="sample_tokens needs an execute_model with tokens before it"):
            engine.worker.sample_tokens()
        engine.submit([1, 2], greedy())
        message = engine.core.project(engine.scheduler.schedule())
        engine.worker.execute_model(message)
        with pytest.raises(RuntimeError, match="execute_model was called again before sample_tokens"):
            engine.worker.execute_model(message)
        output = engine.worker.sample_tokens()
        output.get_output()
        with pytest.raises(RuntimeError, match="the output of step 0 was fetched already"):
            output.get_output()
        assert runner.batch.req_ids == ["r0"]


def test_a_recorder_refuses_v1() -> None:
    with v1() as engine, pytest.raises(ValueError, match=r"MRV2's rows, and this engine's runner is 'v1'; record with"):
        Recorder(engine)


def test_a_paused_step_stops_at_v1s_phases() -> None:
    with v1() as engine:
        engine.submit([1, 2, 3], greedy(4))
        engine.step()
        phases = list(paused_step(engine))
        wanted = ["barrier_wait", "update_states", "prepare_inputs", "prepare_attn", "forward", "logits", "sample"]
        assert phases[:9] == ["schedule", *wanted, "postprocess"]
        assert phases[9:] == ["copy_output", "wait_output", "update_from_output"]
        engine.step()
        assert len(engine.output("r0").token_ids) == 2
