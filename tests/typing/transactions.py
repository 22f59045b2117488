"""What `ctx.transaction` infers: the result of the function, whose first parameter is the transaction."""

from __future__ import annotations

from typing import Any, assert_type

from perdure import Context, Err, Ok, Retry, Run, Runtime, StepTransaction, workflow


async def transfer(transaction: StepTransaction, source: str, cents: int) -> int:
    assert_type(transaction.connection, Any)
    rows = await transaction.execute("SELECT 1", (source, cents))
    assert_type(rows, list[tuple[Any, ...]])
    return cents


def plain(transaction: StepTransaction) -> str:
    return str(transaction.connection)


async def result(transaction: StepTransaction) -> Ok[int] | Err[str]:
    return Ok(1)


async def body(ctx: Context) -> None:
    assert_type(await ctx.transaction(transfer, "ada", 30), int)
    assert_type(await ctx.transaction("move", transfer, "ada", 30, key="k", retry=Retry(attempts=2), timeout="1s"), int)
    assert_type(await ctx.transaction(plain), str)
    assert_type(await ctx.transaction(result, returns=int), int)


@workflow
async def flow(ctx: Context, order: int) -> str:
    return str(order)


async def start(runtime: Runtime, connection: object) -> None:
    assert_type(await runtime.start(flow, 1, connection=connection, id="run"), Run[str])
    await runtime.signal("run", "go", 1, connection=connection)
    runtime.sync.start(flow, 1, connection=connection)
