"""The machines as fixtures: ``rt`` (each in turn), ``cpu`` (deferred), ``soft`` (deferred and threaded)."""

from tests.runtime.machines import cpu, rt, soft

__all__ = ["cpu", "rt", "soft"]
