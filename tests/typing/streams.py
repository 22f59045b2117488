"""What emitting and reading streams infers."""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import timedelta
from typing import Any, assert_type

from perdure import Context, Run, StreamItem, StreamReader, SyncRun, SyncStreamReader, current_step, workflow


class Token:
    text: str = ""


async def says(words: list[str]) -> None:
    for word in words:
        assert_type(await current_step().emit("tokens", word), None)


def says_in_a_thread(words: list[str]) -> None:
    for word in words:
        current_step().emit("tokens", word, max_items=10)
    assert_type(current_step().emit("tokens", 1), Awaitable[None])


@workflow
async def tells(ctx: Context) -> None:
    assert_type(await ctx.emit("tokens", {"any": "value"}), None)
    await ctx.emit("tokens", 1, max_items=10)
    assert_type(await ctx.end_stream("tokens"), None)


async def read(run: Run[str]) -> None:
    assert_type(run.stream("tokens"), StreamReader[Any])
    assert_type(run.stream("tokens", start=5, timeout="1s", drop_failed=True), StreamReader[Any])
    assert_type(run.stream("tokens", returns=Token, timeout=timedelta(seconds=1)), StreamReader[Token])
    assert_type(run.stream("tokens", details=True, returns=Token), StreamReader[StreamItem])
    async for token in run.stream("tokens", returns=Token):
        assert_type(token.text, str)
    reader = run.stream("tokens", details=True)
    async for item in reader:
        assert_type(item, StreamItem)
        assert_type((item.position, item.key, item.attempt, item.epoch, item.index), tuple[int, str | None, int, int, int])
    assert_type(reader.position, int)


def read_blocking(run: SyncRun[str]) -> None:
    for token in run.stream("tokens", returns=Token):
        assert_type(token, Token)
    assert_type(run.stream("tokens"), SyncStreamReader[Any])
    assert_type(next(run.stream("tokens", details=True)), StreamItem)
