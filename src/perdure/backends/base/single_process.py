"""A store that only one process may use: it keeps the name of its process, and refuses a second one while that lives."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from perdure.aio.threads import run_in_thread
from perdure.errors import StoreCapabilityError
from perdure.model.process_owner import UNKNOWN, Owner, Owners, label_of


async def refuse_second_process(
    store: str, lacks: str, read: Callable[[], Awaitable[str]], write: Callable[[str], Awaitable[None]]
) -> None:
    """Write the name of this process where the last one wrote its own, which `read` gives; "" if there is none.

    Raises `StoreCapabilityError` if that is another process of this machine that has not ended: without `lacks` nothing fences
    one of them off, so both would drive the same runs. A process elsewhere cannot be looked up.
    """
    owners = Owners()
    here = await run_in_thread(lambda: owners.here)
    other = await read()
    if other not in ("", here) and await run_in_thread(_is_alive_here, owners, other):
        raise StoreCapabilityError(store, f"way to serve two processes without {lacks}, and {label_of(other)} has it open")
    await write(here)


def _is_alive_here(owners: Owners, text: str) -> bool:
    """Whether this surely is a process of this machine that has not ended."""
    owner, here = Owner.parse(text), Owner.parse(owners.here)
    if owner is None or here is None or UNKNOWN in (owner.boot, owner.start, owner.namespaces):
        return False
    return owner[:3] == here[:3] and not owners.has_ended(text)
