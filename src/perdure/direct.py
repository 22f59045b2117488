"""A workflow called like a function: driven in memory, without a store."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from perdure.engine import Drive
from perdure.options import Options
from perdure.randomness import random_bytes
from perdure.records import Claim, Lease, RunRow
from perdure.settings import Settings

if TYPE_CHECKING:
    from perdure.definition import Workflow


async def call_in_memory(workflow: Workflow[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The workflow's value, or its exception. Nothing is stored: it lives and dies with this call."""
    settings = Settings()
    drive = Drive(
        lambda drive: workflow.body(drive, args, kwargs),
        workflow.hints,
        _unstored(workflow.name, settings.clock.now()),
        settings,
        Options.nearest(workflow.process_options),
    )
    return (await drive.drive()).unwrap()


def _unstored(workflow: str, now: int) -> Claim:
    run = RunRow(
        id=str(uuid.uuid4()),
        workflow=workflow,
        input=b"",
        input_hash=b"",
        seed=random_bytes(),
        status="running",
        wake_at=None,
        attempts=1,
        created_at=now,
        updated_at=now,
    )
    lease = Lease(run_id=run.id, epoch=0, token="", until=0)
    return Claim(lease=lease, run=run, journal=[], inbox=[], inbox_seq=0, item_counts={})
