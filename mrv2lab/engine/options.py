"""From an engine's keywords to the configs whose fields they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mrv2lab.config import CacheConfig, GraphConfig, RunnerConfig, SchedulerConfig

if TYPE_CHECKING:
    import torch

SMALL_MODEL = 50_000_000
"""Parameters below which queued work on a CPU gets one thread unless ``threads`` says otherwise."""


def split_options(
    options: dict[str, Any], runner_options: dict[str, Any]
) -> tuple[CacheConfig, SchedulerConfig, RunnerConfig, GraphConfig]:
    """Sort keyword options into the configs they are fields of. Raises ``TypeError`` naming an unknown one."""
    kinds: list[Any] = [CacheConfig, SchedulerConfig, RunnerConfig, GraphConfig]
    made: list[dict[str, Any]] = [{}, {}, dict(runner_options), {}]
    for name, value in options.items():
        for kind, chosen in zip(kinds, made, strict=True):
            if name in _fields(kind):
                chosen[name] = value
                break
        else:
            known = ", ".join(sorted(name for kind in kinds for name in _fields(kind)))
            raise TypeError(f"unknown option {name!r}; known: {known}")
    return CacheConfig(**made[0]), SchedulerConfig(**made[1]), RunnerConfig(**made[2]), GraphConfig(**made[3])


def _fields(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def threads_for(config: RunnerConfig, weights: Mapping[str, torch.Tensor]) -> int | None:
    """OpenMP threads of queued work on a CPU; None = as torch is set.

    A second thread gains a small model nothing, and beside other busy processes OpenMP's spinning costs a hundredfold.
    """
    small = sum(weight.numel() for weight in weights.values()) < SMALL_MODEL
    return 1 if config.threads is None and small else config.threads
