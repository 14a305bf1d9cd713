# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Profile your workload: V1's barrier beside MRV2's copies
#
# **You will** run one workload on both runners, lay the two timelines on one axis, turn what you select with the mouse into
# a table, get a verdict that may be "cannot tell", profile PyTorch code of your own, and keep what you recorded.
# **You need** no GPU; 15 minutes (sections 7 and 8 are optional). Words that are new to you are in
# [GLOSSARY.md](../GLOSSARY.md).
# **Live**: everything is recorded here, now. With a CUDA GPU the device times are measured; without one they are modelled
# (section 5).
#
# ## 1. By hand
#
# Choose a model, runners and their transfer policies, arrivals, lengths and sampling, and press **Run** (the next cell
# presses it for you). Every run is kept under a letter.

# %%
import os
import tempfile
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch.profiler need not tell when it starts and stops

import pandas as pd
import torch
from IPython.display import display

from mrv2lab import Engine, Trace, WorkloadPanel, compare, overlay, profile, run_settings, steady

pd.set_option("display.max_colwidth", 110)
scratch = tempfile.TemporaryDirectory()
panel = WorkloadPanel(requests=6, steps=24, prompt_len="8-24", max_tokens="12-20")
panel

# %%
panel.run(timeout=120)
print(panel.message)

# %% [markdown]
# The table in the panel has the medians of both. Below it stands the Python that does the same: what you found by hand can
# go into a script.
#
# ## 2. The same in Python
#
# `run_settings` runs one workload (the same requests, arrivals and seeds) on one engine after the other. Each first makes
# some turns that are forgotten. Here two engines on their own policies, V1 with `barrier` and MRV2 with `uva_pool`; the
# third is V1 once more, and you will see why.

# %%
from mrv2lab.recorder.side_by_side import figures_frame

workload = steady(8, every=2, prompt_len=(8, 24), max_tokens=(12, 20), seed=3)
settings = {
    "V1": {"runner": "v1", "transfer": "barrier"},
    "MRV2": {"runner": "mrv2", "transfer": "uva_pool"},
    "V1 again": {"runner": "v1", "transfer": "barrier"},
}
runs = run_settings(workload, settings, progress=False)
print(*runs.values(), sep="\n")
print("the same tokens:", runs["V1"].token_ids == runs["MRV2"].token_ids)
figures_frame(runs).round(1)

# %% [markdown]
# (`waits` is of the whole run, all else of one step. The phase `barrier_wait` is what V1's *host* spends around its barrier
# in a step, Python included; `waits: barrier` counts how often it asked; and how long it then stood still is `wait_us`,
# which is there only where some wait took time. Here most are over at once: the model is tiny, so this workload is
# *host-bound*, and the device is done long before the host asks. [03_async_barrier](03_async_barrier.ipynb) has the cases in
# which it is not.)
#
# ## 3. Two runs on one axis

# %%
from mrv2lab.trace.align import align

both = compare(runs["V1"].trace, runs["MRV2"].trace, "step").steps
far = sum((both[side] / both[side].median() - 1).abs() for side in ("a_ns", "b_ns"))
STEP = int(both.loc[far.idxmin(), "number"])  # a typical one, without a hiccup of this machine
placed = align((runs["V1"].trace, runs["MRV2"].trace), "step", step=STEP)
print(placed.sentence)
timeline = overlay(runs["V1"], runs["MRV2"], align=placed.offsets_ns)
timeline

# %% [markdown]
# A is V1, B is MRV2. Two runs go their own pace, so one offset cannot put all steps under each other; here one typical
# step of both starts at the same moment. *Uncertain by* says how far the **other** steps may lie from where they would be
# if the runs kept pace: half the distance between the quartiles of all steps' offsets. Large here means: compare within a
# step, not across the picture. Drag to pan, Ctrl and the wheel to zoom, click on
# a slice; **?** shows the keys, and everything can be done with them. What to look at:
#
# * **Marks** are the host's waits: V1 has one at the barrier in every step, MRV2 none. Both wait for outputs.
# * The **difference lane** shows for each step who was shorter on the host, and by how much.
# * The lanes *host phases*: `prepare_inputs` is where the policies differ. Zoom in on one step.
# * **Arrows** lead from the selected launch to its work on the device, whenever that ran.
#
# What you select by dragging with Shift is a value in Python. Here it is done by hand, that step of both:

