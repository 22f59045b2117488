"""When a failed step is tried again."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from perdure.duration import Duration, seconds


@dataclass(frozen=True)
class Retry:
    """How often and when. `attempts` counts the first one too; `on` says which exceptions are worth another."""

    attempts: int = 3
    on: type[BaseException] | tuple[type[BaseException], ...] = Exception
    wait_initial: Duration = "100ms"
    wait_max: Duration = "30s"
    wait_exp_base: float = 2
    wait_jitter: Duration = "1s"

    def __post_init__(self) -> None:
        if isinstance(self.attempts, bool) or not isinstance(self.attempts, int) or self.attempts < 1:
            raise ValueError(f"Retry(attempts=) must be a whole number of at least 1, not {self.attempts!r}")
        if not self.wait_exp_base >= 1:
            raise ValueError(f"Retry(wait_exp_base=) must be at least 1, not {self.wait_exp_base!r}")
        for kind in self.on if isinstance(self.on, tuple) else (self.on,):
            if not (isinstance(kind, type) and issubclass(kind, Exception)):
                raise TypeError(f"Retry(on=) takes Exception classes, not {kind!r}")
        for name in ("wait_initial", "wait_max", "wait_jitter"):
            seconds(getattr(self, name), what=f"Retry({name}=)")
        if seconds(self.wait_initial) > seconds(self.wait_max):
            raise ValueError(
                f"Retry(wait_initial={self.wait_initial!r}) is longer than wait_max={self.wait_max!r}; raise wait_max too"
            )

    @classmethod
    def of(cls, retry: Retry | int | None) -> Retry:
        """`retry=` as it may be written: 5 is short for `Retry(attempts=5)`, None for no retry."""
        if retry is None:
            return _ONCE
        return retry if isinstance(retry, Retry) else cls(attempts=retry)

    def wants(self, error: Exception, attempt: int) -> bool:
        """Whether attempt number `attempt`, which failed with `error`, is followed by another."""
        return attempt < self.attempts and isinstance(error, self.on)

    def wait_after(self, attempt: int) -> float:
        """Seconds between attempt number `attempt` and the next: exponential plus jitter, never more than `wait_max`."""
        most = seconds(self.wait_max)
        try:
            wait = seconds(self.wait_initial) * float(self.wait_exp_base) ** (attempt - 1)
        except OverflowError:
            return most
        return min(most, wait + random.uniform(0, seconds(self.wait_jitter)))  # noqa: S311 - jitter needs no secrecy


_ONCE: Final = Retry(attempts=1)
