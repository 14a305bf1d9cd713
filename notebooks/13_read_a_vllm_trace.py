# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Read a vLLM trace: why did the CPU wait?
#
# **You will** open a trace that somebody else recorded, cut it into steps the right way, find vLLM's input barrier in it,
# split a wait into what is known and what is not, tell a host-bound step from a device-bound one, and see where the file has
# no answer.
# **You need** no GPU, no network and no PyTorch; about 20 minutes. Words that are new to you are in
# [GLOSSARY.md](../GLOSSARY.md); [03_async_barrier](03_async_barrier.ipynb) explains what the barrier is for.
# **Recorded**: nothing runs here but the analysis of a file.
#
# ## 1. Which file?
#
# Your own: put its path here, and run all cells. Kineto's JSON (plain or gzipped) of vLLM, SGLang or any PyTorch program,
# and the `.sqlite` export of Nsight Systems can be read. vLLM 0.13 and later writes such a file with
# `vllm serve MODEL --profiler-config '{"profiler": "torch", "torch_profiler_dir": "traces"}'`, and its frames with the
# option `torch_profiler_with_stack`.

# %%
PATH = None

# %% [markdown]
# Without a path the next cell **makes a file up**. It is *synthetic*: its names and its structure are those of a torch
# profiler trace of vLLM's V1 runner, **all its numbers are invented by a seed**, line numbers included. No vLLM and no
# GPU was there. It is for learning to read, and no evidence of anything.
#
# Two real ones are public, and everything below works on them too: V1 on a B200 and on an AMD GPU. They lie in
# [AMD-AGI/TraceLens](https://github.com/AMD-AGI/TraceLens) (MIT licence) at commit `171dd747`; download one and put its path
# above. What sections 3 to 6 show of the made-up file is there to be seen in these.

# %%
import tempfile
from pathlib import Path

import pandas as pd
from IPython.display import display

from mrv2lab import Timeline, Trace
from mrv2lab.teach.trace_lesson import PUBLIC, published
from mrv2lab.teach.vllm_like_file import write_like_vllm

pd.set_option("display.max_colwidth", 100)
for digest, (where, what) in PUBLIC.items():
    print(f"{where}\n    {what}\n    sha256 {digest}")

# %%
scratch = tempfile.TemporaryDirectory()
file = Path(PATH) if PATH else write_like_vllm(scratch.name, seed=7)
trace = Trace.load(file)
print(trace)
print(published(file) if PATH else "SYNTHETIC: the numbers in this file are invented, see above.")
for problem in trace.problems:
    print("mended or left out:", problem)

# %% [markdown]
# A reader must say what it had to mend or leave out: `problems`. Profilers do write `inf`, which is no JSON, and cut files
# off in the middle of an event; a reader that is silent about it shows half a file as if it were all of it.
#
# ## 2. Lanes
#
# A lane is a host thread or a device stream. Look at the threads first: *what is not recorded cannot be read later.*

# %%
from mrv2lab.teach.trace_lesson import lanes
from mrv2lab.trace.steps import steps
from mrv2lab.trace.wait_marks import wait_marks

lanes(trace).round(1)

# %%
table = steps(trace)
timeline = Timeline(trace, steps=table, marks=wait_marks(trace))
timeline

# %% [markdown]
# Drag to pan, Ctrl and the wheel to zoom, click on a slice for its nanoseconds and its place in the program; **?** shows the
# keys. Above the lanes lie the steps as their names say them; waits of the host carry a mark (**K** and **k** go from one to
# the next). What you select by dragging with Shift is a Trace: `timeline.selection`.
#
# ## 3. Cut by who launched it, not by when it ran
#
# vLLM puts a range around a step; its name says how many requests and tokens are in prefill (*context*) and in decode
# (*generation*).

# %%
facts = "kind context_tokens generation_tokens host_ns gpu_ns gpu_busy_ns gpu_events launches".split()
display(table[facts])
print(*table.attrs["cannot_say"], sep="\n")

# %% [markdown]
# Which kernels belong to a step? It is tempting to take those that ran within its range. Both ways, counted:

# %%
from mrv2lab.teach.trace_lesson import two_ways_to_cut

two_ways_to_cut(trace)

