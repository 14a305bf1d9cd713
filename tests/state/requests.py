"""Requests for the state's tests."""

from __future__ import annotations

from mrv2lab.protocol import ContinuedData, MRV2SchedulerOutput, RequestData, SamplingParams
from mrv2lab.runtime.base import Runtime
from mrv2lab.runtime.transfer import POLICIES, TransferPolicy
from mrv2lab.state import RequestState


def request(req_id: str, tokens: list[int], prompt_len: int | None = None, num_computed: int = 0) -> RequestData:
    return RequestData(
        req_id=req_id,
        prompt_len=len(tokens) if prompt_len is None else prompt_len,
        all_token_ids=tokens,
        sampling=SamplingParams(),
        seed=0,
        seed_given=False,
        block_ids=([1],),
        num_computed_tokens=num_computed,
    )


def scheduled(tokens: dict[str, int], drafts: dict[str, list[int]] | None = None) -> MRV2SchedulerOutput:
    """A step over requests that have their rows already."""
    return MRV2SchedulerOutput(
        step=0,
        new_reqs=[],
        cached_reqs=ContinuedData(),
        finished_req_ids=set(),
        preempted_req_ids=set(),
        num_scheduled_tokens=tokens,
        scheduled_draft_tokens=drafts or {},
        total_num_scheduled_tokens=sum(tokens.values()),
    )


def make_state(
    rt: Runtime, rows: int = 8, length: int = 16, drafts: int = 2, policy: TransferPolicy | None = None
) -> RequestState:
    transfers = policy or POLICIES["uva_pool"](rt)
    return RequestState(rt, transfers, max_num_reqs=rows, max_model_len=length, num_speculative_tokens=drafts)
