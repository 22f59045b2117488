"""A report every morning in Berlin, and a heartbeat every second. Schedules are in the store, and any worker starts their runs.

    python examples/schedule.py

Putting a schedule again when the program starts changes nothing if it is the same. It prints:

    morning-report: 0 7 * * 1-5 Europe/Berlin
    heartbeat: every 0:00:01
    beat 1
    beat 2
    report for Berlin
"""

import asyncio
import tempfile
from pathlib import Path

from perdure import Context, Runtime, workflow

beats = asyncio.Queue[int]()


@workflow
async def heartbeat(ctx: Context) -> None:
    if ctx.scheduled_at:
        beats.put_nowait(1)


@workflow(name="morning-report")
async def report(ctx: Context, city: str) -> str:
    # ctx.scheduled_at is the instant that this run is for, also when it started late.
    return f"report for {city}" if ctx.scheduled_at else "no report"


async def main(store: str) -> None:
    async with Runtime(store, [report, heartbeat]) as runtime:
        await runtime.schedule(report, "Berlin", cron="0 7 * * 1-5", tz="Europe/Berlin")
        await runtime.schedule(heartbeat, every="1s", overlap="skip", catch_up="none")
        for schedule in sorted(await runtime.schedules(), key=lambda schedule: schedule.id, reverse=True):
            print(f"{schedule.id}:", f"{schedule.cron} {schedule.tz}" if schedule.cron else f"every {schedule.every}")
        for number in (1, 2):
            await beats.get()
            print("beat", number)
        await runtime.drop_schedule("heartbeat")
        print(await (await runtime.run_schedule("morning-report")))  # now, without waiting for the morning


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(f"sqlite:///{Path(folder) / 'app.db'}"))
