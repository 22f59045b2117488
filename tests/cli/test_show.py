"""The timeline of `perdure show` has a line for everything a run may record."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from perdure import Context, Err, RunDescription, Runtime, StepFailed, stores, workflow
from perdure.cli.output import length
from perdure.cli.show_run import print_run
from perdure.errors import RunNotFound, SnapshotCorrupt
from perdure.model.journal import Entry
from perdure.model.logs import printable
from perdure.model.records import NewRun


async def double(number: int) -> int:
    return 2 * number


async def hang() -> None:
    await asyncio.Event().wait()


async def refuse() -> Err[dict[str, int]]:
    return Err({"code": 5})


@workflow
async def everything(ctx: Context, first: int) -> None:
    await ctx.map(double, [first, 2])
    await ctx.scope("inner").step(double, 3)
    try:
        async with ctx.timeout("limit", "10ms"):
            await ctx.step(hang)
    except TimeoutError:
        pass
    await ctx.patched("new way")
    await ctx.step(double, 4, key="once", at_most_once=True)
    with contextlib.suppress(StepFailed):
        await ctx.step(refuse)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ctx.wait_for_signal("go"))
        tasks.create_task(ctx.sleep("long", "2d"))


async def _description() -> RunDescription:
    store = stores.memory()
    async with Runtime(store, [everything], concurrency=0, unload_grace="10ms") as runtime:
        await runtime.run(everything, 1, id="r", metadata={"team": "books"})
        return await runtime.describe("r")


async def test_every_construct_has_a_line() -> None:
    run = await _description()
    lines = {step.key: (step.kind, step.status, step.value) for step in run.steps}
    assert lines == {
        "double[0]": ("step", "completed", 2),
        "double[1]": ("step", "completed", 4),
        "/inner/double": ("step", "completed", 6),
        "limit": ("timeout", "completed", None),
        "hang": ("step", "cancelled", None),
        "patched:new way": ("patch", "completed", True),
        "once": ("step", "completed", 8),
        "refuse": ("step", "failed", None),
        "go": ("signal", "waiting", None),
        "long": ("sleep", "waiting", None),
    }
    by_key = {step.key: step for step in run.steps}
    assert by_key["hang"].started_at is None
    assert by_key["long"].until == run.wake_at
    assert by_key["go"].until is None
    error = by_key["refuse"].error
    assert error is not None
    assert (error.type, error.message, error.traceback) == ("Err", '{"code":5}', None)
    assert run.metadata == {"team": "books"}


async def test_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_run(await _description())
    shown = capsys.readouterr().out
    assert 'metadata {"team":"books"}\nwaits for signal \'go\' until 20' in shown
    assert 'refuse failed: Err: {"code":5}\n' in shown


async def test_a_run_of_another_library_has_its_steps_and_waits_for_its_input(capsys: pytest.CaptureFixture[str]) -> None:
    store = stores.memory()
    failed = {"ok": False, "error": "X", "cause": {"type": "error", "name": "E", "message": "m", "stack": "at f"}}
    document: dict[str, Any] = {
        "formatVersion": 1,
        "steps": {"a": {"ok": True, "value": 1}, "b": failed},
        "execution": {"status": "running", "lastUpdated": "2026-01-01T00:00:00Z"},
    }
    await store.save("theirs", document)
    print_run(await Runtime(store).describe("theirs"))
    shown = capsys.readouterr().out
    assert "run theirs: workflow not known, pending\n" in shown
    assert "input not known\nwaits for a start with this id that brings its input\n" in shown
    assert "b failed: E: m\n  at f\n" in shown


async def test_a_run_that_is_not_there_and_one_that_cannot_be_read_are_told_apart() -> None:
    store = stores.memory()
    with pytest.raises(RunNotFound):
        await Runtime(store).describe("r")
    run = NewRun(id="r", workflow="wf", input=b"[[],{}]", input_hash=b"1", seed=b"2")
    await store.create(run, entries=[Entry(seq=1, key="a", ok=False, payload=b'"no failure"')])
    with pytest.raises(SnapshotCorrupt):
        await Runtime(store).describe("r")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (0.0004, "0 ms"), (0.25, "250 ms"), (1.25, "1.2 s"), (119.9, "119.9 s"), (120, "2 min"), (3725, "1 h 2 min"),
     (86_400, "1 d"), (90_000, "1 d 1 h"), (86_405, "1 d")],
)  # fmt: skip
def test_lengths_are_short(seconds: float | None, text: str) -> None:
    assert length(seconds) == text


def test_what_a_terminal_would_act_upon_is_escaped() -> None:
    assert printable("a\x1b[2J\x07\u202e\udc80b\nc\td") == "a\\x1b[2J\\x07\\u202e\\udc80b\nc\td"
