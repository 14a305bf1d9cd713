"""The step explorer: forward, back and into the phases of a recorded or live step."""

from mrv2lab.widgets.step_explorer.widget import StepExplorer

__all__ = ["StepExplorer"]
