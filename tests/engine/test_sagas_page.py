"""The table of docs/sagas.md: each cell says what is called, and a run does that."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, Final

import pytest

from perdure import Context, Err, Workflow, current_step
from perdure.errors import RunFinished
from tests.conftest import ROOT
from tests.engine.worlds import World, world

STATES: Final = ("done", "undone", "in doubt")
ENDED: Final = "the run has ended"


def read_table() -> dict[tuple[str, str], str]:
    """The cells of the table, by row and column."""
    page = (ROOT / "docs" / "sagas.md").read_text()
    table = page[page.index("| what happens |") :].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {(row, state): cell for row, *cells in rows for state, cell in zip(STATES, cells, strict=True)}


TABLE: Final = read_table()


class Scene:
    """A run `order` with one charge, and what the provider is asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        # What the code and the provider do now.
        self.has_charge = True
        self.is_killed_while: str | None = None
        self.hangs = self.refund_fails = self.fails = self.is_poison = False
        self.waits = True
        self.workflow = Workflow("flow", self._body, on_definition_change="ignore")

    async def _charge(self) -> None:
        self.calls.append(f"`charge` as `{current_step().idempotency_key}`")
        if self.is_killed_while == "charge":
            raise SystemExit(1)
        if self.hangs:
            await asyncio.sleep(3600)

    async def _refund(self, _: None) -> None:
        if self.is_killed_while == "refund":
            raise SystemExit(1)
        self.calls.append(f"`refund` of `{current_step().undoes}`")
        if self.refund_fails:
            raise ConnectionError("the provider is away")

    async def _last(self) -> None:
        if self.fails:
            raise ValueError("out of stock")

    async def _body(self, ctx: Context) -> None:
        if self.has_charge:
            await ctx.step("charge", self._charge, compensate=self._refund, timeout=0.01 if self.hangs else 60)
        if self.waits:
            await ctx.wait_for_signal("go")
        if self.is_poison:
            raise SystemExit(1)
        await ctx.step("last", self._last)


async def open_run(scene: Scene, here: World, state: str, **options: Any) -> None:
    """Bring the run to where its charge is in this state; it has ended only if the charge was undone."""
    if state == "in doubt":
        scene.is_killed_while = "charge"
    if state == "undone":
        scene.waits, scene.fails = False, True
    await here.runtime.start(scene.workflow, id="order", **options)
    await here.runtime.sweep()
    scene.is_killed_while = None


async def ended_run(scene: Scene, here: World, state: str) -> None:
    """Bring the run to a failure. A charge that is not undone then is one whose compensation has failed."""
    scene.waits, scene.fails = False, True
    scene.refund_fails, scene.hangs = state != "undone", state == "in doubt"
    await here.runtime.start(scene.workflow, id="order")
    assert isinstance((await here.runtime.sweep())["order"], Err)
    scene.refund_fails = scene.hangs = scene.fails = False


async def retry(scene: Scene, here: World, state: str) -> None:
    await ended_run(scene, here, state)
    scene.calls.clear()
    await here.runtime.retry("order")
    await here.runtime.sweep()


async def cancel(scene: Scene, here: World, state: str, **options: Any) -> None:
    await open_run(scene, here, state)
    scene.calls.clear()
    await here.runtime.cancel("order", **options)
    await here.later("2h")


async def pass_deadline(scene: Scene, here: World, state: str) -> None:
    await open_run(scene, here, state, deadline="1h")
    scene.calls.clear()
    if (await here.runtime.describe("order")).status == "failed":
        raise RunFinished("order", "failed")
    await here.later("2h")
    assert (await here.runtime.describe("order")).status == "failed"


async def die(scene: Scene, here: World, state: str) -> None:
    await open_run(scene, here, state)
    scene.is_poison = True
    if state == "done":
        await here.runtime.signal("order", "go")
    if state == "in doubt":
        scene.is_killed_while = "charge"
    for _ in range(4):
        scene.calls.clear()
        await here.later("2h")


async def retry_after_death(scene: Scene, here: World, state: str) -> None:
    scene.waits, scene.fails, scene.hangs = False, True, state == "in doubt"
    scene.is_killed_while = None if state == "undone" else "refund"
    await here.runtime.start(scene.workflow, id="order")
    for _ in range(5):
        await here.later("2h")
    if state == "undone":  # it died after that
        scene.calls.clear()
        return
    assert (await here.runtime.describe("order")).status == "dead"
    scene.is_killed_while = None
    scene.calls.clear()
    await here.runtime.retry("order")
    await here.runtime.sweep()
    assert (await here.runtime.describe("order")).status == "failed"


async def fork(scene: Scene, here: World, state: str, **options: Any) -> None:
    if state == "in doubt":
        await open_run(scene, here, state)
        await here.runtime.hold("order")
    else:
        scene.waits, scene.fails = False, state == "undone"
        await here.runtime.start(scene.workflow, id="order")
        await here.runtime.sweep()
    scene.waits, scene.fails = False, True
    scene.calls.clear()
    await here.runtime.fork("order", from_step="charge" if state == "in doubt" else "last", id="again", **options)
    assert isinstance((await here.later("2h"))["again"], Err)


async def cancel_without_charge(scene: Scene, here: World, state: str) -> None:
    await open_run(scene, here, state)
    scene.calls.clear()
    scene.has_charge = False
    await here.runtime.cancel("order")
    await here.later("2h")


SCENES: Final[dict[str, Callable[..., Any]]] = {
    "`retry` of a failed run": retry,
    "`cancel`": cancel,
    "its deadline passes": pass_deadline,
    "it dies (`max_attempts`)": die,
    "`retry` of a run that died while it undid": retry_after_death,
    "`fork` as `again`, which fails": fork,
    "`fork(take_over=True)` as `again`, which fails": lambda *where: fork(*where, take_over=True),
    "the code has no `charge` any more, then `cancel`": cancel_without_charge,
    "`cancel(undo=False)`": lambda *where: cancel(*where, undo=False),
}


def test_the_table_has_these_rows() -> None:
    assert {row for row, _ in TABLE} == SCENES.keys()


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("row", SCENES)
async def test_the_page_says_what_is_called(row: str, state: str) -> None:
    cell, scene = TABLE[row, state], Scene()
    async with world(scene.workflow, max_attempts=2) as here:
        if cell == ENDED:
            with pytest.raises(RunFinished):
                await SCENES[row](scene, here, state)
            return
        await SCENES[row](scene, here, state)
        called = re.findall(r"`(?:charge|refund)` (?:as|of) `[^`]+`", cell)
        assert scene.calls == called
        assert bool(called) != cell.startswith("nothing")
        described = await here.runtime.describe("order")
        if "`not_undone` names it" in cell:
            assert described.not_undone == ("charge",)
            assert described.status in ("cancelled", "dead")
        if "does not end" in cell:
            assert described.not_undone == ("charge",)
            assert (described.status, described.problem is None) == ("pending", False)
