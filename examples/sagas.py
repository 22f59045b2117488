"""A saga: a trip fails at its last booking, is undone in reverse order, and is booked again by a retry.

    python examples/sagas.py

What was undone has a new idempotency key in the retry: a provider does not answer with a booking that was cancelled. It prints:

    book flight (trip-1/book-flight)
    book hotel (trip-1/book-hotel)
    no car is free
    cancel hotel
    cancel flight
    failed: LookupError: no car is free
    book flight (trip-1/book-flight~1)
    book hotel (trip-1/book-hotel~1)
    book car (trip-1/book-car)
    completed: flight, hotel and car
"""

import asyncio
import tempfile
from pathlib import Path

from perdure import Context, Err, Runtime, current_step, workflow

free = {"flight", "hotel"}


async def book(what: str) -> str:
    if what not in free:
        print(f"no {what} is free")
        raise LookupError(f"no {what} is free")
    print(f"book {what} ({current_step().idempotency_key})")
    return what


async def cancel(booked: str | None) -> None:
    # None: the process died while the step ran. A real provider is asked by the step's idempotency key then.
    print(f"cancel {booked}")


@workflow
async def trip(ctx: Context) -> str:
    flight = await ctx.step("book-flight", book, "flight", compensate=cancel)
    hotel = await ctx.step("book-hotel", book, "hotel", compensate=cancel)
    car = await ctx.step("book-car", book, "car", compensate=cancel)
    return f"{flight}, {hotel} and {car}"


async def main(store: str) -> None:
    runtime = Runtime(store, [trip])  # not entered: it drives only what it is asked to
    match await runtime.run(trip, id="trip-1"):
        case Err(error):
            print(f"failed: {type(error).__name__}: {error}")
    free.add("car")
    await runtime.retry("trip-1")
    print("completed:", (await runtime.resume("trip-1")).unwrap())
    await runtime.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(main(f"sqlite:///{Path(directory) / 'trips.db'}"))
