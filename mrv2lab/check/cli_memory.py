"""``mrv2lab memory``: where an engine's bytes are, table by table, from formulas alone or beside a real engine."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer


def memory(
    model: Annotated[str, typer.Option(help="'tiny', 'smollm2', a preset, a Hugging Face folder or a .gguf file.")] = (
        "tiny"
    ),
    runner: Annotated[str, typer.Option(help="'mrv2' or 'v1'.")] = "mrv2",
    transfer: Annotated[
        str | None, typer.Option(help="'unsafe', 'barrier', 'pinned_copy' or 'uva_pool'; else the runner's own.")
    ] = None,
    max_num_reqs: Annotated[int, typer.Option(help="R, the rows.")] = 1024,
    max_model_len: Annotated[int, typer.Option(help="L, tokens of a request.")] = 1024,
    max_num_batched_tokens: Annotated[int, typer.Option(help="T, tokens of a step.")] = 2048,
    num_blocks: Annotated[int, typer.Option(help="Of the KV pool.")] = 512,
    block_size: Annotated[int, typer.Option(help="B, tokens of a KV block.")] = 16,
    num_speculative_tokens: Annotated[
        int, typer.Option(help="K, drafts; MRV2's formulas alone, since no engine verifies any yet.")
    ] = 0,
    cudagraph_mode: Annotated[
        str, typer.Option(help="As of an engine: some tables lie elsewhere where graphs read them.")
    ] = "none",
    device: Annotated[str, typer.Option(help="Of the engine that --measure builds.")] = "auto",
    measured: Annotated[
        bool, typer.Option("--measure", help="Build the engine, and set its actual buffers against the formulas.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="Weights, KV cache and the decoder's buffers too.")] = False,
    each: Annotated[bool, typer.Option("--each", help="A line for every table, small ones and slots too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Bytes of every state table by place, the largest first, with its formula. With --measure, exit code 1 if one
    differs. --json has every table."""
    try:
        from mrv2lab.check.memory_formulas import MEANINGS
        from mrv2lab.check.memory_ledger import measure, predict
        from mrv2lab.check.memory_report import report
        from mrv2lab.config import CacheConfig, EngineConfig, GraphConfig, RunnerConfig, SchedulerConfig, SpecConfig
        from mrv2lab.engine.engine import Engine
    except ImportError as error:
        _fail(f"the ledger needs {error.name or error}; in a checkout: pip install -e '.[engine]'")
    sizes: dict[str, Any] = {
        "max_num_reqs": max_num_reqs,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max_num_batched_tokens,
    }
    cache: dict[str, Any] = {"num_blocks": num_blocks, "block_size": block_size}
    graphs: Any = {"cudagraph_mode": cudagraph_mode}
    try:
        if num_speculative_tokens and (measured or runner == "v1"):
            raise ValueError(
                "num_speculative_tokens is for runner='mrv2' without --measure: no engine verifies drafts yet"
            )
        if measured:
            way: Any = {"runner": runner, "device": device, "transfer": transfer, "progress": False}
            with Engine(model, **way, **cache, **graphs, **sizes) as engine:
                ledger = measure(engine)
        else:
            transfer = transfer or ("barrier" if runner == "v1" else "uva_pool")
            choice: Any = {"runner": runner, "transfer": transfer}
            ledger = predict(
                EngineConfig(
                    _model_config(model),
                    CacheConfig(**cache),
                    SchedulerConfig(**sizes),
                    RunnerConfig(**choice),
                    SpecConfig(num_speculative_tokens),
                    GraphConfig(**graphs),
                )
            )
    except (ValueError, RuntimeError, OSError, TypeError) as error:
        _fail(error)
    problems = ledger.problems if measured else []
    shown = ledger if everything else ledger.state()
    if as_json:
        rows = shown.rows.drop(columns="needed").astype(object).where(shown.rows.drop(columns="needed").notna(), None)
        made = {
            "words": dict(ledger.words), "meanings": MEANINGS, "rows": rows.to_dict("records"),
            "by_place": shown.by_place().to_dict("index"), "left_out": shown.left_out.table.tolist(),
            "problems": problems,
        }  # fmt: skip
        typer.echo(orjson.dumps(made, option=orjson.OPT_INDENT_2, default=int).decode())
    else:
        for line in report(shown, problems, measured, each):
            typer.echo(line)
        for problem in problems:
            typer.echo(f"differs: {problem}", err=True)
    if problems:
        sys.exit(1)


def _model_config(source: str) -> Any:
    """A model's shape, without its weights where that is possible."""
    from mrv2lab.config import PRESETS
    from mrv2lab.model.config_hf import config_from_folder
    from mrv2lab.model.load import CHECKPOINTS, SHIPPED, load_model

    if source in PRESETS:
        return PRESETS[source]
    folder = CHECKPOINTS / source if source in SHIPPED else Path(source).expanduser()
    if folder.is_dir():
        config = config_from_folder(folder)
        return dataclasses.replace(config, name=source, dtype="float32") if source in SHIPPED else config
    return load_model(source).config


def _fail(error: Exception | str) -> Any:
    """One line on stderr and the exit code of wrong usage."""
    typer.echo(f"mrv2lab: {' '.join(str(error).split())}", err=True)
    sys.exit(2)
