# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The barrier: who may write a buffer, and when
#
# **You will** watch a race corrupt texts without an error, find the buffer, the line that reads it and the two moments
# between which it was overwritten, see what vLLM's V1 does against it and how one forgotten buffer undoes that, and what the
# three safe ways cost.
# **You need** no GPU; 20 minutes. Words that are new to you are in [GLOSSARY.md](../GLOSSARY.md).
# **Live**, with device times that are modelled; figures from an H200 come from files that their cells name.
#
# ## 1. The race, live
#
# A copy to the device reads its source when the *stream* reaches it, not when Python queues it. With two steps in flight
# the host prepares step N + 1 while step N's copies may still be queued. If both steps use the same page-locked buffer,
# step N gets the numbers of step N + 1. `unsafe` is that: one buffer an array, and nobody waits.

# %%
import numpy as np
import pandas as pd
import torch
from IPython.display import display

from mrv2lab import Engine, EventLog, RaceDetector, RunnerConfig, SamplingParams, UvaBufferPool, make_runtime, steady

pd.set_option("display.max_colwidth", None)
PROMPTS = """Once upon a time, there was a clever hen|The old clock|Tom had a small boat. One day|A bird sat
Lily went to the park with her mom and|The dog|It was a sunny day and the little|Ben found a|One night|Sam and Mia"""


def tell(transfer, runner="v1", **options):
    """Ten stories, one more request every turn; every second one is greedy. What was written, and what a race did."""
    rooms = {"num_blocks": 128, "max_num_reqs": 6, "max_num_batched_tokens": 10}
    with Engine("tiny", runner, device="cpu", transfer=transfer, **rooms, **options) as engine:
        with RaceDetector(engine) as races:
            for i, prompt in enumerate(PROMPTS.replace("\n", "|").split("|")):
                params = SamplingParams(max_tokens=6 + 5 * (i % 3), temperature=1.5 * (i % 2), seed=i)
                engine.submit(prompt, params, request_id=f"{i}: {prompt}")
                engine.step()
            while engine.core.has_work():
                engine.step()
        return dict(engine.requests), races


def wrong_tokens(got):
    """Tokens that differ from the right run's, all requests together."""
    return sum(a != b for name in right for a, b in zip(right[name].token_ids, got[name].token_ids, strict=False))


right, quiet = tell("barrier")
wrong, races = tell("unsafe")
print(f"barrier: {len(quiet.hazards)} hazards   unsafe: {len(races.hazards)}")
print(f"tokens that differ: {wrong_tokens(wrong)} of {sum(len(output.token_ids) for output in right.values())}")
pd.DataFrame(
    {"right": {name: one.text for name, one in right.items()}, "unsafe": {n: o.text for n, o in wrong.items()}}
)

# %% [markdown]
# No exception, no warning: every token is one of the vocabulary, every shape is right. A wrong text may be gibberish or
# may read well; no program can tell, unless it knows the right one. (On a machine without a GPU the device is a *software stream*. It runs queued work only when a wait needs it: the host is always as
# far ahead as it can be, so a race that a GPU has now and then happens here every time. And where races are on purpose, V1
# here keeps ids and counters inside their tables: elsewhere an index out of range may end the run.)
#
# The `RaceDetector` looks in two ways. It compares the host's bytes with those at enqueue at every launch and wait: that
# is a *hazard*. And it queues a checksum on the device right behind every read: a wrong one is *corruption*.

# %%
races.report().head(6)

# %% [markdown]
# A row names the step, the buffer, the *reader* (the queued copy and its line) and the *writer*. The reader's line is
# exact. The writer is only bracketed: the host wrote through NumPy, which nobody can intercept, so the row names the
# moments before and after it, and the line is somewhere between them.
#
# ## 2. V1's answer: wait before you write
#
# V1 puts everything of a step that writes host buffers inside one `with`, `AsyncBarrier`. On exit it records an event
# E behind the step's copies; on entry it waits for the event of the step before. So when the host writes, the device has
# read. This is a run of V1 on eight requests that decode. A stand-in of 1.5 ms is queued behind each sampler: a larger
# model. Device times are modelled (8 us a launch).

