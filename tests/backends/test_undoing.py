"""What was done is undone under its own key on every store: retries, forks, cancels that undo nothing, children, snapshots."""

from __future__ import annotations

from typing import Any

import msgspec

from perdure import Context, Err, Ok, Runtime, Suspended, current_step, workflow
from perdure.codec.outcomes import store_exception
from perdure.errors import RunCancelled
from perdure.model.journal import CancelRequest
from perdure.model.own_names import CANCEL_WITHOUT_UNDO
from tests.backends.opening import store_at
from tests.backends.registry import Backend

CALLS: list[str] = []
# What the code does now.
FAILS: list[bool] = []


async def charge(cents: int) -> int:
    CALLS.append(f"charge {current_step().idempotency_key}")
    return cents


async def refund(cents: int | None) -> None:
    CALLS.append(f"refund {current_step().undoes}")


async def fail() -> None:
    raise ValueError("no money")


@workflow
async def pay(ctx: Context) -> int:
    return await ctx.step(charge, 5)


@workflow
async def order(ctx: Context) -> str:
    await ctx.step(charge, 5, compensate=refund)
    await ctx.child(pay, compensate=refund)
    await ctx.wait_for_signal("go")
    if FAILS:
        await ctx.step(fail)
    return await ctx.step("last", lambda: "paid")


async def drive(runtime: Runtime, run_id: str) -> Any:
    """The outcome of the run once nothing is due any more."""
    outcome: Any = None
    while swept := await runtime.sweep():
        outcome = swept.get(run_id, outcome)
    return outcome


async def test_retries_forks_and_cancels_undo_under_the_right_keys(backend: Backend, shared_dsn: str) -> None:
    CALLS.clear()
    FAILS[:] = [True]
    async with store_at(shared_dsn) as store:
        runtime = Runtime(store, [order, pay], concurrency=0, unload_grace=0)
        await runtime.start(order, id="r")
        await drive(runtime, "r")
        await runtime.signal("r", "go")
        assert isinstance(await drive(runtime, "r"), Err)
        assert CALLS == ["charge r/charge", "charge r%2Fpay/charge", "refund r/pay", "refund r/charge"]
        FAILS.clear()
        await runtime.retry("r")
        assert await drive(runtime, "r") == Ok("paid")
        assert CALLS[4:] == ["charge r/charge~1", "charge r%2Fpay%7E1/charge"]
        # A fork undoes neither what the run has done nor its child, unless it takes them over.
        FAILS[:] = [True]
        await runtime.fork("r", from_step="last", id="f")
        assert isinstance(await drive(runtime, "f"), Err)
        assert len(CALLS) == 6
        await runtime.fork("r", from_step="last", id="t", take_over=True)
        assert isinstance(await drive(runtime, "t"), Err)
        assert CALLS[6:] == ["refund r/pay~1", "refund r/charge~1"]
        snapshot = await store.load("r")
        assert snapshot is not None
        assert snapshot.to_dict()["metadata"]["perdure"]["undone"] == {"charge": 1, "pay": 1}
        await runtime.close()


async def test_a_cancel_that_undoes_nothing_is_void_after_a_retry(backend: Backend, shared_dsn: str) -> None:
    CALLS.clear()
    FAILS.clear()
    async with store_at(shared_dsn) as store:
        runtime = Runtime(store, [order, pay], concurrency=0, unload_grace=0)
        await runtime.start(order, id="c")
        await drive(runtime, "c")
        await runtime.cancel("c", undo=False)
        outcome = await drive(runtime, "c")
        assert isinstance(outcome, Err)
        assert isinstance(outcome.error, RunCancelled)
        assert outcome.error.not_undone == ["charge", "pay"]
        run = await runtime.get("c")
        assert run is not None
        again = await run.outcome()
        assert isinstance(again, Err)
        assert again.error.args == outcome.error.args
        assert await store.inbox("c") == []
        await runtime.retry("c")
        assert isinstance(await drive(runtime, "c"), Suspended)
        await runtime.cancel("c")
        assert isinstance(await drive(runtime, "c"), Err)
        assert CALLS == ["charge c/charge", "charge c%2Fpay/charge", "refund c/pay", "refund c/charge"]
        await runtime.close()


async def test_a_retry_of_a_run_that_ended_before_it_saw_the_request_does_not_cancel_it(
    backend: Backend, shared_dsn: str
) -> None:
    CALLS.clear()
    FAILS[:] = [True]
    async with store_at(shared_dsn) as store:
        runtime = Runtime(store, [order, pay], concurrency=0, unload_grace=0)
        await runtime.start(order, id="v")
        await drive(runtime, "v")
        await runtime.signal("v", "go")
        claim = await store.acquire("v", 60.0)
        assert claim is not None
        # The process that asked died before it requested the cancellation, and the run failed before it looked into its inbox.
        await store.signal("v", CANCEL_WITHOUT_UNDO, msgspec.json.encode(CancelRequest(claim.run.epoch)))
        await store.finish(claim.lease, "failed", store_exception(ValueError("for another reason")))
        await runtime.retry("v")
        outcome = await drive(runtime, "v")
        assert isinstance(outcome, Err)
        assert not isinstance(outcome.error, RunCancelled)
        assert CALLS[2:] == ["refund v/pay", "refund v/charge"]
        await runtime.close()
