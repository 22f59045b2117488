"""Tokens of a model, streamed to several readers from a step whose connection breaks.

    python examples/streams.py

A step asks a model, which breaks off in the middle of the first answer, and `retry=` asks again. One reader takes every token as
it comes, and starts over when it sees that another attempt has begun. The other comes when everything is over, and gets only the
tokens of the attempt that succeeded. It prints:

    attempt 1: The answer is
    attempt 2: The answer is forty-two
    body: asked 'what is it?'
    late: The answer is forty-two
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from perdure import Context, Retry, Run, Runtime, current_step, step, workflow

ANSWER = ["The", "answer", "is", "forty-two"]


async def ask_model(question: str, *, breaks_off: bool) -> AsyncIterator[str]:
    """A model that is no model, and breaks off if it is told so."""
    for number, token in enumerate(ANSWER):
        if breaks_off and number == 3:
            raise ConnectionError(f"the connection broke while {question!r} was answered")
        yield token


@step(retry=Retry(attempts=3, wait_initial="10ms", wait_jitter=0))
async def answer(question: str) -> str:
    info, tokens = current_step(), []
    async for token in ask_model(question, breaks_off=info.attempt == 1):
        await info.emit("tokens", token)  # sent with the next record, or within 50 ms
        tokens.append(token)
    return " ".join(tokens)


@workflow
async def ask(ctx: Context, question: str) -> str:
    await ctx.emit("log", f"asked {question!r}")
    return await ctx.step(answer, question)


async def show(run: Run[str]) -> None:
    """What a browser would show."""
    shown: dict[int, list[str]] = {}
    async for item in run.stream("tokens", details=True):
        if item.index == 0:  # an attempt begins, and what came before it is void
            shown[item.attempt] = []
        shown[item.attempt].append(item.value)
    for attempt, tokens in shown.items():
        print(f"attempt {attempt}:", *tokens)


async def main(directory: str) -> None:
    dsn = f"sqlite:///{Path(directory) / 'runs.db'}"
    async with Runtime(dsn, [ask]) as runtime:
        run = await runtime.start(ask, "what is it?", id="question-1")
        await show(run)
        await run
    client = Runtime(dsn, concurrency=0)  # as another process would be
    late = await client.get("question-1")
    if late is not None:
        print("body:", *[line async for line in late.stream("log")])
        print("late:", *[token async for token in late.stream("tokens", drop_failed=True)])
    await client.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(main(scratch))