# %%
from mrv2lab.bench.stand_in import StandIn
from mrv2lab.check.waits import waits_by_cause
from mrv2lab.runtime.clock import CostModel
from mrv2lab.teach.barrier_pictures import STATIC, stream_picture
from mrv2lab.teach.stream_times import COPIES, FORWARD, StreamTimes, typical_steps

STEPS = 8


def timed(transfer, stand_in_ms=0.0, runner="v1"):
    with Engine("tiny", runner, device="cpu", transfer=transfer, num_blocks=256, max_num_reqs=8) as engine:
        engine.rt.costs = CostModel(launch_ns=8_000)
        if stand_in_ms:
            larger = StandIn(engine.rt, stand_in_ms)
            engine.worker.runner.force = lambda req_ids, sampled: larger.queue()
        for i in range(8):
            engine.submit([300 + i] * 4, SamplingParams(max_tokens=60, ignore_eos=True))
        for _ in range(8):
            engine.step()
        engine.observer = times = StreamTimes(engine.rt)
        for _ in range(STEPS):
            engine.step()
    return times


barrier = timed("barrier", 1.5)
stretches = barrier.frame()
shown = typical_steps(stretches)  # neighbours of about the median length: no hiccup of this machine
stream_picture(stretches, shown, "V1 with its barrier: E behind the copies, C behind the output").show(config=STATIC)

# %% [markdown]
# Call the last step with a *prepare* in the picture N, and follow that *prepare* back to the left. It may begin once E of
# step N - 1 has passed, and E lies right behind that step's copies, in front of its forward: so preparing step N may overlap
# with the forward of step N - 1. That overlap is what the barrier makes legal. And it hardly ever waits: in the turn
# before, the host waited for C of step N - 2, and between that and E of step N - 1 the device has only a few copies and
# small kernels to do, for which the host's own *schedule* is mostly time enough.

# %%
waits_by_cause(barrier.marks).assign(us_a_step=lambda waits: waits["wait_ns"] / 1000 / STEPS)

# %% [markdown]
# ## 3. Forget one buffer
#
# The barrier protects what is written *and copied* inside it, and nothing says what belongs there. `protected=` lets
# you leave one buffer out: its copy is then queued behind the event. First the buffer of the input ids:

# %%
from mrv2lab.runner_v1.buffers import BUFFERS


def forget(name, **options):
    return tell("barrier", protected=tuple(buffer for buffer in BUFFERS if buffer != name), **options)


got, races = forget("input_ids")
print(wrong_tokens(got), "tokens differ; corrupted steps:", races.corrupted_steps)
print(races.report().loc[0, ["buffer", "step", "reader", "writer"]].to_string())
got, races = forget("input_ids", lag=0)
print(f"\nthe same bug where the device keeps up with the host: {wrong_tokens(got)} tokens differ, {races.hazards}")

# %% [markdown]
# Correct wherever the device keeps up, wrong under load: that is why such bugs pass their tests. Now each buffer in turn.
# *Read by* is what a listener (`EventLog`) saw read the buffer's device side.

# %%
with Engine("tiny", "v1", device="cpu", observer=(log := EventLog()), num_blocks=64) as engine:
    engine.generate(["A bird sat", "The dog"], [SamplingParams(max_tokens=4, temperature=t) for t in (0.0, 1.0)])

LATER_LAYERS = tuple(f"layer.{i}." for i in range(1, 9))  # all layers read the same
rows = []
for name in BUFFERS:
    got, races = forget(name)
    readers = {mark.name for mark in log.marks if any(read.partition(".")[0] == name for read in mark.reads)}
    readers = {
        reader.replace("layer.0", "layers") for reader in readers if not reader.startswith((name, *LATER_LAYERS))
    }
    rows.append((name, len(races.corrupted_steps), wrong_tokens(got), ", ".join(sorted(readers)) or "nobody"))
forgotten = pd.DataFrame(rows, columns=["forgotten", "corrupted steps", "wrong tokens", "read by"])
forgotten.set_index("forgotten").sort_values("corrupted steps", ascending=False)

