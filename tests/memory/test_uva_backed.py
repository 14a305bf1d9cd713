"""UvaBackedTensor: the host writes its truth at any time, kernels read what was published."""

from __future__ import annotations

import pytest
import torch

from mrv2lab.memory import UvaBackedTensor
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.cpu import CpuRuntime
from mrv2lab.runtime.transfer import POLICIES
from tests.runtime.machines import seen

SAFE = ["barrier", "pinned_copy", "uva_pool"]


@pytest.mark.parametrize("policy", SAFE)
def test_kernels_read_the_last_published_snapshot(rt: Runtime, policy: str) -> None:
    transfers = POLICIES[policy](rt)
    table, kept = UvaBackedTensor(transfers, "t", 3, torch.int32), []
    assert seen(rt, table.gpu) == [0, 0, 0]
    for value in range(1, 7):
        with transfers.prepare():
            table.np[value % 3] = value
            table.publish()
        kept.append(rt.empty(3, torch.int32, name="kept"))
        rt.run("copy", kept[-1], table.gpu, reads=(table.gpu,), writes=(kept[-1],))
        if len(kept) > 1:
            rt.synchronize()
    assert [seen(rt, one) for one in kept] == [[0, 1, 0], [0, 1, 2], [3, 1, 2], [3, 4, 2], [3, 4, 5], [6, 4, 5]]


@pytest.mark.parametrize("policy", ["pinned_copy", "uva_pool"])
def test_what_is_not_published_is_not_seen(rt: Runtime, policy: str) -> None:
    table = UvaBackedTensor(POLICIES[policy](rt), "t", (2, 2), torch.float32)
    table.np[:] = 1
    table.publish()
    table.np[0] = 9
    assert rt.read(table.gpu).tolist() == [[1, 1], [1, 1]]
    table.publish()
    assert rt.read(table.gpu).tolist() == [[9, 9], [1, 1]]


def test_gpu_is_another_slot_after_each_publish(cpu: CpuRuntime) -> None:
    """Why no graph may hold it."""
    table = UvaBackedTensor(POLICIES["uva_pool"](cpu, 2), "t", 2, torch.int32)
    addresses = []
    for _ in range(4):
        table.publish()
        addresses.append(table.gpu.data_ptr())
    assert addresses[0] != addresses[1]
    assert addresses[:2] == addresses[2:]
