"""Who takes part in the race, and the processes that they live in."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mrv2lab.bench.engine_vllm import environment

PEERS = ("vllm", "vllm-v1", "vllm-mrv2", "transformers", "none")
"""What may be asked for; ``vllm`` is both of its runners."""
START_S, RUN_S = 600.0, 300.0
"""Seconds that an engine may take to come up, and for anything else."""


class ChildError(RuntimeError):
    """A child process died, failed or did not answer."""


@dataclass(frozen=True)
class Entrant:
    """One engine: ``runner`` is v1, mrv2 or - for none of them. Names of results come from both."""

    impl: str
    runner: str
    settings: dict[str, Any] = field(default_factory=dict, hash=False, compare=False)

    @property
    def name(self) -> str:
        """In tables."""
        return self.impl if self.runner == "-" else f"{self.impl} {self.runner}"

    def takes(self, sampling: str) -> bool:
        """Whether it can be asked for this."""
        return sampling == "greedy" or self.impl != "transformers"


def entrants(
    runners: Sequence[str], peers: Sequence[str], ours: dict[str, Any], theirs: dict[str, Any]
) -> list[Entrant]:
    """Ours by runner, then the peers. Raises ``ValueError`` for a name that nobody has."""
    for runner in runners:
        if runner not in ("mrv2", "v1"):
            raise ValueError(f"runner {runner!r} is unknown; there are mrv2, v1")
    for peer in peers:
        if peer not in PEERS:
            raise ValueError(f"peer {peer!r} is unknown; there are {', '.join(PEERS)}")
    made = [Entrant("mrv2lab", runner, {**ours, "runner": runner}) for runner in dict.fromkeys(runners)]
    made += [Entrant("vllm", one, theirs) for one in ("mrv2", "v1") if {"vllm", f"vllm-{one}"} & set(peers)]
    return made + ([Entrant("transformers", "-", theirs)] if "transformers" in peers else [])


class Child:
    """The process of one entrant. It works only between :meth:`ask` and :meth:`answer`.

    ``folder`` gets its log. ``site``: a folder of packages for a peer, which then sees no other of ``PYTHONPATH``.
    """

    def __init__(self, entrant: Entrant, folder: Path, site: Path | None = None) -> None:
        self.entrant = entrant
        self.log = folder / f"{entrant.name.replace(' ', '-')}.log"
        env = dict(os.environ)
        paths = [str(Path(__file__).resolve().parents[2]), env.get("PYTHONPATH", "")]
        if entrant.impl != "mrv2lab" and site is not None:
            paths = [str(site), paths[0]]  # and none of ours: their libraries are their own
        if entrant.impl == "vllm":
            env |= environment(entrant.runner, folder)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        command = [sys.executable, "-P", "-m", "mrv2lab.bench.engine_child"]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, entrant.impl, json.dumps(entrant.settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=env,
                text=True,
            )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def ask(self, message: Mapping[str, Any]) -> None:
        """Send a message. Raises :class:`ChildError` if nobody is there to read it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise ChildError(f"{self.entrant.name} is gone: {self.last_words()}") from None

    def answer(self, timeout_s: float = RUN_S) -> dict[str, Any]:
        """The next answer. Raises :class:`ChildError`."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise ChildError(f"{self.entrant.name} did not answer within {timeout_s:g} s") from None
        if not line:
            raise ChildError(f"{self.entrant.name} ended: {self.last_words()}")
        made: dict[str, Any] = json.loads(line)
        if "failed" in made:
            raise ChildError(made["failed"])
        return made

    def call(self, message: Mapping[str, Any], timeout_s: float = RUN_S) -> dict[str, Any]:
        """Ask, and wait for the answer."""
        self.ask(message)
        return self.answer(timeout_s)

    def last_words(self) -> str:
        """The last line that it wrote to its error stream."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[:300] if lines else "it said nothing"

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what it was last asked may still be in the pipe
                pipe.close()
