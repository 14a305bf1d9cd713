# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Quickstart: step a real batch
#
# **You will** run a language model's inference engine, step by step, and see what a step keeps, moves and produces.
# **You need** nothing: no GPU, no download. On a machine without a GPU the device is a *software stream* that runs
# queued
# work late, as a GPU does. About 10 minutes.

# %%
import pandas as pd

from mrv2lab import Engine, EventLog, SamplingParams, burst, steady

pd.set_option("display.max_colwidth", 60)
engine = Engine(model="tiny", num_blocks=64, max_num_reqs=8, max_num_batched_tokens=64)
print(f"{engine.config.model.name} on {engine.rt.device}, kernels: {engine.rt.backend}")

# %% [markdown]
# ## 1. Text comes out
#
# `tiny` is a small Llama that was trained by this project on short stories; it ships in the package.

# %%
prompts = ["Once upon a time", "The old clock"]
for output in engine.generate(prompts, SamplingParams(max_tokens=64)):
    print(f"[{output.finish_reason}, {output.steps} steps] {output.prompt}{output.text}\n")

# %% [markdown]
# ## 2. One step at a time
#
# `submit` only queues a request. Each `step()` lets the scheduler decide who computes how many tokens, gathers those
# requests into a batch, runs the model once and samples. Scheduling is *asynchronous*: step N + 1 is queued before
# step N
# is waited for, so the first call returns nothing.

# %%
prompts = {
    "hen": "Once upon a time, there was a clever hen",
    "clock": "The old clock",
    "boat": "Tom had a small boat. One day",
}
for name, prompt in prompts.items():
    engine.submit(prompt, SamplingParams(max_tokens=24, temperature=0.7, seed=7), request_id=name)

for _ in range(4):
    back = {output.request_id: output.new_text for output in engine.step()}
    print(f"scheduled {engine.core.last_schedule.num_scheduled_tokens}   came back: {back}")

# %% [markdown]
# The first schedule has whole prompts in it, the later ones a single token each: there is no prefill phase and no
# decode
# phase, only a count of computed tokens that chases a count of known ones.
#
# ## 3. Persistent rows
#
# Each request owns a **row** of the state tables for as long as it lives. A step's batch is *gathered* from the rows,
# in
# whatever order it likes; nothing ever moves. `rows()` reads the device, so it synchronises: use it between steps.

# %%
engine.rows()

# %% [markdown]
# `num_computed` is one behind `total_len` for every request that decodes: the last sampled token's keys and values are
# computed by the next step. Rows are handed out from the top, and go back to the free list when a request ends:

# %%
engine.abort("clock")
engine.step()
engine.submit("A bird sat", SamplingParams(max_tokens=24), request_id="bird")
for _ in range(3):
    engine.step()
engine.rows()

# %% [markdown]
# `bird` took the row that `clock` left. The row was not cleared; every table in it was overwritten.
#
# ## 4. What a step asks of the machine
#
# Everything the device is told passes a few chokepoints, and an observer may listen there. Here is one decode step: the
# kernels, the copies to the device (`h2d`) and back (`d2h`), and the only thing the host waits for.

# %%
log = EventLog()
engine.observer = log
engine.step()
columns = ["kind", "name", "stream", "nbytes"]
marks = pd.DataFrame([[getattr(mark, column) for column in columns] for mark in log.marks], columns=columns)
print(marks.kind.value_counts().to_string(), "\n")
print("the host waited for:", [(mark.kind, mark.name) for mark in log.waits()])
marks[~marks.name.str.startswith("layer.")]

# %%
phases = pd.DataFrame([(span.name, span.duration_ns / 1e3) for span in log.spans], columns=["phase", "host us"])
phases.groupby("phase", sort=False).sum().round(1)

# %% [markdown]
# On a machine without a GPU, `wait_output` or whatever waits first is where the queued work really runs, so these are
# the
# host's times and say nothing about a GPU.
#
# ## 5. The race that all this is about
#
# The host prepares step N + 1 while the device runs step N. If both use the same page-locked buffer, the host
# overwrites
# what the device has yet to read: no error, plausible shapes, wrong tokens. Four ways to hand data over, same workload:


# %%
def tokens(transfer: str, **options: int) -> list[list[int]]:
    with Engine("tiny", device="cpu", transfer=transfer, num_blocks=128, **options) as one:
        report = one.run(steady(8, every=1, prompt_len=(4, 12), max_tokens=16, seed=1), progress=False)
        return [output.token_ids for output in report.outputs.values()]


truth = tokens("pinned_copy", lag=0)  # lag 0: the device keeps up with the host, so nothing can be overwritten
for transfer in ("unsafe", "barrier", "pinned_copy", "uva_pool"):
    print(f"{transfer:12s}", "right" if tokens(transfer) == truth else "WRONG")
print("uva_pool with one slot:", "right" if tokens("uva_pool", pool_depth=1) == truth else "WRONG")

# %% [markdown]
# `unsafe` has one buffer and nobody waits. `barrier` (vLLM's V1) makes the host wait for the previous copies.
# `pinned_copy` (the Model Runner V2 design document) copies into a fresh page-locked temporary each time. `uva_pool`
# (vLLM today) writes into the next of two slots, which is safe as long as no more than two steps are in flight.
#
# ## 6. A tight pool: preemption
#
# The KV cache is a pool of blocks. When it runs dry, the last request loses its blocks, and is computed again later
# from
# prompt and outputs. The text does not change.

# %%
roomy = Engine("tiny", device="cpu", num_blocks=128)
tight = Engine("tiny", device="cpu", num_blocks=10)
work = burst(6, prompt_len=(8, 20), max_tokens=32, seed=2)
one, other = roomy.run(work, progress=False), tight.run(work, progress=False)
print(one)
print(other)
same = [a.token_ids == b.token_ids for a, b in zip(one.outputs.values(), other.outputs.values(), strict=True)]
print("same tokens:", same)
roomy.close()
tight.close()

# %% [markdown]
# ## Try
#
# 1. Give `Engine(..., async_scheduling=False)` in section 2: which call returns the first token now?
# 2. Set `max_num_batched_tokens=8` and look at `num_scheduled_tokens`: a prompt is computed in chunks.
# 3. Submit the same long prompt twice and look at `engine.scheduler.stats.prefix_hit_tokens`.

# %%
engine.close()
