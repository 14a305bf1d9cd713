"""Deliberate bugs, each to be attached in a ``with`` and found by a check::

    from mrv2lab.teach import mutants

    with mutants.pool_depth_1():
        ...

``ALL`` holds those that any workload may show, ``SAMPLING`` those of the sampler, which show only where requests use
sampling parameters. A mutant says what it breaks, in which runner, and which checks catch it.
"""

from mrv2lab.teach.mutants import mrv2, sampling, sampling_v1, transport, v1
from mrv2lab.teach.mutants.mrv2 import *  # noqa: F403
from mrv2lab.teach.mutants.mutant import Mutant, Patch
from mrv2lab.teach.mutants.sampling import *  # noqa: F403
from mrv2lab.teach.mutants.sampling_v1 import *  # noqa: F403
from mrv2lab.teach.mutants.transport import *  # noqa: F403
from mrv2lab.teach.mutants.v1 import *  # noqa: F403

ALL: tuple[Mutant, ...] = tuple(
    value for module in (transport, mrv2, v1) for value in vars(module).values() if isinstance(value, Mutant)
)

SAMPLING: tuple[Mutant, ...] = tuple(
    value for module in (sampling, sampling_v1) for value in vars(module).values() if isinstance(value, Mutant)
)

__all__ = ["ALL", "SAMPLING", "Mutant", "Patch", *(mutant.name for mutant in ALL + SAMPLING)]


def __dir__() -> list[str]:
    return sorted(__all__)
