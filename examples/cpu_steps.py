"""Heavy steps in a pool of processes: renders the rows of a Mandelbrot picture, loses a process on the way, and goes on.

    python examples/cpu_steps.py

The first attempt at row 6 kills its process. The pool is broken then; `RestartingExecutor` makes a new one, and `retry=` has the
steps that were in it called again. Rows that are recorded are not computed again, here or after a restart of the program.
"""

import asyncio
import multiprocessing
import os
import signal
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from perdure import Context, RestartingExecutor, Retry, Runtime, current_step, step, workflow

WIDTH, HEIGHT, DEPTH = 60, 12, 300


@step(executor="cpu", retry=Retry(attempts=5, wait_initial="10ms", wait_jitter="10ms"))
def render_row(row: int) -> str:
    """One row of the picture. It runs in a process of the pool, and knows its step there too."""
    if row == HEIGHT // 2 and current_step().attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
    y = 2.4 * row / (HEIGHT - 1) - 1.2
    return "".join("#" if is_inside(complex(2.8 * x / (WIDTH - 1) - 2, y)) else "." for x in range(WIDTH))


def is_inside(c: complex) -> bool:
    z = 0j
    for _ in range(DEPTH):
        z = z * z + c
        if abs(z) > 2:
            return False
    return True


@workflow
async def picture(ctx: Context) -> list[str]:
    return await ctx.map(render_row, range(HEIGHT), concurrency=2)


def make_pool() -> ProcessPoolExecutor:
    # Children leave Ctrl-C to the worker, which drains.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(2, context, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN))


async def main(store: str, pool: RestartingExecutor) -> None:
    async with Runtime(store, [picture], executors={"cpu": pool}) as runtime:
        run = await runtime.start(picture, id="mandelbrot")
        print("\n".join(await run))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, RestartingExecutor(make_pool) as pool:
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else f"sqlite:///{Path(folder) / 'pictures.db'}", pool))
