"""The leases that a user's store gives by its `acquire` and `release`, as far as this process has them.

A store without `acquire` is used by this process alone, so every run is ours. Otherwise a lease is ours until its ttl has passed
since it was asked for, on a clock that is never set. From then on another process may have had the run, so it is not ours even if
it is free.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import Any

from perdure.aio.pending_write import await_reply
from perdure.backends.user_defined.state_store import call_user_method
from perdure.errors import PersistenceError
from perdure.model.clock import elapsed


@dataclass(slots=True)
class _HeldLease:
    token: str
    # The event loop on which the store is used, and so where it has to be called.
    loop: asyncio.AbstractEventLoop
    ours_until: float


class UserStoreLeases:
    """The runs that this process has leased from the user's store."""

    def __init__(self, store: Any) -> None:
        self._store = store
        # Whether the store gives leases at all.
        self.are_needed = callable(getattr(store, "acquire", None))
        if self.are_needed and not callable(getattr(store, "release", None)):
            raise TypeError(f"{store!r} has acquire but no release; a lease that cannot be given up needs both")
        # Whether it leases runs that it does not have yet; None until it was asked.
        self._precede_runs: bool | None = None
        # By run. Changed on the holder's event loop, or while the run's lock is held.
        self._held: dict[str, _HeldLease] = {}

    def is_ours(self, run_id: str) -> bool:
        """Whether no other process can have the run."""
        held = self._held.get(run_id)
        return not self.are_needed or (held is not None and elapsed() < held.ours_until)

    async def acquire(self, run_id: str, ttl: float) -> bool:
        """Whether the run is ours now. If the caller is cancelled meanwhile, it is released again."""
        return await await_reply(self._acquire(run_id, ttl), lambda is_ours: self.release(run_id) if is_ours else _nothing())

    async def _acquire(self, run_id: str, ttl: float) -> bool:
        held = _HeldLease(secrets.token_hex(16), asyncio.get_running_loop(), elapsed() + ttl)
        if not await self._call_acquire(run_id, held.token, ttl):
            return False
        self._held[run_id] = held
        return True

    async def precede_runs(self) -> bool:
        """Return whether the store leases runs that it does not have yet. Asks it once, with an id that nobody else uses."""
        if self._precede_runs is None:
            nobodys, token = secrets.token_hex(16), secrets.token_hex(16)
            self._precede_runs = await self._call_acquire(nobodys, token, 1.0)
            if self._precede_runs:
                await self._call_release(nobodys, token)
        return self._precede_runs

    async def renew(self, run_id: str, ttl: float) -> bool:
        """Whether the run stays ours. May be called on any event loop; the store is called on the one that took the lease."""
        held = self._held.get(run_id)
        if held is None:
            return not self.are_needed
        renewal = self._renew(run_id, held, ttl)
        if held.loop is asyncio.get_running_loop():
            return await renewal
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(renewal, held.loop))

    async def _renew(self, run_id: str, held: _HeldLease, ttl: float) -> bool:
        asked_at = elapsed()
        if asked_at >= held.ours_until or not await self._acquire_again(run_id, held.token, ttl):
            self._held.pop(run_id, None)
            return False
        if self._held.get(run_id) is not held:  # released during the call
            await self._call_release(run_id, held.token)
            return False
        held.ours_until = asked_at + ttl
        return True

    async def _acquire_again(self, run_id: str, token: str, ttl: float) -> bool:
        if await self._call_acquire(run_id, token, ttl):
            return True
        # Many stores give a lease only while the run has none, not even the same token's.
        await self._call_release(run_id, token)
        return await self._call_acquire(run_id, token, ttl)

    async def release(self, run_id: str) -> None:
        """Let other processes have the run. If that fails, the lease expires by itself."""
        held = self._held.pop(run_id, None)
        if held is not None:
            try:
                await await_reply(self._call_release(run_id, held.token))
            except PersistenceError:
                return

    async def _call_acquire(self, run_id: str, token: str, ttl: float) -> bool:
        trouble = f"run {run_id!r} could not be acquired"
        answer = await call_user_method(self._store.acquire, run_id, token, ttl, trouble=trouble)
        if not isinstance(answer, bool):
            raise PersistenceError(trouble, f"acquire gave {answer!r}, not True or False")
        return answer

    async def _call_release(self, run_id: str, token: str) -> None:
        await call_user_method(self._store.release, run_id, token, trouble=f"run {run_id!r} could not be released")


async def _nothing() -> None: ...
