"""What arrives when: a workload is a value, so that two runners can be given the same one.

Arrivals are counted in engine steps, not seconds: the same on every machine.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mrv2lab.protocol import SamplingParams

Range = int | tuple[int, int]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request and the step before which it is submitted.

    ``prompt`` is text, token ids, or a number of random token ids to be drawn from the model's vocabulary.
    """

    step: int
    prompt: str | tuple[int, ...] | int
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """Arrivals in the order of their steps; ``seed`` draws the random prompts."""

    arrivals: tuple[Arrival, ...]
    name: str = "workload"
    seed: int = 0

    def __len__(self) -> int:
        return len(self.arrivals)

    def __iter__(self) -> Iterator[Arrival]:
        return iter(self.arrivals)

    def resolve(self, vocab_size: int) -> Workload:
        """The same workload with every random prompt drawn, ids in [0, vocab_size)."""
        rng = np.random.default_rng(self.seed)
        made = []
        for arrival in self.arrivals:
            prompt = arrival.prompt
            if isinstance(prompt, int):
                prompt = tuple(int(token) for token in rng.integers(0, vocab_size, prompt))
            made.append(Arrival(arrival.step, prompt, arrival.params, arrival.priority))
        return Workload(tuple(made), self.name, self.seed)


def burst(
    num_requests: int,
    *,
    prompt_len: Range = (8, 32),
    max_tokens: Range = (8, 32),
    temperature: float = 0.0,
    ignore_eos: bool = True,
    seed: int = 0,
) -> Workload:
    """``num_requests`` requests at once. Lengths are a number or an inclusive range."""
    return steady(
        num_requests,
        every=0,
        prompt_len=prompt_len,
        max_tokens=max_tokens,
        temperature=temperature,
        ignore_eos=ignore_eos,
        seed=seed,
        name="burst",
    )


def steady(
    num_requests: int,
    *,
    every: int = 1,
    prompt_len: Range = (8, 32),
    max_tokens: Range = (8, 32),
    temperature: float = 0.0,
    ignore_eos: bool = True,
    seed: int = 0,
    name: str = "steady",
) -> Workload:
    """One request every ``every`` steps. Lengths are a number or an inclusive range."""
    if num_requests < 1 or every < 0:
        raise ValueError(f"num_requests must be >= 1 and every >= 0, got {num_requests} and {every}")
    rng = np.random.default_rng(seed)
    prompts, lengths = _draw(rng, prompt_len, num_requests), _draw(rng, max_tokens, num_requests)
    arrivals = tuple(
        Arrival(i * every, prompt, SamplingParams(max_tokens=length, temperature=temperature, ignore_eos=ignore_eos))
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    )
    return Workload(arrivals, name, seed)


def _draw(rng: np.random.Generator, span: Range, count: int) -> list[int]:
    ends = (span, span) if isinstance(span, int) else span
    if not (isinstance(ends, Sequence) and [type(end) for end in ends] == [int, int] and 1 <= ends[0] <= ends[1]):
        raise ValueError(f"a length must be a positive integer or an inclusive (low, high), got {span!r}")
    low, high = ends
    return [int(value) for value in rng.integers(low, high + 1, count)]


_COLUMNS = {"step", "prompt", "prompt_len", "max_tokens", "temperature", "seed", "ignore_eos", "priority"}


def from_csv(path: str | Path) -> Workload:
    """A workload from a table with a header.

    Columns: ``step``, ``prompt`` (text) or ``prompt_len`` (random tokens), and optionally ``max_tokens``,
    ``temperature``, ``seed``, ``ignore_eos``, ``priority``. Raises ``ValueError`` naming file, line and column.
    """
    path = Path(path)
    arrivals: list[Arrival] = []
    with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets write a byte order mark
        reader = csv.DictReader(file)
        try:
            columns = set(reader.fieldnames or ())
            if unknown := columns - _COLUMNS:
                raise ValueError(f"unknown columns {sorted(unknown)}; known: {sorted(_COLUMNS)}")
            if not columns & {"prompt", "prompt_len"}:
                raise ValueError("needs a column 'prompt' or 'prompt_len'")
            for row in reader:
                arrivals.append(_arrival(row))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 ({error}); save it as CSV in UTF-8") from error
        except (ValueError, csv.Error) as error:
            raise ValueError(f"{path}, line {max(reader.line_num, 1)}: {error}") from error
    if not arrivals:
        raise ValueError(f"{path}: no requests in it")
    return Workload(tuple(sorted(arrivals, key=lambda arrival: arrival.step)), path.stem)


_FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def _arrival(row: dict[str, str | None]) -> Arrival:
    if None in row:
        raise ValueError(f"more cells than columns: {row[None]}")  # type: ignore[index]
    values = {name: value for name, value in row.items() if value}

    def integer(name: str, default: int, least: int | None = None) -> int:
        if name not in values:
            return default
        try:
            made = int(values[name])
        except ValueError:
            raise ValueError(f"{name} must be an integer, got {values[name]!r}") from None
        if least is not None and made < least:
            raise ValueError(f"{name} must be >= {least}, got {made}")
        return made

    prompt: str | int = values["prompt"] if "prompt" in values else integer("prompt_len", 0, 1)
    if not prompt:
        raise ValueError("neither prompt nor prompt_len is given")
    flag = values.get("ignore_eos", "no").strip().lower()
    if flag not in _FLAGS:
        raise ValueError(f"ignore_eos must be one of {', '.join(_FLAGS)}, got {flag!r}")
    try:
        temperature = float(values.get("temperature", "0"))
    except ValueError:
        raise ValueError(f"temperature must be a number >= 0, got {values['temperature']!r}") from None
    params = SamplingParams(
        max_tokens=integer("max_tokens", SamplingParams.max_tokens, 1),
        temperature=temperature,
        seed=integer("seed", 0) if "seed" in values else None,
        ignore_eos=_FLAGS[flag],
    )
    return Arrival(integer("step", 0, 0), prompt, params, integer("priority", 0))
