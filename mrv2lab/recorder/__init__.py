"""Capture: an engine's run becomes a recording, without a wait (``recorder``) or paused between phases (``paused``)."""
