"""From an engine's keywords to the configs whose fields they are."""

from __future__ import annotations

import dataclasses
from typing import Any

from mrv2lab.config import CacheConfig, RunnerConfig, SchedulerConfig


def split_options(
    options: dict[str, Any], runner_options: dict[str, Any]
) -> tuple[CacheConfig, SchedulerConfig, RunnerConfig]:
    """Sort keyword options into the configs they are fields of. Raises ``TypeError`` naming an unknown one."""
    kinds: list[Any] = [CacheConfig, SchedulerConfig, RunnerConfig]
    made: list[dict[str, Any]] = [{}, {}, dict(runner_options)]
    for name, value in options.items():
        for kind, chosen in zip(kinds, made, strict=True):
            if name in _fields(kind):
                chosen[name] = value
                break
        else:
            known = ", ".join(sorted(name for kind in kinds for name in _fields(kind)))
            raise TypeError(f"unknown option {name!r}; known: {known}")
    return CacheConfig(**made[0]), SchedulerConfig(**made[1]), RunnerConfig(**made[2])


def _fields(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]
