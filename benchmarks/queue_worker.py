"""A worker process: python -m benchmarks.queue_worker MODULE PLACE. It says that it is ready, begins when told to, and reports.

A thread reports what the stopwatch has counted, so that the work itself prints nothing.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import threading
import time
from typing import BinaryIO, Final

import msgspec

from benchmarks.queues import QueueProgram, stopwatch

_REPORT_EVERY: Final = 0.01


def main(module: str, place: str) -> None:
    """Serve until the process that started this one ends it, or has ended itself."""
    reports = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    program: QueueProgram = importlib.import_module(module).PROGRAM
    asyncio.run(_serve(program, place, reports))


async def _serve(program: QueueProgram, place: str, reports: BinaryIO) -> None:
    begin = asyncio.Event()
    loop = asyncio.get_running_loop()
    await program.open_worker(place)
    threading.Thread(target=_listen, args=(loop, begin), daemon=True).start()
    reports.write(b"ready\n")
    await begin.wait()
    threading.Thread(target=_report, args=(reports,), daemon=True).start()
    await program.work()


def _listen(loop: asyncio.AbstractEventLoop, begin: asyncio.Event) -> None:
    for _ in sys.stdin.buffer:
        loop.call_soon_threadsafe(begin.set)
    os._exit(0)


def _report(reports: BinaryIO) -> None:
    reported = 0
    while True:
        progress = stopwatch.progress
        if progress.count != reported:
            reported = progress.count
            reports.write(msgspec.json.encode(progress) + b"\n")
        time.sleep(_REPORT_EVERY)


if __name__ == "__main__":
    main(*sys.argv[1:3])
