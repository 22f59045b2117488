"""A nightly import: one run for each file, started together, with a deadline and progress; each reports to a run of the night.

Run it twice: the ids make the second start find the runs of the first, and nothing is imported again. It prints:

    night-1/berlin.csv 40 {'row': 40, 'of': 40}
    night-1/paris.csv 25 {'row': 25, 'of': 25}
    night-1/rome.csv 35 {'row': 35, 'of': 35}
    rows in all: 100
"""

import asyncio
import sys
import time

from perdure import Context, Runtime, current_step, workflow

FILES = {"berlin.csv": 40, "paris.csv": 25, "rome.csv": 35}


@workflow
async def import_file(ctx: Context, night: str, name: str) -> int:
    def import_rows() -> int:  # a plain function: it runs in a thread
        for row in range(FILES[name]):
            if current_step().is_cancelled:  # the deadline has passed, and the result would be discarded
                break
            ctx.set_progress({"row": row + 1, "of": FILES[name]})
            time.sleep(0.001)
        return FILES[name]

    rows = await ctx.step(import_rows)
    await ctx.step("tell", tell_night, night, name, rows)
    return rows


async def tell_night(night: str, name: str, rows: int) -> None:
    """The first file that is done starts the run of the night. `dedupe` makes repeating this step harmless."""
    await runtime.signal_with_start(sum_up, len(FILES), id=night, signal="file done", payload=rows, dedupe=name)


@workflow
async def sum_up(ctx: Context, expected: int) -> int:
    return sum([await ctx.wait_for_signal("file done", key=f"file {n}") for n in range(expected)])


async def main() -> None:
    async with runtime:
        inputs = [("night-1", name) for name in FILES]
        runs = await runtime.start_many(import_file, inputs, ids=lambda night, name: f"{night}/{name}", deadline="1h")
        for run in runs:
            print(run.id, await run, await run.progress())
        night = await runtime.get("night-1")
        print("rows in all:", night and await night)


runtime = Runtime(sys.argv[1] if len(sys.argv) > 1 else "sqlite:///orders.db", [import_file, sum_up])

if __name__ == "__main__":
    asyncio.run(main())
