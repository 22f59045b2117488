"""A store that wakes its runs by itself: each save sets a timer on the event loop, and no worker asks what is due.

The dict stands for your database, the timers for whatever calls you back there: a queue with delays, a scheduler, an alarm.
"""

import asyncio
from datetime import UTC, datetime
from typing import Any

from perdure import Context, Runtime, StoredRun, workflow


class PushStore:
    """The four methods, and the runtime that resumes a run when its timer fires."""

    def __init__(self, runs: dict[str, StoredRun]) -> None:
        self._runs = runs
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._waking: set[asyncio.Task[Any]] = set()
        self._runtime: Runtime | None = None

    def push_to(self, runtime: Runtime) -> None:
        """Wake runs through this runtime: those that an earlier process left, and all that are saved from now on."""
        self._runtime = runtime
        for run in self._runs.values():
            self._set_timer(run)

    def stop(self) -> None:
        """Wake nothing more, as when the process ends."""
        self._runtime = None
        for timer in self._timers.values():
            timer.cancel()

    async def save(self, run: StoredRun) -> None:
        self._runs[run.run_id] = run
        self._set_timer(run)

    async def load(self, run_id: str) -> StoredRun | None:
        return self._runs.get(run_id)

    async def delete(self, run_id: str) -> None:
        self._runs.pop(run_id, None)
        self._stop_timer(run_id)

    async def due(self, _now: datetime, _limit: int) -> list[str]:
        return []

    def _set_timer(self, run: StoredRun) -> None:
        self._stop_timer(run.run_id)
        if run.wake_at is not None and self._runtime is not None:
            seconds = (run.wake_at - datetime.now(UTC)).total_seconds()
            timer = asyncio.get_running_loop().call_later(max(0, seconds), self._wake, run.run_id, self._runtime)
            self._timers[run.run_id] = timer

    def _stop_timer(self, run_id: str) -> None:
        if run_id in self._timers:
            self._timers.pop(run_id).cancel()

    def _wake(self, run_id: str, runtime: Runtime) -> None:
        # A task of its own: `save` must not wait for the run that waits for it.
        waking = asyncio.create_task(self._resume(run_id, runtime))
        self._waking.add(waking)
        waking.add_done_callback(self._waking.discard)

    async def _resume(self, run_id: str, runtime: Runtime) -> None:
        await runtime.resume(run_id)
        # A timer may be early, and a run may be due again before it has left memory: what then says so still counts.
        if run_id in self._runs:
            self._set_timer(self._runs[run_id])


async def charge(cents: int) -> int:
    print("charged", cents)
    return cents


@workflow
async def subscription(ctx: Context, cents: int) -> int:
    first = await ctx.step("first", charge, cents)
    await ctx.sleep("a month", "100ms")
    return first + await ctx.step("second", charge, cents)


async def main() -> None:
    runs: dict[str, StoredRun] = {}
    store = PushStore(runs)
    async with Runtime(store, [subscription], concurrency=0, unload_grace=0) as runtime:  # it works on nothing by itself
        store.push_to(runtime)
        run = await runtime.start(subscription, 5, id="ada")
        await run.outcome()
        print("ada is", runs["ada"].status)
        store.stop()
    again = PushStore(runs)  # as in the next process
    async with Runtime(again, [subscription], concurrency=0, unload_grace=0) as runtime:
        again.push_to(runtime)
        run = await runtime.start(subscription, 5, id="ada")  # the same run
        print("paid", await run)


if __name__ == "__main__":
    asyncio.run(main())
