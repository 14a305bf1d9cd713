# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Quickstart: step a real batch, look, rewind
#
# **You will** run a language model's inference engine one step at a time, see what a step keeps, moves and produces,
# go back to any step, and watch a race corrupt a batch.
# **You need** nothing: no GPU, no download, about 10 minutes. Run the cells in order with Shift+Enter.
# Words that are new to you are in [GLOSSARY.md](../GLOSSARY.md).
#
# ## 1. A step, seen

# %%
from mrv2lab import Engine, Recorder, SamplingParams, StepExplorer, burst, open_lens, paused_step, steady

engine = Engine(model="tiny", num_blocks=24, max_num_reqs=8, max_num_batched_tokens=64)

engine.submit("Once upon a time, there was a clever hen", SamplingParams(max_tokens=24), request_id="hen")
engine.submit("The old clock", SamplingParams(max_tokens=24, temperature=0.7, seed=7), request_id="clock")
engine.submit("Tom had a small boat. One day", SamplingParams(max_tokens=24), request_id="boat")

explorer = StepExplorer(engine)
explorer.advance()
explorer

# %% [markdown]
# That is one step of a real runner, in the style of vLLM's Model Runner V2. Click into it and press **N** for the next
# step, **Left** and **Right** to go back and forth, **?** for all keys. What to look at:
#
# | panel | what it shows |
# |---|---|
# | *Scheduler's decision* | in words: who computes how many tokens, and why |
# | *Phases of the step* | the step's phases on the host, and what the device did; click one, and the other panels show the state at that moment |
# | *Request rows* | each request owns a **row** of the state tables while it lives; nothing ever moves. What the step changed is marked **C** (written by the CPU, as a staged diff) or **G** (written by a GPU kernel) |
# | *Staged diffs* | what the CPU wants changed, before one kernel applies it |
# | *Gather* | the batch of this step: lines from rows to batch positions, and the tokens that are computed |
# | *Block tables and KV pages* | which blocks of the KV cache belong to whom, and where this step's keys and values go |
# | *Logits* | the most likely next tokens, and the one that was drawn |
#
# Rows have a letter and a colour, the same in every panel. The buttons above the panels are moments of this step: what
# you see is how things stood at the end of that phase (*before*, *apply_writes*, ...). The pictures say how they came
# about: *record* = the engine ran at full speed and nothing waited to be looked at.
#
# In the first step every prompt is computed whole; from the second on each request computes one token. There is no
# prefill phase and no decode phase, only a count of computed tokens that chases a count of known ones.

# %%
for _ in range(6):
    explorer.advance()
print({name: output.text for name, output in engine.requests.items()})

# %% [markdown]
# The picture above went along. (After an `engine.step()` of your own, press **End** in it.) On a machine without a GPU
# the device is a *software stream*: it runs queued work late, as a GPU does, so the races and waits below are real. Its
# times are modelled, and marked so.
#
# ## 2. Inside a step
#
# The other way to look is *step*: the engine really stands still between two phases, and what you see is read from the
# device. The button *Next phase* in the explorer does that; here it is in Python, on a step in which a fourth request
# comes in:

# %%
engine.submit("A bird sat", SamplingParams(max_tokens=24), request_id="bird")
runner = engine.worker.runner
for phase in paused_step(engine):
    staged = sum(len(diffs) for diffs in runner.staged().values())
    computed = engine.rt.read(runner.req_states.num_computed_tokens.gpu)  # reading waits for the device
    print(f"{phase:20s} num_computed of rows 4 to 7: {computed[4:].tolist()}   staged diffs: {staged}")

# %% [markdown]
# What the CPU staged in *update_states* is gone after *apply_writes*: one kernel applied it to the requests' tables
# and one to their block tables. The counts move in *postprocess*, by a kernel, without the CPU being asked: that is how the next step can be prepared while this one still
# runs. (`wait_output` and `update_from_output` belong to the step *before*: with
# asynchronous scheduling, step N + 1 is queued before step N's tokens are fetched.)
#
# ## 3. Record and rewind
#
# A recording keeps the scheduler's decisions, the staged diffs and the tokens. Everything else follows from these, so
# any step of the past can be rebuilt exactly, on any machine, and is compared with a checksum that the device computed
# every 16 steps. Here the KV cache is too small for six requests: when it
# runs dry, the request admitted last is *preempted*: it loses its blocks and is computed again later.

