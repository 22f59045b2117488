"""The generation of a run: part of the idempotency keys, kept by copies of the run, and 0 for nearly every run."""

from __future__ import annotations

from typing import Any

import msgspec

from perdure import Context, Ok, Runtime, current_step, stores, workflow
from perdure.stepspec import StepInfo

ATTEMPTS: list[str] = []


@workflow
async def flow(ctx: Context) -> list[str]:
    key = await ctx.step("charge", lambda: current_step().idempotency_key)
    if len(ATTEMPTS) < 2:
        ATTEMPTS.append(key)
        raise ValueError("not yet")
    return [key, ctx.idempotency_key("charge")]


async def test_idempotency_keys_have_the_generation_from_the_second_on() -> None:
    ATTEMPTS.clear()
    store = stores.memory()
    async with Runtime(store=store, workflows=[flow], concurrency=0) as runtime:
        for generation in range(2):
            await runtime.run(flow, id="run")
            await store.reopen("run", ["charge"], new_generation=True)
            row = await store.get("run")
            assert row is not None
            assert row.generation == generation + 1
        last = "run/charge;generation=2"
        assert await runtime.resume("run") == Ok([last, last])
    assert ATTEMPTS == ["run/charge", "run/charge;generation=1"]


def test_generation_zero_changes_no_key() -> None:
    assert StepInfo("run", "key", 2, "old").idempotency_key == "run/old"
    assert StepInfo("run", "key", 2, "old", generation=3).idempotency_key == "run/old;generation=3"


async def test_a_snapshot_has_the_generation_and_gives_it_back() -> None:
    ATTEMPTS.clear()
    here, there = stores.memory(), stores.memory()
    async with Runtime(store=here, workflows=[flow], concurrency=0) as runtime:
        await runtime.run(flow, id="run")
        await here.reopen("run", ["charge"], new_generation=True)
        run = await runtime.get("run")
        assert run is not None
        snapshot = await run.snapshot()
    tree: dict[str, Any] = snapshot.to_dict()
    assert tree["metadata"]["perdure"]["generation"] == 1
    await there.save("run", snapshot)
    saved, original = await there.get("run"), await here.get("run")
    assert saved is not None
    assert original is not None
    columns = ("generation", "first_input_hash", "continued_at", "input_hash")
    assert [getattr(saved, name) for name in columns] == [getattr(original, name) for name in columns]
    ATTEMPTS.append("enough")
    keys = ["run/charge;generation=1"] * 2
    assert await flow.run(id="run", store=stores.memory(), snapshot=snapshot) == Ok(keys)
    assert msgspec.json.decode(msgspec.json.encode(tree)) == tree