# %% [markdown]
# A forgotten copy corrupts a step only where the host changed, before the copy ran, bytes that it reads; a buffer that
# is filled with the same values again hides the bug. `num_computed_tokens` grows with every step, so it leads the table.
# The others differ between two steps only when requests come, grow or go, or when a prompt is among them: in two steps
# that only decode, each request has one token, and its id is put in on the device.
# `discard_request_mask` does arrive wrong, and no token changes: it
# is for a drafter, there is none here, and the rows whose tokens are discarded are known to the host anyway. A
# *hazard* without a consequence today is a bug for whoever reads the buffer tomorrow.
#
# ## 4. Two windows
#
# The buffer that you forgot was written while the device had only copies to do until it was read. How long is that,
# and how long is it for a buffer whose copy is queued *behind the forward*, as a drafter's would be?

# %%
on_device = stretches[stretches["lane"] == "main stream"].assign(us=lambda rows: rows["end_us"] - rows["start_us"])
lengths = on_device[on_device["step"].between(1, STEPS - 2)].groupby("work")["us"].median()
print(f"narrow: {lengths[COPIES]:8.0f} us from the output that was awaited to E, once a step (modelled)")
print(f"wide:   {lengths[FORWARD]:8.0f} us from E to the end of the step (modelled)")

# %% [markdown]
# In the narrow window a race is a rare guest: the host has to win against a handful of small launches. (On a GPU the race lab
# queues a spin kernel in front of the copies, and the guest comes every time: `mrv2lab race --stream cuda`.) The wide
# window is as long as the model takes, and V1's barrier does not cover it, since E is recorded in front of the forward. Here
# a "drafter" sends an array behind each sampler, with the whole barrier in place:


# %%
def with_drafter(policy):
    from mrv2lab.runtime.transfer import POLICIES

    with Engine("tiny", "v1", device="cpu", num_blocks=128, max_num_reqs=8) as engine:
        upload = POLICIES[policy](engine.rt).upload("drafter_tokens", 8, torch.int32)
        turn = iter(range(1000))
        engine.worker.runner.force = lambda ids, sampled: upload.send(np.full(len(ids), next(turn), np.int32))
        with RaceDetector(engine) as races:
            engine.run(steady(8, every=1, prompt_len=(4, 12), max_tokens=8, seed=1), progress=False)
        return engine.num_steps, races


for policy in ("unsafe", "pinned_copy"):
    steps, races = with_drafter(policy)
    buffers = sorted({hazard.buffer for hazard in races.hazards}) or "no buffer"
    print(f"a drafter's array by {policy:12s} corrupted in {len(races.corrupted_steps):2d} of {steps} steps; {buffers}")

# %% [markdown]
# Recording E behind the sampler would close the wide window, and end the overlap. The other way out: do not reuse the
# buffer.
#
# ## 5. Nobody waits: `pinned_copy` and `uva_pool`
#
# `pinned_copy` (MRV2's design document) keeps the truth in ordinary memory and copies it into a *fresh* page-locked
# buffer for each copy. `uva_pool` (vLLM today) writes tables and staged diffs into the next slot of a pool of
# page-locked buffers, which kernels read in place; small arrays still go as in `pinned_copy`. Both runners on each, in the race
# lab (`mrv2lab race` on the command line): twelve turns, a new request in every one.

# %%
from mrv2lab.check.race_lab import race

rows = []
for runner in ("v1", "mrv2"):
    for policy, depth in (("unsafe", 2), ("uva_pool", 1), ("barrier", 2), ("pinned_copy", 2), ("uva_pool", 2)):
        lab = race(policy, depth=depth, steps=12, runner=runner)
        counts, wrong = lab.waits["waits"], sum(lab.wrong_tokens.values())
        name = f"uva_pool, {depth} slot{'s' * (depth > 1)}" if policy == "uva_pool" else policy
        rows.append(
            (runner, name, len(lab.corrupted_steps), wrong, counts["barrier"], counts["output"], len(lab.buffers))
        )
columns = ["runner", "policy", "corrupted steps", "wrong tokens", "barrier waits", "output waits", "buffers named"]
pd.DataFrame(rows, columns=columns).set_index(["runner", "policy"])

# %% [markdown]
# A pool of one slot has the bug of `unsafe` again, in fewer buffers: only what goes through the pool is reused, the small
# arrays are not. So it may get fewer tokens wrong, and is no safer. Two slots suffice, but read the rule to its end: *safe only while no more steps
# are in flight than slots, and somebody waits for the output of a step before its slot comes round.* The pool itself
# waits for nothing. Here is one by hand:


