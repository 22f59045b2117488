"""The generation of a run: part of the idempotency keys, kept by copies of the run, and 0 for nearly every run."""

from __future__ import annotations

from typing import Any

import msgspec

from perdure import Context, Err, Ok, Runtime, current_step, stores, workflow

ATTEMPTS: list[str] = []


@workflow
async def flow(ctx: Context, round_: int = 0) -> list[str]:
    key = await ctx.step("charge", lambda: current_step().idempotency_key)
    if round_ < 2:
        await ctx.continue_as(round_ + 1)
    if len(ATTEMPTS) < 1:
        ATTEMPTS.append(key)
        raise ValueError("not yet")
    return [key, ctx.idempotency_key("charge")]


async def test_idempotency_keys_have_the_generation_from_the_second_on() -> None:
    ATTEMPTS[:] = ["enough"]
    async with Runtime(store=stores.memory(), workflows=[flow]) as runtime:
        run = await runtime.start(flow, id="run")
        assert await run == ["run;generation=2/charge"] * 2


async def test_a_snapshot_has_the_generation_and_gives_it_back() -> None:
    ATTEMPTS.clear()
    here, there = stores.memory(), stores.memory()
    async with Runtime(store=here, workflows=[flow]) as runtime:
        run = await runtime.start(flow, id="run")
        assert isinstance(await run.outcome(), Err)
        snapshot = await run.snapshot()
    tree: dict[str, Any] = snapshot.to_dict()
    assert tree["metadata"]["perdure"]["generation"] == 2
    await there.save("run", snapshot)
    saved, original = await there.get("run"), await here.get("run")
    assert saved is not None
    assert original is not None
    columns = ("generation", "first_input_hash", "continued_at", "input_hash")
    assert [getattr(saved, name) for name in columns] == [getattr(original, name) for name in columns]
    keys = ["run;generation=2/charge"] * 2
    assert await flow.run(0, id="run", store=stores.memory(), snapshot=snapshot, retry_failed=True) == Ok(keys)
    assert msgspec.json.decode(msgspec.json.encode(tree)) == tree
