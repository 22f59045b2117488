"""Stores that only one process may use: they keep the name of the process that has them open, and refuse a second one.

Without compare-and-swap or transactions nothing fences a second process off, so both would drive the same runs. That there is one
is certain only of processes on this machine; that there is none elsewhere is the user's responsibility.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from perdure.backends.base.process_owner import Owner, Owners
from perdure.errors import StoreCapabilityError


async def refuse_second_process(
    store: str, lacks: str, read: Callable[[], Awaitable[str]], write: Callable[[str], Awaitable[None]]
) -> None:
    """Write the name of this process where the last one wrote its own, which `read` gives; "" if there is none.

    Raises `StoreCapabilityError` if that is another process of this machine that has not ended. `lacks` is what the store would
    need to serve both.
    """
    owners = Owners()
    here = await asyncio.to_thread(lambda: owners.here)
    other = await read()
    if other not in ("", here) and await asyncio.to_thread(_is_alive_here, owners, other):
        known = Owner.parse(other)
        who = other if known is None else known.label
        raise StoreCapabilityError(store, f"way to serve two processes without {lacks}, and {who} has it open")
    await write(here)


def _is_alive_here(owners: Owners, text: str) -> bool:
    """Whether this surely is a process of this machine that has not ended."""
    owner, here = Owner.parse(text), Owner.parse(owners.here)
    if owner is None or here is None or "-" in (owner.boot, owner.start, owner.namespaces):
        return False
    return owner[:3] == here[:3] and not owners.gone(text)
