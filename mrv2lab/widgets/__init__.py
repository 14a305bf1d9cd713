"""anywidget views over values of ``recording`` and ``trace``: one hand-written ES module each, no torch."""