# %%
def pool(depth=2, wait=True, probe=False):
    rt = make_runtime(RunnerConfig(device="cpu"))
    slots = UvaBufferPool(rt, 4, torch.int32, depth, "table")
    used = rt.zeros(4, torch.int32, name="used")
    for name in ("forward", "probe"):
        rt.register(name, lambda table, out: out.copy_(table))
    copied = [rt.event(f"{step}.copied") for step in range(6)]
    with RaceDetector(rt) as races:
        for step in range(6):
            if wait and step >= 2:
                copied[step - 2].synchronize()  # the output of the step before the last
            table = slots.copy_to_uva(np.full(4, step, np.int32))
            rt.run("forward", table, used, reads=(table,), writes=(used,))
            copied[step].record(rt.main)
            if probe:
                rt.run("probe", table, used, reads=(table,), writes=(used,))
            rt.end_step()
    report = races.report()
    return races.corrupted_steps, report.loc[0, "reader"].split(" at ")[0] if len(report) else "-"


cases = {
    "2 slots, outputs awaited": {},
    "1 slot": {"depth": 1},
    "2 slots, nobody waits for the output": {"wait": False},
    "2 slots, awaited, and a probe behind the output's event": {"probe": True},
    "3 slots, awaited, and the same probe": {"depth": 3, "probe": True},
}
pd.DataFrame({name: pool(**case) for name, case in cases.items()}, index=["corrupted steps", "wrong reader"]).T

# %% [markdown]
# The third row is a real bug of vLLM's: a path for encoder-only steps returned without waiting for its copy event
# (#53057, #53176). The fourth is one of this project's. The recorder queued a checksum of every published table, and
# queued it *behind* the step's output event. Whoever has waited for that event may write the slot again: the
# checksum read a later step's table, and accused a runner that was right. It is now queued in front of the event
# (`recorder/probes.py`). Waiting for an event protects what lies in front of it, and nothing else.
#
# ## 6. What does each policy cost?
#
# Six engines take turns, each policy on each runner, in three cases. *Host-bound*: the small model alone. *Device-bound*:
# a stand-in of some milliseconds behind each sampler, for a larger model. *Late copies*: the same stand-in in front of each
# step's copies, so behind the output that the host has waited for, as when this GPU lags behind the rank of a
# tensor-parallel group whose output was awaited.

# %%
from mrv2lab.bench.policy_bench import bench
from mrv2lab.teach.barrier_lesson import measured, show_costs

show_costs(bench("cpu", repeats=2, steps=6, progress=False), "a CPU; the device's times and the waits are modelled")

# %% [markdown]
# What to see:
#
# * The barrier's wait is next to nothing in the first two cases, host-bound *and* device-bound: the wait for the output
#   comes first and is the pacing one. With late copies the wait moves to the barrier, and the step is as long as
#   everybody else's.
# * Beside the waits, the policies differ in the host's work, `preparation_us` (apply_writes and prepare_inputs):
#   `barrier` fills its buffers in place, `pinned_copy` allocates and copies once more for each array, and `uva_pool` writes
#   tables where kernels read them (`uva_publishes`) instead of queueing copies (`h2d_copies`).
# * So the barrier waits where the device comes *late to the copies*, and in no other steady state here. The race lab of
#   section 5 is such a place too: each launch takes it a modelled millisecond, the copies as well.
#
# The waits of a device-bound V1 by cause, for each policy, and the lab's (modelled):

# %%
lab = race("barrier", steps=12, runner="v1")
by_cause = {
    policy: waits_by_cause(timed(policy, 1.5).marks) / STEPS for policy in ("barrier", "pinned_copy", "uva_pool")
}
by_cause["the lab's barrier"] = lab.waits / lab.steps
waits = pd.concat(by_cause).query("waits > 0")
pd.DataFrame({"waits a step": waits["waits"].round(2), "us a step": waits["wait_ns"] / 1000}).round(1)

# %% [markdown]
# And on an H200, where nothing is modelled (Qwen3-0.6B's shape, eager):