# %% [markdown]
# *its_own* are the kernels and copies that the step launched: the profiler gives a launch and its work the same
# *correlation id*. *anyone_inside* is what ran while the step's range was open. In the decode steps of the made-up file
# **not one** of the step's own pieces ran in its own range, as in both public traces of vLLM with graphs. The host is a
# step ahead: what ran there had been launched by the step before. Whoever cuts by time gives every kernel to the wrong
# step, and the timeline above looks plausible all the same.
#
# How far ahead? The first launch of each step, and how long after it its work began (`ahead_ns`):

# %%
from mrv2lab.trace.launch_queue import run_ahead

ahead = run_ahead(trace)
ahead.groupby("step")[["api", "work", "pieces", "launch_in_step_ns", "work_in_step_ns", "ahead_ns"]].first()

# %% [markdown]
# ## 4. The barrier, and four answers to "how long did it take?"
#
# `syncs` lists every point where the host or a stream waited, or looks as if it had; first the sums by kind, then the
# single ones, those that held up the host first, and of these the longest. `barrier` marks those inside vLLM's
# `synchronize_input_prep`.
#
# The barrier has **two ends**, and the function is entered at both. At the one, before the host writes its input buffers,
# it *waits* for an event: the copies of the step before have read them. At the other, behind the copies of this step, it
# *records* that event for the next step, and nobody waits. Only the first is a wait, though both have a frame.

# %%
from mrv2lab.trace.syncs import syncs
from mrv2lab.trace.wait_totals import longest_first, wait_totals

display(wait_totals(trace))
waits = longest_first(syncs(trace))
columns = "kind call api_ns frame_ns caller_ns unexplained_ns before_ns after_ns host_waits barrier site".split()
waits[columns]

# %% [markdown]
# How long did the barrier take?
#
# * `api_ns`: the runtime's call, `cudaEventSynchronize`. Some microseconds: the event had passed already.
# * `caller_ns`: what the Python code that called it saw. A hundred microseconds and more.
# * `gpu_wait_ns`: how long the device was still busy with what was waited for. -1: this file does not say.
# * `unexplained_ns`: the caller's time that is neither the call nor recorded overhead; of it lie `before_ns` before the
#   call and `after_ns` after it. What comes after a call that has returned is no waiting for the device.
#
# A tool that reads runtime calls would say "2 us, nothing to see". One that reads Python frames would say "the barrier
# costs a tenth of the step". Both are readings of one file. The rest may have been another thread that held Python's lock
# (the GIL), and the file holds one host thread only: **this cannot be told from it**, and it says so:

# %%
for sentence in waits.attrs["cannot_say"]:
    print("-", sentence)

# %% [markdown]
# Two more traps are in the table. A barrier may be there as a Python frame *without* its call of the runtime
# (`python frame only`); who looks for `cudaEventSynchronize` finds no barrier. And a copy from *pageable* memory
# looks like a wait but need not be one: where the runtime has staged a small source it returns at once, before the copy
# is done (`host_waits` is False).
#
# ## 5. The profiler inside the measurement
#
# Which of vLLM's copies is the slow one?

# %%
from mrv2lab.trace.syncs import frames

copies = frames(trace, "copy_to_gpu")
if len(copies):
    row = copies.loc[copies["longest_ns"].idxmax()]
    print(f"{row['calls']} calls of copy_to_gpu take {row['total_ns'] / 1e3:,.1f} us on the host.")
    print(f"The longest alone takes {row['longest_ns'] / 1e3:,.1f} us,")
    print(f"and {row['longest_overhead_ns'] / 1e3:,.1f} us of that is the profiler asking for memory.")
    print(f"Without recorded overhead all calls take {(row['total_ns'] - row['overhead_ns']) / 1e3:,.1f} us.")
else:
    print(*copies.attrs["cannot_say"])

# %% [markdown]
# `Activity Buffer Request` is the profiler's own, in a lane of its own, and it lies *inside* the frame of the copy that had
# the bad luck. No column here has overhead subtracted silently: it is its own column.
#
# ## 6. One launch, hundreds of kernels; and kernels that overlap on one stream
#
# A graph is launched by one call. Its kernels share one correlation id:

# %%
from mrv2lab.trace.same_stream import same_stream_overlaps
from mrv2lab.trace.tables import kernels, launches

display(launches(trace)[["api", "calls", "launching", "host_ns", "median_ns", "work", "max_kernels"]])
display(kernels(trace)[["name", "calls", "total_ns", "median_ns", "in_graphs", "orphans"]].head(8))

