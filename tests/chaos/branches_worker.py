"""A process that drives one of the bodies of the concurrency proof, and notes what the body sees.

    python -m tests.chaos.branches_worker DIRECTORY BODY SEED GENERATION

Each line of `DIRECTORY/seen` is `generation`, key and value as JSON. The result, once there, is in `DIRECTORY/result`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from perdure import Ok, Runtime, Suspended
from tests.engine.bodies import BODIES, World, flow_of

DIRECTORY, BODY, SEED, GENERATION = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
seen = os.open(DIRECTORY / "seen", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def note(key: str, value: Any) -> None:
    os.write(seen, (json.dumps([GENERATION, key, value]) + "\n").encode())


async def main() -> None:
    body = next(body for body in BODIES if body.__name__ == BODY)
    flow = flow_of(body, World(SEED, note, pace=4))
    # On a busy machine it may be killed more often in a row before it gets to anything than a run is let live.
    async with Runtime(f"sqlite:///{DIRECTORY}/work.db", concurrency=0, max_attempts=1000) as runtime:
        print("ready", flush=True)
        outcome = await runtime.run(flow, id="run")
        while isinstance(outcome, Suspended):
            await asyncio.sleep(0.05)
            outcome = await runtime.resume("run")
        assert isinstance(outcome, Ok), outcome
        unfinished = DIRECTORY / "unfinished"
        unfinished.write_text(json.dumps(outcome.value))
        unfinished.rename(DIRECTORY / "result")  # whole or not at all, as a kill may come here too


asyncio.run(main())
