"""Log records of perdure as lines of JSON, with the run's id, its workflow, the step's key and the worker as fields.

    python examples/json_logging.py

Any JSON formatter does: the fields are attributes of the record. It prints, among others (the first line of each kind):

    INFO order-1 checkout: run 'order-1' is claimed
    WARNING order-1 checkout: step 'charge' of run 'order-1' of workflow 'checkout' failed in attempt 1, and is tried again in 0.0 s: ConnectionError: the bank is closed (json_logging.py:35)
    WARNING order-1 checkout: step 'charge' of run 'order-1' failed after 2 attempts: ConnectionError('the bank is closed')
    WARNING order-1 checkout: run 'order-1' failed: ConnectionError('the bank is closed')
"""  # noqa: E501 - a line of a log is as long as it is

import asyncio
import json
import logging
import sys
import tempfile
from pathlib import Path

from perdure import Context, Retry, Runtime, step, workflow

FIELDS = ("run_id", "workflow", "key", "attempt", "worker")


class JsonLines(logging.Formatter):
    """A record as one line."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {name: value for name in FIELDS if (value := getattr(record, name, None)) is not None}
        return json.dumps({"level": record.levelname, "message": record.getMessage(), **fields})


@step(retry=Retry(attempts=2, wait_initial="10ms", wait_jitter=0))
async def charge() -> None:
    raise ConnectionError("the bank is closed")


@workflow
async def checkout(ctx: Context) -> None:
    await ctx.step(charge)


async def main(store: str) -> None:
    async with Runtime(store, [checkout]) as runtime:
        await (await runtime.start(checkout, id="order-1")).outcome()


if __name__ == "__main__":
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(f"sqlite:///{Path(folder) / 'shop.db'}"))
