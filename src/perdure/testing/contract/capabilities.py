"""Capabilities: what a store announces it does, and what it does not announce it refuses.

The tables have every verb, by the part of the contract it belongs to; `tests/contract` checks that none is missing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, Literal, TypeAlias

from perdure.model.records import Lease, QueueLimits
from perdure.store import FullStore, Store
from perdure.testing.contract.cases import promise, promise_without
from perdure.testing.contract.world import (
    EXPIRED,
    ITEM,
    NOW,
    SCHEDULE,
    TTL,
    FullWorld,
    World,
    entry,
    equal,
    new_input,
    new_run,
    refused_part,
    run_row,
)

Part: TypeAlias = Literal["operators", "schedules", "streams"]

SNAPSHOT: Final = {"formatVersion": 1, "steps": {}, "execution": {"status": "running", "lastUpdated": "2030-01-01T00:00:00Z"}}

# Every verb of the core but `close`, which may be repeated.
CORE_VERBS: Final[dict[str, Callable[[Store, Lease], Awaitable[Any]]]] = {
    "setup": lambda store, _: store.setup(),
    "create": lambda store, _: store.create(new_run("other"), now=NOW),
    "claim": lambda store, _: store.claim(1, TTL, [("flow", 1)], now=NOW),
    "acquire": lambda store, _: store.acquire("run", TTL, now=EXPIRED),
    "renew": lambda store, lease: store.renew([lease], TTL, now=NOW),
    "release": lambda store, lease: store.release(lease, now=NOW),
    "record": lambda store, lease: store.record(lease, [entry(1)], now=NOW),
    "suspend": lambda store, lease: store.suspend(lease, wake_at=None, now=NOW),
    "finish": lambda store, lease: store.finish(lease, "completed", b"1", now=NOW),
    "continue_as": lambda store, lease: store.continue_as(lease, new_input(), now=NOW),
    "reopen": lambda store, _: store.reopen("run", [], now=NOW),
    "signal": lambda store, _: store.signal("run", "go", b"1", now=NOW),
    "cancel": lambda store, _: store.cancel("run", now=NOW),
    "get": lambda store, _: store.get("run"),
    "journal": lambda store, _: store.journal("run"),
    "inbox": lambda store, _: store.inbox("run"),
    "list": lambda store, _: store.list(),
    "watch": lambda store, _: store.watch(0.01),
}
# And every coroutine of a part.
PART_VERBS: Final[dict[Part, dict[str, Callable[[FullStore, Lease], Awaitable[Any]]]]] = {
    "operators": {
        "hold": lambda store, _: store.hold("run"),
        "unhold": lambda store, _: store.unhold("run"),
        "delete": lambda store, _: store.delete("run"),
        "purge": lambda store, _: store.purge(0, now=NOW),
        "count": lambda store, _: store.count(),
        "due": lambda store, _: store.due(now=NOW),
        "put_worker": lambda store, _: store.put_worker("worker", b"{}", now=NOW),
        "workers": lambda store, _: store.workers(),
        "drop_worker": lambda store, _: store.drop_worker("worker"),
        "restore": lambda store, _: store.restore(run_row("other"), [entry(1)], now=NOW),
        "save": lambda store, _: store.save("other", SNAPSHOT),
        "load": lambda store, _: store.load("run"),
    },
    "schedules": {
        "put_schedule": lambda store, _: store.put_schedule(SCHEDULE),
        "schedules": lambda store, _: store.schedules(),
        "drop_schedule": lambda store, _: store.drop_schedule("daily"),
        "fire": lambda store, _: store.fire("daily", expected_at=NOW, next_at=None, run=new_run("fired"), now=NOW),
        "limit_queue": lambda store, _: store.limit_queue("default", QueueLimits()),
        "queue_limits": lambda store, _: store.queue_limits(),
    },
    "streams": {
        "record": lambda store, lease: store.record(lease, items=[ITEM], now=NOW),
        "items": lambda store, _: store.items("run", "log"),
        "report": lambda store, lease: store.report(lease, b"1"),
    },
}


@promise
async def a_store_declares_what_its_factory_declares(world: World) -> None:
    """A store's `capabilities` are the ones it is tested for."""
    equal(world.a.capabilities, world.factory.capabilities, "store.capabilities")


async def _refuses(world: FullWorld, part: Part) -> None:
    lease = await world.lease()
    before = await world.dump("run")
    for name, verb in PART_VERBS[part].items():
        if hasattr(world.a, name):
            # A core store's `record` has no parameter `items`.
            with suppress(*([TypeError] if name == "record" else [])), refused_part(part, f"{name}()"):
                await verb(world.a, lease)
    equal(await world.dump("run"), before, "everything of the run")


@promise_without("operators")
async def a_store_without_operator_verbs_refuses_them(world: FullWorld) -> None:
    """A store without `operators` has no verbs for them, or raises `StoreCapabilityError`."""
    await _refuses(world, "operators")


@promise_without("schedules")
async def a_store_without_schedules_refuses_them(world: FullWorld) -> None:
    """A store without `schedules` has no verbs for schedules and queue limits, or raises `StoreCapabilityError`."""
    await _refuses(world, "schedules")


@promise_without("streams")
async def a_store_without_streams_refuses_them(world: FullWorld) -> None:
    """A store without `streams` has no `items` and `report` or refuses them, and its `record` takes no items."""
    await _refuses(world, "streams")
