"""Workers as processes of their own: one is stopped with SIGTERM in the middle, one is killed, and every run ends once.

    python examples/worker_process.py

`python examples/worker_process.py worker STORE` is the worker. `perdure worker worker_process:runtime` would be the same.
It prints:

    stopped a worker: exit code 0
    killed a worker
    20 runs completed, 20 parcels sent
"""

import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from perdure import Context, Runtime, current_step, workflow


def pack(order: int) -> str:
    time.sleep(0.05)
    return f"parcel-{order}"


def send(parcel: str, outbox: str) -> None:
    # A step may be called again after a crash. The idempotency key makes the second call harmless: the same file.
    (Path(outbox) / current_step().idempotency_key.replace("/", "-")).write_text(parcel)


@workflow
async def ship(ctx: Context, order: int, outbox: str) -> str:
    parcel = await ctx.step(pack, order)
    await ctx.sleep("collection", "200ms")
    await ctx.step(send, parcel, outbox)
    return parcel


def start_worker(store: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, __file__, "worker", store])  # noqa: S603 - this program


async def wait_for_completed(client: Runtime, count: int) -> None:
    while len(await client.list(status="completed")) < count:  # noqa: ASYNC110 - other processes complete them
        await asyncio.sleep(0.05)


async def main(folder: Path) -> None:
    store, outbox = f"sqlite:///{folder / 'shop.db'}", folder / "outbox"
    outbox.mkdir()
    async with Runtime(store, [ship], concurrency=0) as client:  # drives nothing
        for order in range(20):
            await client.start(ship, order, str(outbox), id=f"order-{order}")
        first = start_worker(store)
        await wait_for_completed(client, 3)
        first.send_signal(signal.SIGTERM)  # it lets running steps end, and gives its runs back
        print("stopped a worker: exit code", await asyncio.to_thread(first.wait))
        second = start_worker(store)
        await wait_for_completed(client, 5)
        second.kill()
        await asyncio.to_thread(second.wait)
        print("killed a worker")
        third = start_worker(store)
        await wait_for_completed(client, 20)
        third.terminate()
        await asyncio.to_thread(third.wait)
    print(f"20 runs completed, {len(list(outbox.iterdir()))} parcels sent")


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        asyncio.run(Runtime(sys.argv[2], [ship], concurrency=4).work())
    else:
        with tempfile.TemporaryDirectory() as directory:
            asyncio.run(main(Path(directory)))