# %% [markdown]
# So launches cannot be counted by counting kernels, and a host time per kernel means nothing in a graph. `orphans` are
# kernels whose launch is not in the file: the profiler was started while they were queued or running.
#
# A stream runs its work in order. Still some kernels begin before the one in front of them has ended:

# %%
overlaps = same_stream_overlaps(trace)
print(overlaps.attrs["counts"])
overlaps.groupby(["label", "earlier", "later"])["overlap_ns"].agg(["count", "min", "median", "max"])

# %% [markdown]
# That is *programmatic dependent launch*: the next kernel may begin while the last blocks of the one before still run.
# The label rests on the launch (`cudaLaunchKernelExC` can ask for it), not on the length of the overlap. Tools that take
# every overlap for a fault of the clock "mend" them, or lose the second kernel altogether.
#
# ## 7. Host-bound or device-bound?
#
# The *launch queue* tells: how many launches wait for their turn. A queue that is empty again and again means that the
# device waits for the host; one that stays full, that the host is ahead.

# %%
from mrv2lab.teach.trace_lesson import queue_picture

queue_picture(trace)

# %%
from mrv2lab.teach.trace_lesson import limits

with pd.option_context("display.max_colwidth", None):
    display(limits(trace))

# %% [markdown]
# In the made-up file decode by graph keeps the device fed: what the host does in a step hardly matters, the barrier
# included. The eager prefill is the other way round. There a microsecond of the host is a microsecond of the step, and
# MRV2's shorter preparation, or a graph, would be felt. A verdict over the whole file blurs the two; ask it of what you
# want to know about. (`device-bound` is the healthy case.)
#
# What a step could not have been shorter than is its *critical path*:

# %%
from mrv2lab.trace.critical_path import critical_path

if len(trace):
    last = len(table) - 1
    path = critical_path(trace, last if last >= 0 else None)
    print(f"the path of {'step ' + str(last) if last >= 0 else 'the whole file'}, in us:")
    print((path.groupby("resource")["duration_ns"].sum() / 1e3).round(1).sort_values(ascending=False).to_string())

# %% [markdown]
# ## 8. What this file cannot say

# %%
from mrv2lab.trace.hazards import hazards
from mrv2lab.trace.report import report

for sentence in [*report(trace)["cannot_say"], *hazards(trace).attrs["cannot_say"]]:
    print("-", sentence)

# %% [markdown]
# Each sentence names what would have to be recorded. Two things no trace of this kind holds: *which bytes* a copy read
# (a race leaves no trace here: for that there is the `RaceDetector` of [03_async_barrier](03_async_barrier.ipynb)), and
# what it would have been like *without* the profiler. `mrv2lab trace report FILE` prints all of this on the command line.
#
# ## Exercises
#
# Fill in your answers instead of `None` and run the cell. They are checked against the analyses of *your* file, and a wrong
# answer is told why it is wrong.
#
# **1. Find the sync.** At which line does the host wait before it writes its input buffers? (Click on the mark in the
# timeline, or read section 4.) Then try the place of the pageable copy, and that of the barrier's other end.

# %%
from mrv2lab.teach.trace_exercises import find_the_barrier, name_the_limit, predict_queue_depth, split_the_wait

find_the_barrier(trace, None)

# %% [markdown]
# **2. Split the wait.** Take the barrier that took its caller longest. In microseconds: the runtime's call, what the caller
# saw, and what nobody can explain?

# %%
split_the_wait(trace, api_us=None, caller_us=None, unexplained_us=None)

# %% [markdown]
# **3. Predict the queue depth.** In the first step (row 0): how many of its launches wait at once, at most? Predict it from
# the table of section 3 before you look at the picture of section 7; the number must be right. Then the last step, which is
# harder: there one off is fine.

# %%
predict_queue_depth(trace, 0, None) if len(table) else None

# %% [markdown]
# **4. Name the limit.** What would limit the first step if you had to say it from `gpu_ns` and `gpu_busy_ns` alone? One of
# host-bound, device-bound, waiting, mixed, cannot tell.

# %%
name_the_limit(trace, 0, None) if len(table) else None

# %% [markdown]
# ## What next
#
# * Write the file anew with `write_like_vllm(scratch.name, seed=8)`, or take one of the public ones: which of your
#   answers change, and which do not?
# * [12_profile_your_workload](12_profile_your_workload.ipynb) records your own workload on both runners and lays the two
#   timelines on one axis.
# * [03_async_barrier](03_async_barrier.ipynb): what the barrier protects, and what happens without it.
