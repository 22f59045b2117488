"""A lease that is held without a drive, for tests of the heartbeat."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from perdure.engine.heartbeat import HeldLease
from perdure.model.clock import Clock
from perdure.model.records import Claim, Pulse


def held_lease(claim: Claim, ttl: float, asked_at: float, clock: Clock, on_pulse: Callable[[Pulse], object]) -> HeldLease:
    """Return the lease of this claim, whose holder only takes pulses."""
    drive = SimpleNamespace(
        clock=clock,
        settings=SimpleNamespace(max_blocked=None),
        body=SimpleNamespace(is_pumping=False),
        executing={},
        pulsed=on_pulse,
        lost=lambda: None,
    )
    return HeldLease(cast("Any", drive), claim, ttl, asked_at)
