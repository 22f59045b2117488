"""What all drives of one runtime share."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass, field

from perdure.clock import Clock, SystemClock
from perdure.codec import Codec
from perdure.duration import MICROSECOND


@dataclass(frozen=True, slots=True)
class Settings:
    """The clock, codec and threads of a runtime, and how long it is patient."""

    clock: Clock = field(default_factory=SystemClock)
    codec: Codec = field(default_factory=Codec)
    executor: Executor | None = None
    unload_grace: int = MICROSECOND
    max_attempts: int = 10
    drain_after: float = 10.0
