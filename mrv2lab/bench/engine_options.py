"""Options of our engine in the race: from ``name=value`` in a command to what each runner gets, refused before any
process is started."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_type_hints

import orjson

from mrv2lab.config import (
    PRESETS,
    CacheConfig,
    EngineConfig,
    GraphConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
)
from mrv2lab.engine.engine import Engine
from mrv2lab.engine.options import split_options
from mrv2lab.model.config_hf import config_from_folder
from mrv2lab.model.load import CHECKPOINTS

PYTHON = {"None": None, "True": True, "False": False}
RACES = ("model", "runner", "device")
"""Arguments of ``Engine`` that are the race's own."""
OBJECTS = ("observer", "logits_processors")
"""Keywords of ``Engine`` whose values are no text."""


def parsed(options: Sequence[str]) -> dict[str, Any]:
    """``name=value`` of each. A value is JSON, or Python's None, True or False; ``1,2,4`` is a list of them; all else
    is a text. Raises ``ValueError`` for one without ``=``."""
    made: dict[str, Any] = {}
    for text in options:
        name, found, value = text.partition("=")
        if not found or not name.strip():
            raise ValueError(f"an option is name=value, got {text!r}")
        made[name.strip()] = _value(value.strip())
    return made


def _value(text: str) -> Any:
    if text in PYTHON:
        return PYTHON[text]
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        if "," not in text or text[0] in '[{"':
            return text
    return [_value(part.strip()) for part in text.removesuffix(",").split(",")]


def allotted(
    runners: Sequence[str], model: str, base: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, str]]]:
    """What each runner gets: ``base`` and of ``options`` all but those that it refuses and another one takes
    (``fused_prepare`` is MRV2's, ``reorder`` V1's); and runner -> option -> why it was left out.

    Raises ``ValueError`` or ``TypeError`` for options that no engine of ``model`` (a preset's name, or a shipped
    model's) can be configured with.
    """
    for name in options:
        if name in (*RACES, *OBJECTS):
            raise ValueError(f"option {name!r} cannot be given here: " + _why_not(name))
    shape = _shape(model)
    refusals = {
        name: {runner: _refusal(runner, shape, {**base, name: value}) for runner in runners}
        for name, value in options.items()
    }
    given: dict[str, dict[str, Any]] = {}
    left_out: dict[str, dict[str, str]] = {}
    for runner in runners:
        out = {name: by[runner] for name, by in refusals.items() if by[runner] and not all(by.values())}
        given[runner] = {**base, **{name: value for name, value in options.items() if name not in out}}
        configured(runner, shape, given[runner])
        if out:
            left_out[runner] = out
    return given, left_out


def configured(runner: str, model: ModelConfig, options: Mapping[str, Any]) -> EngineConfig:
    """The config of an engine that nobody builds. Raises ``ValueError`` or ``TypeError`` where ``Engine`` would."""
    mine = dict(options)
    keywords = {name: mine.pop(name) for name in _keywords() if name in mine}
    transfer = keywords.get("transfer") or ("barrier" if runner == "v1" else "uva_pool")
    dtype: Any = keywords.get("dtype") or model.dtype
    cache, scheduler, chosen, graphs = split_options(mine, {"runner": runner, "transfer": transfer})
    if "max_model_len" not in mine:
        longest = min(scheduler.max_model_len, model.max_position_embeddings)
        scheduler = dataclasses.replace(scheduler, max_model_len=longest)
    made = EngineConfig(dataclasses.replace(model, dtype=dtype), cache, scheduler, chosen, graphs=graphs)
    _check_kinds(options)
    return made


def _check_kinds(options: Mapping[str, Any]) -> None:
    """Raise ``TypeError`` for a text where a number or a truth value belongs: a misspelt ``flase`` would be taken for
    true."""
    owners: list[Any] = [Engine.__init__, CacheConfig, SchedulerConfig, RunnerConfig, GraphConfig]
    kinds = {name: kind for owner in owners for name, kind in get_type_hints(owner).items()}
    for name, value in options.items():
        kind = kinds[name]
        allowed = set(get_args(kind) or (kind,))
        if float in allowed:
            allowed.add(int)
        if allowed <= {int, float, bool, type(None)} and type(value) not in allowed:
            names = " or ".join("None" if one is type(None) else one.__name__ for one in get_args(kind) or (kind,))
            raise TypeError(f"option {name!r} is {names}, got {value!r}")


def _refusal(runner: str, model: ModelConfig, options: Mapping[str, Any]) -> str:
    try:
        configured(runner, model, options)
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


def _keywords() -> list[str]:
    """Keywords of ``Engine`` itself, which are no field of a config."""
    given = inspect.signature(Engine).parameters.values()
    return [one.name for one in given if one.kind is one.KEYWORD_ONLY and one.name not in OBJECTS]


def _why_not(name: str) -> str:
    if name in RACES:
        return "the race chooses it; see --runner and --device"
    return "its value is a Python object"


def _shape(name: str) -> ModelConfig:
    if name in PRESETS:
        return PRESETS[name]
    return dataclasses.replace(config_from_folder(CHECKPOINTS / name), name=name, dtype="float32")
