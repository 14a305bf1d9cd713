"""From an engine's keywords to the configs whose fields they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mrv2lab.config import CacheConfig, GraphConfig, RunnerConfig, SchedulerConfig, did_you_mean

if TYPE_CHECKING:
    import torch

SMALL_MODEL = 50_000_000
"""Parameters below which queued work on a CPU gets one thread unless ``threads`` says otherwise."""


def split_options(
    options: dict[str, Any], runner_options: dict[str, Any]
) -> tuple[CacheConfig, SchedulerConfig, RunnerConfig, GraphConfig]:
    """Sort keyword options into the configs they are fields of.

    Raises ``TypeError`` naming an unknown one, and ``ValueError`` for ``cudagraph_capture_sizes`` without any
    ``cudagraph_mode``, whose default captures none of them (to compare modes, say ``"none"``).
    """
    kinds: list[Any] = [CacheConfig, SchedulerConfig, RunnerConfig, GraphConfig]
    made: list[dict[str, Any]] = [{}, {}, dict(runner_options), {}]
    for name, value in options.items():
        for kind, chosen in zip(kinds, made, strict=True):
            if name in _fields(kind):
                chosen[name] = value
                break
        else:
            known = sorted(name for kind in kinds for name in _fields(kind))
            raise TypeError(f"unknown option {name!r}; known: {', '.join(known)}{did_you_mean(name, known)}")
    if options.get("cudagraph_capture_sizes") is not None and "cudagraph_mode" not in options:
        raise ValueError(
            "cudagraph_capture_sizes are given, but no cudagraph_mode, and the default 'none' captures nothing; give "
            "cudagraph_mode='full_and_piecewise', say"
        )
    return CacheConfig(**made[0]), SchedulerConfig(**made[1]), RunnerConfig(**made[2]), GraphConfig(**made[3])


def _fields(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def threads_for(config: RunnerConfig, weights: Mapping[str, torch.Tensor]) -> int | None:
    """OpenMP threads of queued work on a CPU; None = as torch is set.

    A second thread gains a small model nothing, and beside other busy processes OpenMP's spinning costs a hundredfold.
    """
    small = sum(weight.numel() for weight in weights.values()) < SMALL_MODEL
    return 1 if config.threads is None and small else config.threads
