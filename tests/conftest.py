"""What tests of every folder may ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.steady_clock import SteadyClock


@pytest.fixture
def host_clock() -> Iterator[SteadyClock]:
    """The clock that every software stream of the test reads; only the test moves it."""
    from tests.steady_clock import steady_clock  # here, because it loads torch

    with steady_clock() as clock:
        yield clock
