"""The leases that a store of somebody else's gives, as far as this process has them.

One without `acquire` gives everything: then there is this process alone. A lease is ours until its ttl has passed since it was
asked for, on a clock that is never set; from then on somebody else may have had the run, so it is not ours even if it is free.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import Any

from perdure.aio.pending_write import answered
from perdure.backends.user_defined.state_store import asked
from perdure.errors import PersistenceError
from perdure.model.clock import elapsed


@dataclass(slots=True)
class _Held:
    token: str
    # Where the store is used, and so where it has to be asked.
    loop: asyncio.AbstractEventLoop
    ours_until: float


class OwnLeases:
    """Who has which run, by `acquire` and `release` of the user's store."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.are_asked_for = callable(getattr(store, "acquire", None))
        if self.are_asked_for and not callable(getattr(store, "release", None)):
            raise TypeError(f"{store!r} has acquire but no release; a lease that cannot be given up needs both")
        # By run. Changed on the loop of its holder, or by whoever has the run's turn.
        self._held: dict[str, _Held] = {}

    def are_ours(self, run_id: str) -> bool:
        """Whether nobody else can have the run."""
        held = self._held.get(run_id)
        return not self.are_asked_for or (held is not None and elapsed() < held.ours_until)

    async def take(self, run_id: str, ttl: float) -> bool:
        """Whether the run is ours now. Cancelled meanwhile it is given back."""
        return await answered(self._take(run_id, ttl), lambda was_taken: self.give_back(run_id) if was_taken else _nothing())

    async def _take(self, run_id: str, ttl: float) -> bool:
        held = _Held(secrets.token_hex(16), asyncio.get_running_loop(), elapsed() + ttl)
        if not await self._acquired(run_id, held.token, ttl):
            return False
        self._held[run_id] = held
        return True

    async def prolong(self, run_id: str, ttl: float) -> bool:
        """Whether the run stays ours. To be called on any loop; the store is asked on the one that took the lease."""
        held = self._held.get(run_id)
        if held is None:
            return not self.are_asked_for
        prolonging = self._prolong(run_id, held, ttl)
        if held.loop is asyncio.get_running_loop():
            return await prolonging
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(prolonging, held.loop))

    async def _prolong(self, run_id: str, held: _Held, ttl: float) -> bool:
        asked_at = elapsed()
        if asked_at >= held.ours_until or not await self._acquired_again(run_id, held.token, ttl):
            self._held.pop(run_id, None)
            return False
        if self._held.get(run_id) is not held:  # given back while the store was asked
            await self._released(run_id, held.token)
            return False
        held.ours_until = asked_at + ttl
        return True

    async def _acquired_again(self, run_id: str, token: str, ttl: float) -> bool:
        if await self._acquired(run_id, token, ttl):
            return True
        # Many give a lease only while nobody has it, not even the same token.
        await self._released(run_id, token)
        return await self._acquired(run_id, token, ttl)

    async def give_back(self, run_id: str) -> None:
        """Let others have the run. If that fails, the lease expires by itself."""
        held = self._held.pop(run_id, None)
        if held is not None:
            try:
                await answered(self._released(run_id, held.token))
            except PersistenceError:
                return

    async def _acquired(self, run_id: str, token: str, ttl: float) -> bool:
        answer = await asked(self._store.acquire, run_id, token, ttl, trouble=f"run {run_id!r} could not be acquired")
        if not isinstance(answer, bool):
            raise PersistenceError(f"run {run_id!r} could not be acquired", f"acquire gave {answer!r}, not True or False")
        return answer

    async def _released(self, run_id: str, token: str) -> None:
        await asked(self._store.release, run_id, token, trouble=f"run {run_id!r} could not be released")


async def _nothing() -> None: ...
