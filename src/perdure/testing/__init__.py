"""What tests of workflows and of stores need: a clock that jumps, and the contract that every store passes."""

from __future__ import annotations

from perdure.testing.clock import ManualClock

__all__ = ["ManualClock"]
