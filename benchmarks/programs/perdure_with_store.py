"""perdure on the store that the place names: SQLite for a path, PostgreSQL for its DSN."""

from __future__ import annotations

import uuid

from benchmarks.program import OwnTime, Program
from benchmarks.programs.flows import fans_out, steps, waits_at_the_end
from benchmarks.work import RESULT_BYTES
from perdure import Ok, Suspended, stores
from perdure.store import Store


class PerdureWithStore(Program):
    """Durable runs, each with an id of its own, on one store that stays open."""

    _store: Store

    async def open(self, place: str) -> None:
        """Open the store. Both write as they do by default, which is safe against a loss of power."""
        self._store = stores.postgres(place) if place.startswith("postgresql:") else stores.sqlite(place)

    async def close(self) -> None:
        """Close it."""
        await self._store.close()

    async def run(self, steps_: int, size: int) -> None:
        """One run."""
        outcome = await steps.run(steps_, size, id=uuid.uuid4().hex, store=self._store)
        _expect(outcome, Ok)

    async def fan_out(self, steps_: int) -> None:
        """One run whose steps are gathered."""
        outcome = await fans_out.run(steps_, RESULT_BYTES, id=uuid.uuid4().hex, store=self._store)
        _expect(outcome, Ok)

    async def record(self, steps_: int) -> None:
        """A run that waits behind its last step, and what it waits for."""
        outcome = await waits_at_the_end.run(steps_, RESULT_BYTES, id="replayed", store=self._store)
        _expect(outcome, Suspended)
        await self._store.signal("replayed", "go", b"null")

    async def replay(self, steps_: int) -> OwnTime | None:
        """Let it go on: loading it and writing its end included."""
        outcome = await waits_at_the_end.run(steps_, RESULT_BYTES, id="replayed", store=self._store)
        _expect(outcome, Ok)
        return None


def _expect(outcome: object, end: type) -> None:
    if not isinstance(outcome, end):
        raise TypeError(f"the run should have ended as {end.__name__}: {outcome!r}")


PROGRAM = PerdureWithStore()
