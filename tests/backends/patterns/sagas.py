"""Sagas: a trip that fails at its last booking, and one that is cancelled while it waits."""

from __future__ import annotations

from typing import Any, Final

from perdure import Context, Run, Runtime, workflow
from tests.backends.patterns import EffectLedger, effect, wait_for_run, wait_until

FAILED, CANCELLED = "failed", "cancelled"


async def book(what: str) -> str:
    effect()
    return f"number of the {what}"


async def undo_hotel(number: str | None) -> None:
    assert number in (None, "number of the hotel")
    effect()


def undo_flight(number: str | None) -> None:
    assert number in (None, "number of the flight")
    effect()


async def refuse() -> None:
    raise ValueError("sold out")


@workflow
async def trip(ctx: Context, fails: bool) -> str:
    await ctx.step("flight", book, "flight", compensate=undo_flight)
    await ctx.step("hotel", book, "hotel", compensate=undo_hotel)
    try:
        if fails:
            await ctx.step(refuse)
        await ctx.wait_for_signal("paid")
    finally:
        await ctx.step("note", book, "note")
    return "booked"


WORKFLOWS: Final = [trip]


async def start(runtime: Runtime, ledger: EffectLedger) -> list[Run[Any]]:
    return [await runtime.start(trip, True, id=FAILED), await runtime.start(trip, False, id=CANCELLED)]


async def meanwhile(runtime: Runtime) -> None:
    async def is_waiting() -> bool:
        run = await wait_for_run(runtime, CANCELLED)
        return (await run.status()) == "suspended"

    await wait_until(runtime, is_waiting)
    await runtime.cancel(CANCELLED)


async def check(runtime: Runtime, ledger: EffectLedger) -> None:
    for run_id, status in ((FAILED, "failed"), (CANCELLED, "cancelled")):
        run = await wait_for_run(runtime, run_id)
        assert await run.status() == status
        effects = [line.key for line in ledger.lines() if line.kind == "effect" and line.run == run_id]
        last = {key: at for at, key in enumerate(effects)}
        # Everything that was done was undone after it, the last first; what was in flight at a kill may be there twice.
        assert sorted(last, key=lambda key: last[key]) == ["flight", "hotel", "note", "%compensate/hotel", "%compensate/flight"]
