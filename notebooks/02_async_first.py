# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Async first: the next step before this one's tokens
#
# **You will** watch a scheduler plan a token that nobody knows yet, see how V1 and MRV2 get that token into the next
# step, count who waits for what, and find when all this gains nothing.
# **You need** no GPU; about 20 minutes. Words that are new to you are in [GLOSSARY.md](../GLOSSARY.md);
# [01_persistent_batch](01_persistent_batch.ipynb) explains V1's and MRV2's rows.
#
# ## 1. Two loops
#
# This is all the difference between the synchronous and the asynchronous engine loop:

# %%
import inspect
import re
import statistics
from collections import Counter, defaultdict
from pathlib import Path

import pandas as pd

import mrv2lab
from mrv2lab import Engine, EventLog, Recorder, Recording, SamplingParams
from mrv2lab.engine.core import EngineCore

print(inspect.getsource(EngineCore._step_sync), inspect.getsource(EngineCore._step_async), sep="\n")

# %% [markdown]
# Both ask the runner twice: `execute_model` queues everything up to the hidden states, `sample_tokens` queues the
# rest and returns the output *on its way*. (Between the two vLLM makes the masks of structured output, which need the
# step before.) Neither waits. Here they are by hand; the device is a software stream, and says how much of its queue
# it has run:

# %%
hand = Engine("tiny", "mrv2", device="cpu", num_blocks=64, max_num_reqs=8)
hand.submit("Once upon a time", SamplingParams(max_tokens=8))
schedule = hand.scheduler.schedule()


def queue(what: str) -> None:
    print(f"{what:28s} {hand.rt.main.done:3d} of {hand.rt.main.queued:3d} launches and copies have run")


queue("before")
hand.worker.execute_model(hand.core.project(schedule))
queue("after execute_model")
future = hand.worker.sample_tokens()
queue("after sample_tokens")
output = future.get_output()
queue("after get_output, which waits")
print("tokens:", output.sampled_token_ids, repr(hand.tokenizer.decode(output.sampled_token_ids[0])))

# %% [markdown]
# The one of 35 that has not run is the last, `post_update`, queued behind the tokens' copy: nobody waits for it.
#
# Both loops with both runners give the same tokens (the asynchronous one takes one turn more, in which nothing comes
# back yet):

# %%
PROMPTS = ["Once upon a time, there was a clever hen", "The old clock", "Tom had a small boat. One day", "A bird sat",
           "Lily found a red ball", "It was a cold night", "The king had three sons and", "Ben liked to run"]  # fmt: skip
SMALL = {"device": "cpu", "num_blocks": 128, "max_num_reqs": 8, "max_model_len": 256}
texts = {}
for kind in ("v1", "mrv2"):
    for loop in (False, True):
        with Engine("tiny", kind, async_scheduling=loop, **SMALL) as engine:
            outputs = engine.generate(PROMPTS, SamplingParams(max_tokens=20, ignore_eos=True))
            texts[kind, "async" if loop else "sync"] = [output.token_ids for output in outputs]
            print(f"{kind:5s} {'async' if loop else 'sync':6s} {engine.num_steps} turns")
print("all four alike:", all(tokens == texts["mrv2", "sync"] for tokens in texts.values()))

# %% [markdown]
# ## 2. To plan a token that nobody knows
#
# The scheduler counts tokens; it need not know them. Under asynchronous scheduling a scheduled step *promises* a
# token, a **placeholder**, and the next `schedule()` counts it as one more token to compute. Real scheduler and real
# loop, with a worker that makes tokens up (`mrv2lab/teach/async_lesson.py`): prompt of 6, 4 tokens a step at most,
# `max_tokens` 3.

# %%
from mrv2lab.teach.async_lesson import trace

table, _ = trace()
table

