"""`Run`: a handle on one run, wherever it is driven."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from perdure.errors import RunNotFound
from perdure.result import Outcome
from perdure.store import Status

if TYPE_CHECKING:
    from perdure.host import Host

T_co = TypeVar("T_co", covariant=True)


class Run(Generic[T_co]):
    """One run. `await run` gives its value, or raises, when it has ended."""

    def __init__(self, host: Host, run_id: str) -> None:
        self._host = host
        self.id = run_id

    def __repr__(self) -> str:
        return f"<Run {self.id}>"

    def __await__(self) -> Generator[Any, Any, T_co]:
        return self._value().__await__()

    async def status(self) -> Status:
        """Where the run stands now."""
        row = await self._host.store.get(self.id)
        if row is None:
            raise RunNotFound(self.id)
        return row.status

    async def outcome(self) -> Outcome[T_co]:
        """How the run stands: at once when it has ended or is suspended, otherwise as soon as it does. `await run` waits on."""
        return await self._host.outcome(self.id)

    async def signal(self, name: str, payload: Any = None, *, dedupe: str | None = None) -> None:
        """Put a signal into the run's inbox; the run gets it exactly once. `dedupe` makes repeating this call harmless."""
        await self._host.signal(self.id, name, payload, dedupe=dedupe)

    async def cancel(self) -> None:
        """Ask the run to stop. It ends as cancelled when its worker has seen that."""
        await self._host.cancel(self.id)

    async def _value(self) -> T_co:
        outcome: Outcome[T_co] = await self._host.outcome(self.id, through_waits=True)
        return outcome.unwrap()
