"""Launches made again: a step gives most of its kernels the very tensors and numbers of an earlier step.

Describing the arguments of a launch costs the host more than launching it. Here the arguments are compared by identity
(numbers by value), and what the launcher made of them is kept: grid, addresses and numbers as the compiled kernel takes
them. Tensors are held weakly, so that nothing lives longer for having been launched; an entry goes with the first of
its tensors, before another object can take its place. A tensor's memory never moves while it lives.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from mrv2lab.ops._launch import CachedLauncher, Launch

MAX_KEPT = 256
"""Launches that a kernel remembers; then it begins anew."""
PATIENCE = 8
"""Launches in a row that were all new, behind which only every eighth is kept: their tensors are new each time."""

Key = tuple[Any, ...]


class Repeats:
    """The launches of one op: ``repeats(args)`` launches what ``launch(launcher, *args)`` would.

    ``launch`` must decide by its arguments alone, and a parameter take either tensors or numbers. Threads may share
    one.
    """

    def __init__(self, launch: Callable[..., None], launcher: CachedLauncher) -> None:
        self._launch = launch
        self._launcher = launcher
        self._tensor_types = launcher.tensor_types
        self._known: dict[Key, tuple[Launch, tuple[Any, ...], list[Any]]] = {}
        """Arguments -> the launch, what follows the stream in it, and the weak references that end the entry."""
        self._new = 0

    def __call__(self, args: tuple[Any, ...]) -> None:
        key = tuple(
            [arg if type(arg) is int else tuple(map(id, arg)) if type(arg) is tuple else id(arg) for arg in args]
        )
        known = self._known.get(key)
        if known is not None and self._launcher.again(known[0], known[1]):
            self._new = 0
            return
        note = _Note(self._launcher)
        self._launch(note, *args)
        self._new += 1
        if len(note.made) == 1 and note.made[0] is not None and (self._new <= PATIENCE or self._new % PATIENCE == 0):
            self._keep(key, args, note.made[0])

    def _keep(self, key: Key, args: tuple[Any, ...], made: Launch) -> None:
        tensors: list[Any] = []
        for arg in args:
            for one in arg if type(arg) is tuple else (arg,):
                if type(one) in self._tensor_types:
                    tensors.append(one)
                elif one is not None and type(one) is not bool and (type(one) is not int or one is not arg):
                    return  # an identity that says nothing about the value
        passed = [device_address(one) if type(one) in self._tensor_types else one for one in made.passed]
        if any(one is _NOWHERE for one in passed):
            return
        if len(self._known) >= MAX_KEPT:
            self._known.clear()
        forget = partial(self._forget, key)
        references = [weakref.ref(tensor, forget) for tensor in tensors]
        self._known[key] = made._replace(passed=[]), made.behind_stream(passed), references

    def _forget(self, key: Key, reference: Any) -> None:
        self._known.pop(key, None)


class _Note:
    """Stands where the launcher does and keeps what it did."""

    def __init__(self, launcher: CachedLauncher) -> None:
        self._launcher = launcher
        self.made: list[Launch | None] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        made = self._launcher.launch(grid, *args, **options)
        # Whether a kernel starts early (_pdl.py) is decided by more than its arguments.
        self.made.append(made if "PDL" not in options else None)


_NOWHERE: Any = object()
"""A tensor that no kernel reaches."""
_DEVICE_POINTER = 3  # CU_POINTER_ATTRIBUTE_DEVICE_POINTER


def device_address(host: Any) -> Any:
    """Where kernels find the page-locked tensor ``host``, as Triton's launcher asks the driver at every launch."""
    get = _driver()
    if get is None:
        return _NOWHERE
    found = ctypes.c_uint64()
    failed = get(ctypes.byref(found), _DEVICE_POINTER, ctypes.c_uint64(host.data_ptr()))
    return _NOWHERE if failed or not found.value else found.value


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute
    except (OSError, AttributeError):
        return None
