"""Fixture ``rt``: a deferred and a threaded software stream, and a GPU where there is one."""

from tests.runtime.machines import cpu, rt, soft

__all__ = ["cpu", "rt", "soft"]
