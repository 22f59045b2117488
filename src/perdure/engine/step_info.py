"""What the running code knows about where it is: in the body of a run, in a step (`current_step`), or in neither."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Final

import msgspec


class StepInfo(msgspec.Struct, frozen=True, gc=False):
    """What a step's function may know about itself. `idempotency_key` is the same for every attempt and every replay."""

    run_id: str
    key: str
    attempt: int

    @property
    def idempotency_key(self) -> str:
        """A text to hand to services that tell repeated requests apart."""
        return f"{self.run_id}/{self.key}"


# In a step's function its StepInfo, in a run's body that body's Branches, elsewhere None.
place: Final[ContextVar[object]] = ContextVar("perdure_place", default=None)


def current_step() -> StepInfo:
    """What the running step may know about itself; raises outside a step's function."""
    here = place.get()
    if isinstance(here, StepInfo):
        return here
    raise RuntimeError("current_step() was called outside a step's function; it only works in a function run by ctx.step")
