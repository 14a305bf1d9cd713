"""A kernel that takes time and nothing else, to be queued in front of others so that what trails behind it trails long.

``rounds`` of xorshift32, each of which needs the one before: no compiler shortens it, and the result proves that it
ran. About ten dependent instructions a round. G. Marsaglia, "Xorshift RNGs", 2003.
"""

from __future__ import annotations

from typing import Any

from mrv2lab.ops._op import jit, op

tl: Any = None


# state [1] int32, not 0
def spin_spec(state, rounds):
    x = int(state[0]) & 0xFFFFFFFF
    for _ in range(rounds):
        x ^= (x << 13) & 0xFFFFFFFF
        x ^= x >> 17
        x ^= (x << 5) & 0xFFFFFFFF
    state[0] = x - (1 << 32) if x >> 31 else x


@jit(do_not_specialize=["rounds"])
def spin_kernel(state, rounds):
    x = tl.load(state).to(tl.uint32, bitcast=True)
    for _ in range(rounds):
        x ^= x << 13
        x ^= x >> 17
        x ^= x << 5
    tl.store(state, x.to(tl.int32, bitcast=True))


@op(spec=spin_spec, kernel=spin_kernel, writes=("state",))
def spin(kernel, state, rounds):
    """Advance ``state`` by ``rounds`` rounds of xorshift32, in one thread's worth of work."""
    kernel[(1,)](state, rounds, num_warps=1)