# %% [markdown]
# Read it from the top:
#
# - *schedule 0* plans 4 of the prompt's 6 tokens; its note `budget` says that the step's 4 tokens are used up.
# - *schedule 1* comes before *update 0*: the queue holds two steps, and filling it goes before draining it.
# - *schedule 2* plans one token at position 6, though only the 6 tokens of the prompt are known: it tells the runner
#   that there is 1 output, which is still on the device.
# - *schedule 4* plans nothing (`last_token`): the step in flight surely yields the last of 3 tokens. A stop by **length**
#   is foreseen.
#
# A stop by **EOS** is not. Let the second token, 101, be one:

# %%
table, wasted_rows = trace(eos=(101,))
print(table.iloc[-4:].to_string())
print("wasted rows:", wasted_rows)

# %% [markdown]
# *schedule 3* had already planned another token when 101 came back. Its row is computed and thrown away.
#
# ## 3. What that costs: wasted rows
#
# On the real model, ended by length and ended by a stop token (here the full stop, so that stories end after a sentence):

# %%
stop = hand.tokenizer.encode("He ran.")[-1]
ends = {
    "length": SamplingParams(max_tokens=20, ignore_eos=True),
    "stop token": SamplingParams(max_tokens=60, stop_token_ids=(stop,)),
}
lines = []
for end, params in ends.items():
    for loop in (False, True):
        log = EventLog()
        with Engine("tiny", "mrv2", observer=log, async_scheduling=loop, **SMALL) as engine:
            outputs = engine.generate(PROMPTS, params)
        wasted = int(sum(value for name, value in log.gauges if name == "wasted_rows"))
        tokens = sum(len(output.token_ids) for output in outputs)
        lines.append({"ends by": end, "loop": "async" if loop else "sync", "tokens": tokens, "ended by stop": sum(o.finish_reason == "stop" for o in outputs),
                      "wasted rows": wasted, "wasted (%)": 100 * wasted / (tokens + wasted)})  # fmt: skip
pd.DataFrame(lines).set_index(["ends by", "loop"]).round(1)

# %% [markdown]
# One row for each request that ends unforeseen. For short answers that is a real share, for long ones next to
# nothing; and where the device has room in its batch, a row more costs little.
#
# ## 4. How does the token get into the next step?
#
# The token is on the device, the step that needs it is being prepared on the host. V1 prepares `input_ids` on the
# host, so it writes **-1** where the token should be, keeps what was sampled (`prev_sampled_token_ids`) with a map of
# who had which row then (`prev_req_id_to_index`, since rows may have moved), and scatters the tokens into the holes
# on the device. Three requests, of which `A` ends and `D` comes:


# %%
def submit_four(engine: Engine, when: int) -> None:
    if when == 0:
        for name, prompt, count in (("A", "The old", 4), ("B", "A bird", 30), ("C", "Tom had", 30)):
            engine.submit(prompt, SamplingParams(max_tokens=count, ignore_eos=True), request_id=name)
    if when == 5:
        engine.submit("It was", SamplingParams(max_tokens=30, ignore_eos=True), request_id="D")


log = EventLog()
with Engine("tiny", "v1", observer=log, **SMALL) as engine:
    runner = engine.worker.runner
    for step in range(8):
        submit_four(engine, step)
        prev_map, prev = runner.input_batch.prev_req_id_to_index, runner.input_batch.prev_sampled_token_ids
        prev_map, prev = dict(prev_map or {}), [] if prev is None else engine.rt.read(prev)[:, 0].tolist()
        log.clear()
        engine.step()
        batch = runner.batch
        total = batch.host.num_tokens
        repair = [m.name for m in log.marks if m.name in ("v1.copy_prev_sampled", "scatter_sampled")]
        sent = any(mark.name.startswith("input_ids") and mark.kind == "h2d" for mark in log.marks)
        print(f"step {batch.step}: rows {' '.join(batch.req_ids)}")
        print(f"   host:   {runner.inputs.input_ids.np[:total].tolist()}   {'copied' if sent else 'not copied'}")
        print(f"   repair: {', '.join(repair) or 'none'}   sampled before: {prev}   rows then: {prev_map}")
        print(f"   device: {engine.rt.read(batch.input_ids).tolist()}")

