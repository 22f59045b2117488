"""A process that migrates: `python child.py SOURCE TARGET BATCH [DIES_AT]`.

It says `begun`, and at the end how many were copied, there and left out; with `DIES_AT` it is killed once so many were sent off.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

from perdure import migrate_store, open_store


async def main(source: str, target_dsn: str, batch: str, dies_at: str = "0") -> None:
    target = open_store(target_dsn)
    restore, left = target.restore, iter(range(int(dies_at), -1, -1))

    async def deadly(*args: Any, **options: Any) -> None:
        if next(left, None) == 1:
            asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGKILL)
        await restore(*args, **options)

    target.restore = deadly  # type: ignore[method-assign]
    print("begun", flush=True)
    done = await migrate_store(source, target, batch=int(batch))
    print(done.copied, done.already_there, len(done.skipped), flush=True)
    await target.close()


asyncio.run(main(*sys.argv[1:]))
