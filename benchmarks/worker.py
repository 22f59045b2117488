"""A contender's process: reads orders from its standard input, one line each, and answers each with a sample.

Answers have the standard output to themselves. Whatever a library prints goes to standard error instead.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import queue
import sys
import threading
import time
import traceback

import msgspec

from benchmarks.meters import meter_for
from benchmarks.program import Program
from benchmarks.work import Answer, Failure, Order, Sample


def main(module: str) -> None:
    """Serve orders with the `Program` of a module until there are no more."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    orders: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    program: Program = importlib.import_module(module).PROGRAM
    while True:
        order = msgspec.json.decode(orders.get(), type=Order)
        answers.write(msgspec.json.encode(_answer(program, order)) + b"\n")


def _listen(orders: queue.SimpleQueue[bytes]) -> None:
    """Take orders until there are no more, and then end the process, also in the middle of work, which has no reader any more."""
    for line in sys.stdin.buffer:
        orders.put(line)
    os._exit(0)


def _answer(program: Program, order: Order) -> Answer:
    try:
        return asyncio.run(_sample(program, order))
    except Exception as problem:  # noqa: BLE001 - whatever it is, the table says it, and the others go on
        traceback.print_exc()
        return Failure("".join(traceback.format_exception_only(problem)).strip())


async def _sample(program: Program, order: Order) -> Sample:
    await program.open(order.place)
    try:
        await program.prepare(order.work)
        return await (_counted(program, order) if order.counted else _timed(program, order))
    finally:
        await program.close()


async def _timed(program: Program, order: Order) -> Sample:
    gc.collect()
    cpu_before, before = time.process_time(), time.perf_counter()
    measured = await program.perform(order.work)
    seconds, cpu_seconds = time.perf_counter() - before, time.process_time() - cpu_before
    if measured is not None:
        return Sample(order.work.operations, measured.seconds, 0.0, resident_bytes=measured.resident_bytes)
    return Sample(order.work.operations, seconds, cpu_seconds)


async def _counted(program: Program, order: Order) -> Sample:
    meter = meter_for(order.place)
    await meter.start()
    await program.perform(order.work)
    return Sample(order.work.operations, 0.0, 0.0, *await meter.stop())


if __name__ == "__main__":
    main(sys.argv[1])
