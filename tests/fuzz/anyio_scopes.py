"""Constructs of anyio. It keeps the scopes of a group's tasks in a set, in the order of memory: here they are kept in order."""

from __future__ import annotations

import contextlib
from typing import Any

from tests.fuzz.body import EXPECTED, Body
from tests.fuzz.programs import Node, construct


class _Ordered(dict[Any, None]):
    """A set that iterates in the order in which things were added."""

    def add(self, each: Any) -> None:
        self[each] = None

    def remove(self, each: Any) -> None:
        del self[each]

    def discard(self, each: Any) -> None:
        self.pop(each, None)


def keep_scopes_in_order() -> None:
    """Let anyio cancel the tasks of a group in the order of their creation."""
    from anyio._backends import _asyncio as backend

    original = backend.CancelScope.__init__
    if getattr(original, "is_ordered", False):
        return

    def ordered(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        self._child_scopes = _Ordered()

    ordered.is_ordered = True  # type: ignore[attr-defined]  # a mark on the function
    backend.CancelScope.__init__ = ordered  # type: ignore[method-assign]  # see above


@construct("anyio_group", "anyio", inside=(2, 3))
async def anyio_group(body: Body, node: Node) -> Any:
    import anyio

    values: list[Any] = []

    async def branch(each: Node) -> None:
        values.append(await body.run(each))

    try:
        async with anyio.create_task_group() as group:
            for each in node.inside:
                group.start_soon(branch, each)
    except* EXPECTED as errors:
        body.note(node.at, "errors", errors)
    return values


@construct("move_on_after", "anyio", args=lambda rng: (rng.choice((0.001, 0.004, 0.02)),), inside=(1, 2))
async def move_on_after(body: Body, node: Node) -> Any:
    import anyio

    with anyio.move_on_after(node.args[0]) as limit:
        for each in node.inside:
            await body.run(each)
    return limit.cancelled_caught


@construct("fail_after", "anyio", args=lambda rng: (rng.choice((0.001, 0.004, 0.02)),), inside=(1, 1))
async def fail_after(body: Body, node: Node) -> Any:
    import anyio

    try:
        with anyio.fail_after(node.args[0]):
            return await body.run(node.inside[0])
    except TimeoutError:
        return "late"


@construct("cancel_scope", "anyio", inside=(2, 2))
async def cancel_scope(body: Body, node: Node) -> Any:
    """Cancel a scope from a branch beside it."""
    import anyio

    async with anyio.create_task_group() as group:
        with anyio.CancelScope() as limit:

            async def branch() -> None:
                with contextlib.suppress(*EXPECTED):
                    await body.run(node.inside[0])
                limit.cancel()

            group.start_soon(branch)
            with contextlib.suppress(*EXPECTED):
                await body.run(node.inside[1])
        group.cancel_scope.cancel()
    return limit.cancelled_caught