# %%
if result := measured("policies"):
    show_costs(result["figures"], f"{result['machine']['gpu']}, {result['date'][:10]}")

# %% [markdown]
# ## 7. Both timelines on one axis
#
# V1's barrier beside MRV2's `pinned_copy` with late copies, the same requests on both (a stand-in of 20 ms; device times are
# **modelled**, host times are this machine's):

# %%
from mrv2lab import compare, overlay
from mrv2lab.teach.barrier_lesson import late_copies, recorded_pair, show_runners, waits_a_step

pair = [late_copies("v1", "barrier", STEPS), late_copies("mrv2", "pinned_copy", STEPS)]
overlay(*pair)

# %% [markdown]
# A is V1, B is MRV2, and the first step of both starts at the same moment. Drag to pan, Ctrl and the wheel to zoom, click on
# a slice or a mark; **?** shows the keys. Follow one of V1's *barrier_wait* on the host down to the device: it ends where the
# copies of the step before do, behind the stand-in. MRV2 has no such mark: it prepares its step meanwhile, and waits for the
# output instead. The difference lane says for each step who was away longer.

# %%
display(waits_a_step(*pair))
print(compare(pair[0].trace, pair[1].trace, "step").verdict)

# %% [markdown]
# The waits change places, and the step stays about as long: whoever is late, somebody must wait for it. The same pair on
# an H200, where nothing is modelled (Qwen3-0.6B's shape, 64 requests, graphs, a stand-in of 5 ms):

# %%
if pair := recorded_pair("../traces"):
    display(overlay(*pair), waits_a_step(*pair))
    print(compare(pair[0].trace, pair[1].trace, "step").verdict)

# %% [markdown]
# V1's host stands in its barrier and then finds the output ready; MRV2's prepares the next step and waits for the output,
# about as long. Eagerly the pair hardly waited: a profiled launch costs the host more than the device's work, stand-in and all.
#
# ## 8. V1 beside MRV2, all in all
#
# The policy is one part. This is the whole host side of both runners, each with its own policy (V1 `barrier`, MRV2
# `uva_pool`), at 1 to 256 requests; under *churn* one request ends and another comes in nearly every step (with one request
# alone, in every second turn: who comes starts a turn later, so a turn's times and counts are about half of a busy step's).
# *own us* leaves out what both share (scheduling, the model) and the waits. An em dash marks a phase that the runner does not
# have. The first line printed says what it all comes to.

# %%
if result := measured("runners"):
    show_runners(result)

# %% [markdown]
# ## 9. How vLLM got here
#
# * #24527 brought the event, with too small a scope; #25279 moved the sampling arrays inside; #28706 moved the
#   multimodal ones, #28579 undid that by accident, #31373 did it again.
# * Dummy runs (#34866, #34619, #35137) and pooling (#31584, #31570) were outside; a drafter's buffer in the wide window
#   is an open report (#29288).
# * MRV2 reuses nothing that is unguarded, and still had to learn not to pin what it rewrites (#32799) and to wait before
#   a slot comes round (#53057, #53176).
#
# ## Try
#
# 1. `forget("query_start_loc")` with `lag=1`: is a device that trails by one step enough? (Yes: two steps in flight
#    are all that a race needs.)
# 2. In section 2, call `timed("barrier", 0.1)` and draw it. The device is now the faster one: the gaps move to its
#    lane, and the waits vanish from the host's.
# 3. In section 5, `pool(depth=3, wait=False)`. Do more slots replace the wait? (No: steps 0 to 2 are corrupted instead
#    of 0 to 3. Each slot's first readers are safe a step longer; then it comes round.)
# 4. `from mrv2lab.teach import mutants`, then
#    `with mutants.barrier_recorded_early(): print(race("barrier", steps=12, runner="mrv2"))`: the event is there and is
#    waited for, but it was recorded in front of the copies, so it protects the step before. Expect as many corrupted
#    steps as MRV2 has with `unsafe`. (V1's barrier is another class, `AsyncBarrier`, which this mutant does not touch.)
#
# **What next**: [12_profile_your_workload](12_profile_your_workload.ipynb) lays your own workload's timelines on one axis;
# [13_read_a_vllm_trace](13_read_a_vllm_trace.ipynb) finds this barrier in a trace of vLLM.
