"""The seam between the project and the machine.

* ``base``: Runtime, Stream, Event, Graph and the chokepoints · ``create``: which runtime, and why not
* ``effects``: what a graph touches, and the hook by which its pieces stand in for segments
* ``cpu``: software streams (``software``), the virtual ``clock``, graphs as ``tape``, seen syncs (``device_tensor``)
* ``cuda``: the real thing · ``places``: host, pinned, uva, device · ``uva``: UvaBuffer, UvaBufferPool
* ``transfer``: unsafe, barrier, pinned_copy, uva_pool
"""

from mrv2lab.runtime.base import DeviceError, Event, Graph, PlaceError, Runtime, Stream
from mrv2lab.runtime.create import DeviceMissing, make_runtime
from mrv2lab.runtime.places import Place
from mrv2lab.runtime.transfer import POLICIES, Table, TransferPolicy, Upload
from mrv2lab.runtime.uva import UvaBuffer, UvaBufferPool

__all__ = [
    "POLICIES",
    "DeviceError",
    "DeviceMissing",
    "Event",
    "Graph",
    "Place",
    "PlaceError",
    "Runtime",
    "Stream",
    "Table",
    "TransferPolicy",
    "Upload",
    "UvaBuffer",
    "UvaBufferPool",
    "make_runtime",
]
