"""Timings as JSON: one step's phases, its noise and its state."""
