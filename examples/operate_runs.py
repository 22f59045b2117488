"""A bad morning, and how it is put right: runs that failed are retried, one is repeated from a step, what is over is deleted.

    python examples/operate_runs.py

The carrier is down while twelve orders come in, so their runs fail at `ship`. When it is back, `retry_many` lets them go on, and
no order is charged again. Order 7 was sent to a wrong address: `fork` starts a run that has everything up to `ship`, and ships
once more. Ended runs would be deleted after 30 days by `retention=`; here `delete_many` does it at once. It prints:

    12 failed
    retried 5 of 12
    retried 10 of 12
    retried 12 of 12
    12 retried, 0 refused; 12 charged, 12 shipped
    receipt 7, parcel 7
    12 charged, 13 shipped under keys of their own
    13 deleted, 0 left
"""

import asyncio
import logging
import tempfile
from pathlib import Path

from perdure import Context, Runtime, current_step, workflow

logging.getLogger("perdure").setLevel(logging.ERROR)  # it warns of each run that fails

carrier = {"is_down": True}
charged: list[str] = []
shipped: list[str] = []


def charge(order: int) -> str:
    charged.append(current_step().idempotency_key)
    return f"receipt {order}"


def ship(order: int) -> str:
    if carrier["is_down"]:
        raise ConnectionError("the carrier does not answer")
    shipped.append(current_step().idempotency_key)
    return f"parcel {order}"


@workflow(retention={"failed": "90d"})
async def checkout(ctx: Context, order: int) -> str:
    receipt = await ctx.step(charge, order)
    return f"{receipt}, {await ctx.step(ship, order)}"


async def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        dsn = f"sqlite:///{Path(directory, 'shop.db')}"
        async with Runtime(dsn, [checkout], retention="30d") as runtime:
            runs = [await runtime.start(checkout, n, id=f"order-{n}", metadata={"day": "monday"}) for n in range(12)]
            await asyncio.gather(*(run.outcome() for run in runs))
            print(await runtime.count(status="failed"), "failed")

            carrier["is_down"] = False
            report = await runtime.retry_many(
                workflow=checkout, status="failed", batch=5, on_progress=lambda done, total: print(f"retried {done} of {total}")
            )
            await asyncio.gather(*(run.outcome() for run in runs))
            print(report.done, "retried,", report.refused, "refused;", len(charged), "charged,", len(shipped), "shipped")

            again = await runtime.fork("order-7", from_step="ship", id="order-7-again")
            print(await again)
            print(len(charged), "charged,", len(set(shipped)), "shipped under keys of their own")

            deleted = await runtime.delete_many(metadata={"day": "monday"})
            print(deleted.done, "deleted,", await runtime.count(), "left")


if __name__ == "__main__":
    asyncio.run(main())