# %% [markdown]
# Where every token of a step was sampled in the last one (steps 1 to 4, 6, 7), the host's array is not copied: its -1
# never leave. Where the step has other tokens too (step 5: the prompt of `D`), the whole array is copied, -1 included,
# and the repair overwrites them on the device. The repair is one copy within the device where the same requests stand
# in the same rows (`v1.copy_prev_sampled`, the fast path), else a scatter: in step 4 `A` has gone and `C` has moved into
# its row, so the map says where its token is. (Reading the device makes it catch up; the engine itself did not wait.)
#
# In MRV2 the host has no `input_ids` at all. `post_update` writes each sampled token into `last_sampled_tokens[row]`, and
# `combine_tokens` takes it from there a step later. A row does not change, so there is no map, and no placeholder:

# %%
with Engine("tiny", "mrv2", **SMALL) as engine:
    runner = engine.worker.runner
    for step in range(8):
        submit_four(engine, step)
        last = engine.rt.read(runner.req_states.last_sampled_tokens).tolist()
        engine.step()
        batch = runner.batch
        rows = batch.host.rows.tolist()
        print(
            f"step {batch.step}: batch {' '.join(f'{name}{row}' for name, row in zip(batch.host.req_ids, rows, strict=True))}"
        )
        print(f"   last_sampled_tokens[row], on the device: {[last[row] for row in rows]}")
        print(f"   device: {engine.rt.read(batch.input_ids).tolist()}")

# %% [markdown]
# (For a new request its row still holds what the former owner left; nobody reads it during the prefill.) What each runner
# says about the unknown token, in lines of its source, comments included:

# %%
import mrv2lab.runner
import mrv2lab.runner_v1
import mrv2lab.state

WORDS = {
    "V1": "placeholder|prev_(sampled|req|rows)|num_holes|scatter_sampled",
    "MRV2": "last_sampled|combine_tokens|post_update",
}
folders = {"V1": [mrv2lab.runner_v1], "MRV2": [mrv2lab.runner, mrv2lab.state]}
for name, packages in folders.items():
    files = [path for package in packages for path in Path(package.__file__).parent.glob("*.py")]
    found = Counter(
        {
            path.name: sum(bool(re.search(WORDS[name], line, re.IGNORECASE)) for line in path.read_text().splitlines())
            for path in files
        }
    )
    print(f"{name:5s} {sum(found.values()):3d} lines:", {file: count for file, count in found.items() if count})

# %% [markdown]
# (V1's synchronous loop uses none of them. And both pay for a token that is not known: where a sampler needs the
# outputs themselves, for penalties say, V1 must wait for them and repair its list; MRV2 counts them on the device,
# which costs memory.)
#
# ## 5. Who waits, for what
#
# Every wait passes a chokepoint of the runtime and has a name. A mean a step, in steady decode of 8 requests, once
# with the modelled device as it comes (2 µs a launch: faster than this host), once with one that takes 100 µs a
# launch. The times are
# **modelled**: the host's are real Python on this machine, the device's come from a cost model.

# %%
from mrv2lab.teach.async_lesson import decode

lines = []
for launch_us in (2, 100):
    for kind in ("v1", "mrv2"):
        for loop in (False, True):
            log, _ = decode(kind, loop, launch_us, PROMPTS)
            waits: dict[str, list[float]] = defaultdict(list)
            for mark in log.waits():
                waits[re.sub(r"\.\d\.", ".", mark.name)].append(mark.wait_ns / 1000)
            for name, each in waits.items():
                lines.append({"device": f"{launch_us} µs a launch", "runner": kind, "loop": "async" if loop else "sync", "waits for": name,
                              "times a step": len(each) / 16, "µs a step": sum(each) / 16})  # fmt: skip
