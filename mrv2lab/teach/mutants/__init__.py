"""Deliberate bugs, each to be attached in a ``with`` and found by a check::

    from mrv2lab.teach import mutants

    with mutants.pool_depth_1():
        ...

``ALL`` holds every one; a mutant says what it breaks, in which runner, and which checks catch it.
"""

from mrv2lab.teach.mutants import mrv2, transport, v1
from mrv2lab.teach.mutants.mrv2 import *  # noqa: F403
from mrv2lab.teach.mutants.mutant import Mutant, Patch
from mrv2lab.teach.mutants.transport import *  # noqa: F403
from mrv2lab.teach.mutants.v1 import *  # noqa: F403

ALL: tuple[Mutant, ...] = tuple(
    value for module in (transport, mrv2, v1) for value in vars(module).values() if isinstance(value, Mutant)
)

__all__ = ["ALL", "Mutant", "Patch", *(mutant.name for mutant in ALL)]


def __dir__() -> list[str]:
    return sorted(__all__)
