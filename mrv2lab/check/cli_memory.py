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
    device: Annotated[str, typer.Option(help="Of the engine that --measure builds.")] = "auto",
    measured: Annotated[
        bool, typer.Option("--measure", help="Build the engine, and set its actual buffers against the formulas.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="Weights, KV cache and the decoder's buffers too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Bytes of every state table by place, as a function of R, L, V, K. With --measure, exit code 1 if one differs."""
    try:
        from mrv2lab.check.memory_ledger import measure, predict
        from mrv2lab.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
        from mrv2lab.engine.engine import Engine
    except ImportError as error:
        _fail(f"the ledger needs {error.name or error}; in a checkout: pip install -e '.[engine]'")
    sizes: dict[str, Any] = {
        "max_num_reqs": max_num_reqs,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max_num_batched_tokens,
    }
    try:
        if measured:
            way: Any = {"runner": runner, "device": device, "transfer": transfer}
            with Engine(model, **way, num_blocks=num_blocks, **sizes) as engine:
                ledger = measure(engine)
        else:
            transfer = transfer or ("barrier" if runner == "v1" else "uva_pool")
            choice: Any = {"runner": runner, "transfer": transfer}
            ledger = predict(
                EngineConfig(
                    _model_config(model), CacheConfig(num_blocks), SchedulerConfig(**sizes), RunnerConfig(**choice)
                )
            )
    except (ValueError, RuntimeError, OSError, TypeError) as error:
        _fail(error)
    problems = ledger.problems if measured else []
    shown = ledger if everything else ledger.state()
    if as_json:
        rows = shown.rows.drop(columns="needed").astype(object).where(shown.rows.drop(columns="needed").notna(), None)
        made = {
            "words": dict(ledger.words), "rows": rows.to_dict("records"),
            "by_place": shown.by_place().to_dict("index"), "problems": problems,
        }  # fmt: skip
        typer.echo(orjson.dumps(made, option=orjson.OPT_INDENT_2, default=int).decode())
    else:
        _print(shown, problems, measured)
    if problems:
        sys.exit(1)


def _print(ledger: Any, problems: list[str], measured: bool) -> None:
    import pandas as pd

    typer.echo(", ".join(f"{name} = {value:,}" for name, value in ledger.words.items()))
    what = "requested" if measured else "by formula"
    typer.echo(f"{'table':44}{'place':8}{what:>16}{'rounded':>16}  {'formula':34}module")
    for row in ledger.rows.itertuples():
        there = not pd.isna(row.requested)
        taken = row.requested if there else row.expected
        number = "-" if pd.isna(taken) else f"{int(taken):,}"
        note = "" if row.needed or there else "  (with the first request that needs it)"
        typer.echo(
            f"{row.table:44}{row.place:8}{number:>16}{row.rounded:>16,}  {row.formula or 'its op decides':34}"
            f"{row.owner}{note}"
        )
    for place, row in ledger.by_place().iterrows():
        typer.echo(f"{'all of it':44}{place:8}{int(row['requested']):>16,}{int(row['rounded']):>16,}")
    for problem in problems:
        typer.echo(f"differs: {problem}", err=True)
    if measured and not problems:
        typer.echo("every table has the bytes of its formula")


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