pd.DataFrame(lines).set_index(["device", "runner", "loop", "waits for"]).round(1)

# %% [markdown]
# `sampled.copied` is the wait for a step's tokens: everybody has it, in the asynchronous loop a step late.
# `prepare_inputs` is V1's *barrier*: it rewrites the same host buffers in every step, so it must not begin before the
# device has read the last step's copies. (Its synchronous loop needs none: it has waited for everything anyway.) On
# the fast device every wait finds the work done. On the slow one V1 stands at the barrier before it prepares a step;
# MRV2 prepares first and waits then. But mind the model: the barrier waits for some copies and small launches, at 100
# µs each here, at a few µs on a GPU.
#
# ## 6. The timeline
#
# Host phases and the device's work of four steps, from a recording: MRV2, 30 µs a modelled launch, chosen so that neither
# side's work is negligible. How they compare depends on your machine; it is printed below the figure.

# %%
from mrv2lab.runtime.clock import CostModel
from mrv2lab.teach.async_pictures import bars_of, timeline

recordings = {}
for loop in (False, True):
    with Engine("tiny", "mrv2", async_scheduling=loop, **SMALL) as engine:
        engine.rt.costs = CostModel(launch_ns=30_000)
        for prompt in PROMPTS:
            engine.submit(prompt, SamplingParams(max_tokens=40, ignore_eos=True))
        with Recorder(engine, check_every=0) as recorder:
            for _ in range(24):
                engine.step()
    recordings["asynchronous" if loop else "synchronous"] = recorder.recording
timeline(recordings, 12, title="Steady decode, MRV2 (device times modelled)")

# %% [markdown]
# In the synchronous loop the device idles while the host schedules and settles, and the host idles while the device
# finishes. In the asynchronous loop the host prepares a step while the device computes the one before: the colours of
# *host works* are one step ahead of *device*. How much of the time is the device busy? (What is missing between a step's
# length and *host works* is waits, and the Python of the loop and of the recorder.)

# %%
for name, recording in recordings.items():
    bars = bars_of(recording, 8, 12)
    work = [bar for bar in bars if bar.lane == "device"]
    span, busy = work[-1].end - work[0].start, sum(bar.end - bar.start for bar in work)
    host = sum(bar.end - bar.start for bar in bars if bar.lane == "host works")
    print(
        f"{name:13s} {span / 12:5.0f} µs a step   device busy {100 * busy / span:3.0f} %   host works {host / 12:4.0f} µs a step"
    )

# %% [markdown]
# And one that was **measured**, on an H200 (`traces/h200_stories.mrv2rec`, asynchronous; device times from timing events).
# The model is tiny and the GPU is fast: launches are ticks on the device's lane, done about when the host has queued them,
# and there is nothing to hide behind it.

# %%
timeline({"H200, asynchronous": Recording.load("../traces/h200_stories.mrv2rec")}, 30, title="Recorded on an H200")

# %% [markdown]
# ## 7. When it gains nothing
#
# Sweep the modelled device from much faster to much slower than this host:

# %%
from mrv2lab.teach.async_pictures import SWEEP, sweep_picture

launches = (1, 10, 40, 120, 400)
step_us = {key: [] for key in SWEEP}
for launch_us in launches:  # the better of two medians, taken in turns: other programs on this machine disturb
    rounds = [{key: decode(*key, launch_us, PROMPTS, listen=False)[1] for key in SWEEP} for _ in range(2)]
    for key in SWEEP:
        step_us[key].append(min(one[key] for one in rounds))
sweep_picture(launches, step_us)

# %%
gain = {
    kind: [s / a for s, a in zip(step_us[kind, False], step_us[kind, True], strict=True)] for kind in ("v1", "mrv2")
}
pd.DataFrame(gain, index=pd.Index(launches, name="µs a launch")).rename(
    columns=lambda kind: f"{kind}: sync / async"
).round(2)

