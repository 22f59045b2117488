"""Children: three of them, of which each has an effect; a parent whose child fails, and a parent that is cancelled."""

from __future__ import annotations

from typing import Any, Final

from perdure import Context, Run, Runtime, workflow
from perdure.errors import RunCancelled
from tests.backends.patterns import EffectLedger, effect, wait_for_run

# Its child may be cancelled before or after it has begun.
OPTIONAL: Final = frozenset({"begin"})


async def pack(item: str) -> str:
    effect(f"pack {item}")
    return f"{item} is packed"


async def refuse() -> None:
    effect()
    raise PermissionError("no")


async def begin() -> None:
    effect()


@workflow
async def packing(ctx: Context, item: str) -> str:
    if item == "poison":
        await ctx.step(refuse)
    return await ctx.step(pack, item)


@workflow
async def waiting(ctx: Context) -> None:
    await ctx.step(begin)
    await ctx.wait_for_signal("never")


@workflow
async def fan_out(ctx: Context) -> list[Any]:
    packed: list[Any] = await ctx.map(packing, ["a", "b", "c"])
    first = ctx.start_child(packing, "first", key="first")
    packed.append(await ctx.race(ctx.child(waiting), ctx.child(packing, "d", key="d")))
    ctx.start_child(packing, "last", key="last")
    return [*packed, await first]


@workflow
async def fails(ctx: Context) -> str:
    ctx.start_child(waiting)
    await ctx.child(packing, "early", key="early")  # by then the other child was created, whatever was killed
    await ctx.child(packing, "poison", key="poison")
    return "never"


@workflow
async def holds(ctx: Context) -> None:
    ctx.start_child(waiting, key="other")
    await ctx.child(waiting)


WORKFLOWS: Final = [packing, waiting, fan_out, fails, holds]


async def start(runtime: Runtime, ledger: EffectLedger) -> list[Run[Any]]:
    return [
        await runtime.start(fan_out, id="fan-out"),
        await runtime.start(fails, id="fails"),
        await runtime.start(holds, id="holds"),
    ]


async def meanwhile(runtime: Runtime) -> None:
    for run_id in ("holds", "holds/waiting", "holds/other"):
        await wait_for_run(runtime, run_id)
    await runtime.cancel("holds")


async def check(runtime: Runtime, ledger: EffectLedger) -> None:
    fan_out_run, failed, held = [await wait_for_run(runtime, run_id) for run_id in ("fan-out", "fails", "holds")]
    assert await fan_out_run == [
        "a is packed", "b is packed", "c is packed", "d is packed", "first is packed",
    ]  # fmt: skip
    for run, error in ((failed, PermissionError), (held, RunCancelled)):
        outcome = await run.outcome()
        assert isinstance(getattr(outcome, "error", None), error), outcome
    statuses = {info.id: info.status for info in await runtime.list(limit=50)}
    packed = [f"fan-out/{key}" for key in ("packing[0]", "packing[1]", "packing[2]", "first", "d", "last")] + ["fails/early"]
    stopped = ["fan-out/waiting", "fails/waiting", "holds", "holds/waiting", "holds/other"]
    assert statuses == {
        "fan-out": "completed", "fails": "failed", "fails/poison": "failed",
        **dict.fromkeys(packed, "completed"), **dict.fromkeys(stopped, "cancelled"),
    }  # fmt: skip
