"""What a workload panel asks for, as a value: it makes workload, settings and the Python that does the same."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from mrv2lab.config import TransferName
from mrv2lab.engine.workload import Arrival, Range, Workload, burst, from_csv, steady

ARRIVALS = ("burst", "steady", "csv")
MOST_REQUESTS = 100_000
"""More would take the form itself seconds at every change."""
OWN = "its own"
"""A policy: the runner's own, uva_pool for MRV2 and barrier for V1."""
POLICIES: tuple[str, ...] = (OWN, *get_args(TransferName))


def mix_sampling(
    workload: Workload, *, temperature: float = 0.8, sampled: float = 1.0, seeded: float = 0.0, seed: int = 0
) -> Workload:
    """``workload`` with ``sampled`` of its requests (a share, 0 to 1) drawn at ``temperature`` and the rest greedy;
    ``seeded`` is the share of the sampled ones that have a seed of their own. ``seed`` chooses which, the same always.

    Raises ``ValueError`` for a share outside [0, 1] and a temperature that is not positive.
    """
    for name, share in (("sampled", sampled), ("seeded", seeded)):
        if not 0 <= share <= 1:
            raise ValueError(f"{name} is a share and must lie between 0 and 1, got {share!r}")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be a number above 0 (sampled=0 makes all greedy), got {temperature!r}")
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(workload)).tolist()
    num_sampled = round(sampled * len(workload))
    num_seeded = round(seeded * num_sampled)
    made: list[Arrival] = list(workload)
    for place, index in enumerate(order):
        drawn = place < num_sampled
        params = dataclasses.replace(
            made[index].params,
            temperature=temperature if drawn else 0.0,
            seed=int(rng.integers(2**31)) if place < num_seeded else None,
        )
        made[index] = dataclasses.replace(made[index], params=params)
    return Workload(tuple(made), workload.name, workload.seed)