# %% [markdown]
# - On the **left** the host is the bottleneck: a step takes as long as its Python, in both loops. Little to hide.
# - On the **right** the device is: what async hides is the host's part of a step, which hardly counts.
# - In **between**, where both take about as long, it gains the most, and it can never gain more than a factor of two.
# - V1 gains about as much as MRV2 does. That the device trails the host is the loop's doing, not the runner's.
#
# Where is a real GPU? This runner launches every kernel by itself, from Python. Measured on an H200, Qwen3-0.6B's shape,
# asynchronous (the file is named below):

# %%
result = max(Path(mrv2lab.__file__).parent.glob("bench/results/*-h200-step.json"))
measured = pd.read_json(result, typ="series")["figures"]["requests"]
print(result.name)
pd.DataFrame({
    f"{count} request{'s' * (int(count) != 1)}": {"step, host (µs)": found["greedy"]["host_us"]["step"]["median"],
                          "of it launching the model (µs)": found["greedy"]["host_us"]["forward"]["median"],
                          "of it waiting for tokens (µs)": found["greedy"]["host_us"]["wait_output"]["median"],
                          "work on the device (µs)": found["greedy"]["device_us"]["all_device_work"]}
    for count, found in measured.items() if "device_us" in found["greedy"]
}).round(0)  # fmt: skip

# %% [markdown]
# The host waits for next to nothing and the device works a fraction of the step: far on the left of the sweep. There
# async gains nothing; what helps is to launch less (CUDA graphs). It is then, with the launches gone, that a host
# which need not wait for tokens pays.
#
# In one notebook process the scheduler's Python and the runner's Python run **one after the other**; async overlaps
# the host with the device, nothing else. (vLLM with worker processes also overlaps its scheduler with the workers'
# Python.) The host's own work is not what async saves; the same phases, sync and async, without waits, medians a
# step:

# %%
HOST = ("schedule", "update_states", "apply_writes", "prepare_inputs", "gather", "prepare_attn", "forward", "logits", "sample",
        "copy_output", "postprocess", "update_from_output")  # fmt: skip
columns = {}
for kind in ("v1", "mrv2"):
    for loop in (False, True):
        log, _ = decode(kind, loop, 30, PROMPTS)
        columns[kind, "async" if loop else "sync"] = {
            phase: statistics.median(log.phases[phase] or [0.0]) for phase in HOST
        }
frame = pd.DataFrame(columns)
frame.loc["all (µs)"] = frame.sum()
frame.round(0)

# %% [markdown]
# So is MRV2 faster than V1 here? Look at the two solid lines and at the last row, not at the design. V1 can schedule
# asynchronously too; what MRV2 has is an asynchronous loop without placeholders, maps and barrier, because the device is
# where the truth is. What the barrier protects, and what happens without it, is the next notebook's subject.
#
# ## Try
#
# 1. In section 2, call `trace(max_tokens=1)`. Expect *schedule 2* to plan nothing: the only token is in flight.
# 2. In section 3, add `"max_tokens 1"` with `SamplingParams(max_tokens=1)`. Expect no wasted row in either loop: foreseen.
# 3. In section 4, let `B` be the one who ends (its count 4, `A`'s 30). Expect `C` in row 1 from then on, its token taken from
#    row 2 by a scatter; and in MRV2 `C5` as before.
# 4. In section 6, change `30_000` to `2_000`, and to `400_000`. Expect the device's lane nearly empty, and nearly full in
#    *both* loops.
# 5. In section 5, `Counter((m.kind, m.name) for m in decode("v1", True, 100, PROMPTS, transfer="pinned_copy")[0].waits())`.
#    Expect only the waits for sampled tokens: V1's barrier (`prepare_inputs`) is gone, at the price of a pinned temporary
#    for each copy.