# %%
rows = compare(runs["V1"].trace, runs["MRV2"].trace, "step", step=STEP).steps.set_index("number").loc[STEP]
begin, length = int(rows["start_ns"]), int(max(rows["a_ns"], rows["b_ns"]))
timeline.selection_ns = (begin, begin + length)
timeline.show(begin - length, begin + 2 * length)  # the picture above follows
selected = {}
for name, part in zip(("V1", "MRV2"), timeline.selection, strict=True):
    print(f"{name}: {len(part)} events in the selection")
    phases = part.where("phase").to_frame()
    selected[name] = phases.groupby("name", sort=False)["duration_ns"].sum() / 1000
pd.DataFrame(selected, index=list(dict.fromkeys([*selected["V1"].index, *selected["MRV2"].index]))).round(1)

# %% [markdown]
# `.selection` is a Trace (of two timelines a pair of them), and every analysis takes a Trace. `to_frame()` has one row an
# event:

# %%
timeline.selection[0].to_frame().head(5)

# %% [markdown]
# ## 4. A verdict, or none

# %%
comparison = compare(runs["V1"].trace, runs["MRV2"].trace)
print("- " + comparison.verdict.rstrip(".").replace("; ", "\n- "))
print("\nReasons and limits:", *comparison.reasons, sep="\n- ")
comparison.frame.query("group == 'step' or verdict != 'cannot tell'")[
    ["phase", "n_a", "n_b", "median_a_ns", "median_b_ns", "ratio", "p", "verdict", "reason"]
]

# %% [markdown]
# A difference counts if a rank test says so *after* a correction for how many phases were tested, and if it is larger than
# the spread of the steps. Otherwise the verdict is "cannot tell". It stands there for other reasons too. The same setting twice:

# %%
same = compare(runs["V1"].trace, runs["V1 again"].trace)
print(same.frame["verdict"].value_counts().to_string(), "\n")
print(same.verdict)

# %% [markdown]
# If a phase is called faster here, the machine was slower for a while, and that is all: the rule knows the spread *within* a
# run, not between runs. Repeat before you believe, and take turns. And another workload is refused outright:

# %%
other = run_settings(steady(8, every=1, prompt_len=30, max_tokens=10), {"V1": settings["V1"]}, progress=False)
print(compare(runs["V1"].trace, other["V1"].trace).verdict)

# %% [markdown]
# What holds without any clock is in the counts: copies, bytes, waits, launches a step.

# %%
comparison.counts

# %% [markdown]
# ## 5. What is measured here, and what is modelled
#
# | | without a GPU | with a CUDA GPU |
# |---|---|---|
# | host phases and calls | measured: Python on this machine, our own marks | measured: torch.profiler's host events, our steps and phases as annotations |
# | device work: order, overlap, who waits for whom | real: a *software stream* runs queued work late | real |
# | device work: how long | **modelled** by a cost for each launch and byte | measured by the GPU |
# | how long a wait lasts | follows from the model | measured |
#
# So on a CPU "who waits for whom" is right and "how long" is not; `compare` refuses device times that come from a model.

# %%
from mrv2lab.trace.steps import steps
from mrv2lab.trace.syncs import syncs
from mrv2lab.trace.verdict import verdict

for name in ("V1", "MRV2"):
    waits = syncs(runs[name].trace)
    print(f"{name}: {verdict(runs[name].trace)}")
    display(waits[waits["host_waits"]].groupby(["kind", "caller", "barrier"])["api_ns"].agg(["count", "median", "max"]))

# %% [markdown]
# On a GPU the same `with profile(engine)` runs torch.profiler:

# %%
if torch.cuda.is_available():
    with Engine("tiny", "v1") as engine, profile(engine, warmup=5) as measured:
        engine.run(workload, progress=False)
    print(measured.trace)
    print(verdict(measured.trace))
else:
    print(
        "No CUDA device here, so nothing is measured on one. With one this cell prints a trace of torch.profiler, with "
        "kernels and copies as the GPU timed them, and sections 1 to 4 show measured times without any change."
    )

# %% [markdown]
# ## 6. One run in detail: `profile`
#
# An engine of your own, driven as you like; the first turns are left out. `waits` names every place where the host stood
# still or could have.

# %%
with Engine("tiny", "v1", device="cpu", num_blocks=128) as engine, profile(engine, warmup=3) as profiled:
    engine.run(workload, progress=False)
print(profiled)
print(pd.Series([f"{wait.kind} of {wait.name} in {wait.phase}" for wait in profiled.waits]).value_counts().to_string())

