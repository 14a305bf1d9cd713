"""Reading, analysing and comparing profiler traces. Loads neither torch nor Triton."""
