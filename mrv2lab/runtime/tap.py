"""A tap: who wants the tensors themselves, not their names, at every chokepoint that touches host memory.

An observer's marks are values that outlive the run. A race detector has to look at the host's bytes before the host
goes on, so it listens here. While nobody listens there is nothing on the path: :func:`tapped` shadows the chokepoints
of one runtime object for as long as its ``with`` lasts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from mrv2lab.protocol import Launchable
from mrv2lab.runtime.base import Runtime, Tensors, call_site


class Pass(NamedTuple):
    """One pass through a chokepoint, as far as a report wants to name it."""

    kind: str
    name: str
    site: str
    """``file:line`` of the caller outside the runtime."""


class Tap:
    """What :func:`tapped` tells; hooks that default to nothing. While ``muted``, launches pass untold."""

    muted = False

    def before(self, what: Pass) -> None:
        """A launch, a copy or a publish is about to be made; the host has written what it wrote until now."""

    def launched(self, what: Pass, reads: Tensors, writes: Tensors) -> None:
        """It is queued. ``reads`` and ``writes`` are its tensors, in every place."""

    def publishing(self, what: Pass, slot: torch.Tensor, values: np.ndarray[Any, Any]) -> None:
        """The host is about to write ``values`` into the first elements of ``slot``; comes after :meth:`before`."""

    def step_ending(self) -> None:
        """A step's last launch is queued."""

    def dropped(self) -> None:
        """``rt.reset`` has dropped what was queued."""


@contextmanager
def tapped(rt: Runtime, tap: Tap) -> Iterator[None]:
    """Inside the ``with``, ``tap`` is told of every pass through a chokepoint of ``rt``; one tap at a time.

    Launches laid on a graph that is being captured are not queued, so nobody is told of them; neither is a replay
    looked into.
    """
    own = vars(rt)
    if "kernel" in own:
        raise RuntimeError("this runtime is being watched already; leave that `with` first")
    kernel, run, copy, publish, end_step, reset = rt.kernel, rt.run, rt._copy, rt.publish, rt.end_step, rt.reset

    def quiet() -> bool:
        return tap.muted or rt.capturing is not None

    def tell_kernel(op: Launchable, *args: Any) -> None:
        if quiet():
            return kernel(op, *args)
        what = Pass("kernel", op.name, call_site())
        tap.before(what)
        kernel(op, *args)
        reads = tensors(arg for i, arg in enumerate(args) if i not in op.write_index)
        tap.launched(what, reads, tensors(args[i] for i in op.write_index))

    def tell_run(name: str, *args: Any, reads: Tensors = (), writes: Tensors = ()) -> None:
        if quiet():
            return run(name, *args, reads=reads, writes=writes)
        what = Pass("run", name, call_site())
        tap.before(what)
        run(name, *args, reads=reads, writes=writes)
        written = {tensor.data_ptr() for tensor in tensors(writes)}
        tap.launched(what, tuple(one for one in tensors(args) if one.data_ptr() not in written), tensors(writes))

    def tell_copy(kind: str, dst: torch.Tensor, src: torch.Tensor, device: torch.Tensor, host: torch.Tensor) -> None:
        if quiet():
            return copy(kind, dst, src, device, host)
        what = Pass(kind, rt.registry.name(host), call_site())
        tap.before(what)
        copy(kind, dst, src, device, host)
        tap.launched(what, (src,), (dst,))

    def tell_publish(slot: torch.Tensor, values: np.ndarray[Any, Any]) -> None:
        if not tap.muted:
            what = Pass("publish", rt.registry.name(slot), call_site())
            tap.before(what)
            tap.publishing(what, slot, values)
        publish(slot, values)

    def tell_end_step() -> None:
        tap.step_ending()
        end_step()

    def tell_reset() -> None:
        reset()
        tap.dropped()

    # On the object, in front of its class's methods: unwatched runtimes, and this one afterwards, have nothing there.
    shadows = {
        "kernel": tell_kernel,
        "run": tell_run,
        "_copy": tell_copy,
        "publish": tell_publish,
        "end_step": tell_end_step,
        "reset": tell_reset,
    }
    own.update(shadows)
    try:
        yield
    finally:
        for name in shadows:
            del own[name]


def tensors(args: Any) -> Tensors:
    """Every tensor among ``args``, tuples included."""
    found: list[torch.Tensor] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            found.append(arg)
        elif isinstance(arg, tuple):
            found += tensors(arg)
    return tuple(found)
