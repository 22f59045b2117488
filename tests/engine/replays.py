"""What tests of replaying share: a body run twice, and a look into the memory store's rows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from perdure import Context, Ok, Suspended, Workflow
from perdure.backends.base.in_memory_run import InMemoryRun
from perdure.backends.memory.store import MemoryStore
from tests.engine.worlds import World, world

Body = Callable[[Context[Any]], Awaitable[Any]]


async def twice(body: Body, **options: Any) -> tuple[Any, Any]:
    """What `body` gives on the first run, and on a replay of everything that it recorded."""
    given: list[Any] = []

    async def flow(ctx: Context[Any]) -> None:
        given.append(await body(ctx))
        await ctx.sleep("until the replay", "1h")

    definition = Workflow("flow", flow)
    async with world(definition, **options) as here:
        suspended = await here.runtime.run(definition, id="run")
        assert isinstance(suspended, Suspended)
        outcomes = await here.later("1h")
        assert outcomes == {"run": Ok(None)}
    first, second = given
    return first, second


async def raised(call: Awaitable[Any]) -> Exception:
    """The exception that awaiting this raises."""
    try:
        value = await call
    except Exception as error:
        return error
    raise AssertionError(f"it gave {value!r} and raised nothing")


def stored(here: World, run_id: str = "run") -> InMemoryRun:
    """The rows of a run, to be tampered with."""
    store = here.runtime.store
    assert isinstance(store, MemoryStore)
    return store._database.namespaces[""].runs[run_id]


def spoil(here: World, key: str, payload: bytes, *, phase: str = "close") -> None:
    """Replace what is recorded under `key`."""
    entries = stored(here).entries
    seq = next(seq for seq, entry in entries.items() if entry.key == key and entry.phase == phase)
    entries[seq] = msgspec.structs.replace(entries[seq], payload=payload)
