"""The timeline: one trace or two on one axis, a million slices, and what was selected as a value."""

from mrv2lab.widgets.timeline.widget import Timeline

__all__ = ["Timeline"]