# %%
with Engine("tiny", device="cpu", num_blocks=10) as tight, Recorder(tight, top_k=5) as recorder:
    tight.run(burst(6, prompt_len=(8, 20), max_tokens=32, seed=2), progress=False)

recording = recorder.recording
preempted = next(i for i, step in enumerate(recording) if step.preempted)
print(recording, "| the device's checksums differ:", recording.verify() or "nowhere")

rewind = StepExplorer(recording, index=preempted)
rewind

# %% [markdown]
# *Scheduler's decision* says who was preempted and why; the pages it held go to others. Go on with **Right** until it
# comes back: as a new request, whose prompt is everything it had written.
#
# A recording is one file: `recording.save("run.mrv2rec")`, `Recording.load(...)`. A cell can be recorded too; the name
# behind `%%record` becomes a recording, for `StepExplorer(story)`:

# %%
# %load_ext mrv2lab
fresh = Engine("tiny", device="cpu", num_blocks=64)

# %%
# %%record story -e fresh
for output in fresh.generate(["Once upon a time", "The old clock"], SamplingParams(max_tokens=32)):
    print(output.prompt + output.text)

# %% [markdown]
# And one from a real GPU, recorded on an H200 with `mrv2lab record`. Its device times are measured: see how far the
# device's work trails the host's in *Phases of the step*.

# %%
StepExplorer("../traces/h200_stories.mrv2rec", index=30)

# %% [markdown]
# ## 4. A kernel, program by program
#
# Every operation is written twice: as a *spec* (NumPy, the definition) and as a Triton *kernel*. Here is one of that
# preempting step, on its own inputs: what each program of the kernel loads and stores.

# %%
open_lens(recording, preempted, "post_update")

# %% [markdown]
# ## 5. The race that all this is about
#
# The host prepares step N + 1 while the device runs step N. If both use the same page-locked buffer, the host
# overwrites what the device has yet to read: no error, plausible shapes, wrong tokens. Four ways to hand data over:


# %%
def record(transfer: str, **options: int):
    with Engine("tiny", device="cpu", transfer=transfer, num_blocks=128, **options) as one, Recorder(one) as recorder:
        report = one.run(steady(8, every=1, prompt_len=(4, 12), max_tokens=16, seed=1), progress=False)
    return [output.token_ids for output in report.outputs.values()], recorder.recording


truth, right = record("pinned_copy", lag=0)  # lag 0: the device keeps up with the host, so nothing is overwritten
for transfer in ("unsafe", "barrier", "pinned_copy", "uva_pool"):
    tokens, last = record(transfer)
    waits = [mark.name for step in last for mark in step.marks if mark.kind == "synchronize"]
    barriers, outputs = waits.count("prepare_inputs"), sum(name.startswith("sampled") for name in waits)
    print(
        f"{transfer:12s} {'right' if tokens == truth else 'WRONG'}   waits: {outputs} for outputs, {barriers} barriers"
    )
    if transfer == "unsafe":
        wrong = last

# %% [markdown]
# Everybody waits for outputs, a step late; that is no harm. `unsafe` has one buffer and nobody waits for it. `barrier` (vLLM's V1) waits until the previous copies are done, once a step.
# `pinned_copy` (the Model Runner V2 design) copies into a fresh page-locked buffer each time; `uva_pool` (vLLM today)
# writes into the next of two slots. The corrupted run beside the right one, from the first step whose tokens differ:

# %%
differs = next(i for i, (a, b) in enumerate(zip(right, wrong, strict=False)) if a.sampled != b.sampled)
print(f"'unsafe': {len(wrong.verify())} times the device did not hold what the host had sent")
StepExplorer(right, wrong, index=differs)

# %% [markdown]
# ## Try
#
# 1. In section 1, submit a fifth request and press **N** twice: which row does it get? The free rows are a stack, last
#    in first out. (Twice, since the first **N** fetches the step that was queued before the request came.)
# 2. Give `Engine(..., max_num_batched_tokens=8)` in the first cell and run it again: prompts are computed in chunks.
#    *Scheduler's decision* says how long each one is.
# 3. Submit the same prompt of 20 words twice, a step apart. The second time *Scheduler's decision* tells of a
#    prefix-cache hit: only full blocks of 16 tokens are shared, and the KV pages mark them.
# 4. In section 5, add `record("uva_pool", pool_depth=1)`. Why is one slot not enough?
