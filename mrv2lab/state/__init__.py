"""MRV2's state: permanent rows (``request_state``), ``block_tables``, and the batch gathered from them."""

from mrv2lab.state.block_tables import BlockTables
from mrv2lab.state.input_batch import HostBatch, InputBatch, InputBuffers, gather_host_batch
from mrv2lab.state.request_state import RequestState

__all__ = ["BlockTables", "HostBatch", "InputBatch", "InputBuffers", "RequestState", "gather_host_batch"]