# %% [markdown]
# ## 7. Your own PyTorch code (optional)
#
# Timelines and analyses know nothing of our engine. Any file of torch.profiler will do; a named range a step lets it be cut
# into steps (`ProfilerStep#N`, which `profiler.step()` writes). Put your own model here:

# %%
on_gpu = torch.cuda.is_available()
device = torch.device("cuda" if on_gpu else "cpu")
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8)).to(device)
inputs = torch.randn(64, 256)

kinds = torch.profiler.ProfilerActivity
activities = [kinds.CPU, kinds.CUDA] if on_gpu else [kinds.CPU]
options = {
    "activities": activities,
    "with_stack": True,
    "acc_events": True,
    "schedule": torch.profiler.schedule(wait=0, warmup=1, active=5, repeat=1),  # the first step is left out
    "on_trace_ready": lambda done: done.export_chrome_trace(f"{scratch.name}/mine.json.gz"),
}
with torch.profiler.profile(**options) as profiler:
    for _ in range(6):
        with torch.profiler.record_function("move"):
            moved = inputs.to(device)  # from pageable memory: on a GPU an implicit synchronisation
        with torch.profiler.record_function("forward"):
            scores = model(moved)
        best = scores.argmax().item()  # and this one is explicit
        profiler.step()

# %%
mine = Trace.load(f"{scratch.name}/mine.json.gz")
print(mine)
print(verdict(mine))
display(steps(mine)[["step", "host_ns", "gpu_busy_ns", "gpu_events"]])
display(syncs(mine)[["kind", "call", "api_ns", "caller_ns", "gpu_wait_ns", "site"]])
print(*syncs(mine).attrs["cannot_say"], sep="\n")

# %% [markdown]
# On a CPU the answer is "no GPU activity recorded", not "100 % idle". To name *our* steps and phases in a profiler that
# you run yourself, there is `annotate`:

# %%
from mrv2lab.recorder.annotate import annotate

with Engine("tiny", "mrv2", device="cpu", num_blocks=64) as engine:
    engine.submit("Once upon a time")
    with torch.profiler.profile(activities=[kinds.CPU]) as profiler, annotate(engine):
        for _ in range(6):
            engine.step()
profiler.export_chrome_trace(f"{scratch.name}/annotated.json")
steps(Trace.load(f"{scratch.name}/annotated.json"))[["step", "source", "host_ns"]]

# %% [markdown]
# ## 8. Nsight (optional)
#
# NVIDIA's Nsight Systems can look at the same run from a JupyterLab that has its extension; `annotate` writes NVTX ranges
# for it. What is there on this machine:

# %%
from mrv2lab.recorder.nsight import nsight_hint, nsight_status

print(nsight_hint())
print(nsight_status())

# %% [markdown]
# An export of it (`nsys export --type sqlite report.nsys-rep`) is read by `Trace.load` like any other trace; the file is
# not written to.
#
# ## 9. Keep it
#
# A trace is saved as Chrome JSON. Our reader gets back exactly what was written:

# %%
from mrv2lab.trace.write import write_perfetto

saved = Path(scratch.name, "v1_barrier.json.gz")
write_perfetto(runs["V1"].trace, saved)
again = Trace.load(saved)
print(f"{saved.stat().st_size / 1000:.0f} KB: {again}")
print("the same steps:", steps(again)["host_ns"].tolist() == steps(runs["V1"].trace)["host_ns"].tolist())

# %% [markdown]
# The same file opens in [Perfetto](https://ui.perfetto.dev) (*Open trace file*; it stays in your browser), and
# `profile(engine, path="run.json.gz")` writes it directly. On the command line:
# `mrv2lab trace report run.json.gz`, and `mrv2lab trace compare a.json.gz b.json.gz`.
#
# ## Try
#
# 1. Give MRV2 `"transfer": "barrier"` in section 2. Which marks appear in B, and what happens to `prepare_inputs`?
# 2. Give both `"async_scheduling": False`. Who waits now, and where? (Everybody for the output, in every step; the barrier
#    has nothing left to wait for.)
# 3. In section 7, replace `.item()` by nothing, or `inputs.to(device)` by `inputs.pin_memory().to(device, non_blocking=True)`
#    on a GPU. Does `syncs` agree with what you expect?
# 4. In section 3, `timeline.kinds = ["phase", "kernel", "memcpy"]`, then look at `.selection` again.
#
# **What next**: [13_read_a_vllm_trace](13_read_a_vllm_trace.ipynb) reads a trace that somebody else recorded, with
# exercises that check themselves; [03_async_barrier](03_async_barrier.ipynb) tells what the barrier protects.