@dataclass(frozen=True)
class WorkloadForm:
    """The panel's values. Raises ``ValueError`` with a sentence for any that cannot be."""

    model: str = "tiny"
    device: str = "auto"
    v1: bool = True
    v1_policy: str = OWN
    mrv2: bool = True
    mrv2_policy: str = OWN
    async_scheduling: bool = True
    arrivals: str = "burst"
    every: int = 2
    """Of ``steady``: steps between two requests."""
    csv: str = ""
    """Path of a table as ``from_csv`` reads it; lengths and sampling are the table's then."""
    requests: int = 8
    prompt_len: str = "8-32"
    """A number or ``low-high``, tokens; ``max_tokens`` alike."""
    max_tokens: str = "16-32"
    sampled: float = 0.0
    temperature: float = 0.8
    seeded: float = 0.0
    steps: int = 64
    """Turns at most; 0 = to the workload's end."""
    seed: int = 0
    time_limit_s: float = 120.0
    """Seconds after which a run ends at its next step."""

    def __post_init__(self) -> None:
        if not (self.v1 or self.mrv2):
            raise ValueError("no runner is chosen: tick V1, MRV2 or both")
        for name, value, allowed in (
            ("arrivals", self.arrivals, ARRIVALS),
            ("policy of V1", self.v1_policy, POLICIES),
            ("policy of MRV2", self.mrv2_policy, POLICIES),
        ):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
        if not self.model.strip():
            raise ValueError("no model is given: 'tiny', a preset, a Hugging Face folder or a .gguf file")
        for name, count, least in (
            ("requests", self.requests, 1),
            ("steps between requests", self.every, 1),
            ("steps", self.steps, 0),
            ("seed", self.seed, 0),
        ):
            if count < least:
                raise ValueError(f"{name} must be at least {least}, got {count}")
        if self.requests > MOST_REQUESTS:
            raise ValueError(f"requests must be at most {MOST_REQUESTS:,}, got {self.requests:,}")
        if not 0 < self.time_limit_s < math.inf:
            raise ValueError(f"the time limit must be a number of seconds above 0, got {self.time_limit_s}")
        if self.arrivals == "csv":
            if not self.csv.strip():
                raise ValueError("arrivals come from a CSV file, and no file is given")
        else:
            self.workload()  # lengths and shares check themselves

    def workload(self) -> Workload:
        """The requests. Raises ``ValueError`` with a sentence that names a CSV file that cannot be used."""
        if self.arrivals == "csv":
            path = Path(self.csv.strip())
            try:
                return from_csv(path)
            except OSError as error:
                reason = f"it cannot be read ({error.strerror or error}): give a path as seen from {Path.cwd().name}/"
            except ValueError as error:
                reason = str(error).removeprefix(str(path)).lstrip(",: ")
            raise ValueError(f"the CSV file {path} cannot be used: {reason}")
        lengths: dict[str, Any] = {
            "prompt_len": parse_range(self.prompt_len, "prompt length"),
            "max_tokens": parse_range(self.max_tokens, "output length"),
        }
        if self.arrivals == "burst":
            made = burst(self.requests, seed=self.seed, **lengths)
        else:
            made = steady(self.requests, every=self.every, seed=self.seed, **lengths)
        return mix_sampling(made, **self._mix())

    def _mix(self) -> dict[str, Any]:
        return {
            "temperature": self.temperature,
            "sampled": self.sampled,
            "seeded": self.seeded,
            "seed": self.seed,
        }

    def settings(self, names: list[str]) -> dict[str, dict[str, Any]]:
        """An engine's keywords by name: V1 first, then MRV2, of those that are chosen."""
        chosen = [("v1", self.v1_policy)] * self.v1 + [("mrv2", self.mrv2_policy)] * self.mrv2
        made: dict[str, dict[str, Any]] = {}
        for name, (runner, policy) in zip(names, chosen, strict=False):
            options: dict[str, Any] = {"runner": runner, "device": self.device}
            if policy != OWN:
                options["transfer"] = policy
            made[name] = options | {"async_scheduling": self.async_scheduling}
        return made

    @property
    def num_settings(self) -> int:
        """How many runs a press of the button makes."""
        return self.v1 + self.mrv2

    def code(self, names: list[str]) -> str:
        """Python that makes the same runs (the time limit apart), to be copied into a cell."""
        lines = [
            f"# {'runs' if len(names) > 1 else 'run'} {' and '.join(names)}",
            "from mrv2lab.recorder.overlay import overlay",
            "from mrv2lab.recorder.side_by_side import figures_frame, run_settings",
        ]
        if self.arrivals == "csv":
            lines += ["from mrv2lab.engine.workload import from_csv", "", f"workload = from_csv({self.csv.strip()!r})"]
        else:
            prompt_len, max_tokens = parse_range(self.prompt_len, ""), parse_range(self.max_tokens, "")
            every = f"every={self.every}, " if self.arrivals == "steady" else ""
            mix = ", ".join(f"{name}={value!r}" for name, value in self._mix().items())
            lines += [
                "from mrv2lab.recorder.workload_form import mix_sampling",
                f"from mrv2lab.engine.workload import {self.arrivals}",
                "",
                f"workload = {self.arrivals}("
                f"{self.requests}, {every}prompt_len={prompt_len}, max_tokens={max_tokens}, seed={self.seed})",
                f"workload = mix_sampling(workload, {mix})",
            ]
        lines += ["settings = {"]
        lines += [f"    {name!r}: {options!r}," for name, options in self.settings(names).items()]
        lines += [
            "}",
            f"runs = run_settings(workload, settings, model={self.model.strip()!r}, steps={self.steps or None})",
            "figures_frame(runs)  # and overlay(*runs.values()) draws them on one axis",
        ]
        return "\n".join(lines)


def parse_range(text: str, what: str) -> Range:
    """``"16"`` or ``"8-32"``. Raises ``ValueError`` for anything else."""
    found = re.fullmatch(r"\s*(\d{1,9})\s*(?:(?:-|\.\.|to)\s*(\d{1,9})\s*)?", text)
    if found is None:
        raise ValueError(f"{what} must be a number of tokens or a range like 8-32, got {text!r}")
    low = int(found.group(1))
    high = int(found.group(2)) if found.group(2) is not None else low
    if not 1 <= low <= high:
        raise ValueError(f"{what} must be at least 1 and its range must not fall, got {text!r}")
    return low if found.group(2) is None else (low, high)
