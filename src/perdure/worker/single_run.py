"""One run of one workflow, without a `Runtime`: what `wf(...)`, `wf.run(...)` and `wf.start(...)` do."""

from __future__ import annotations

import asyncio
import uuid
from functools import lru_cache
from typing import Any

from perdure.model.ids import random_bytes
from perdure.model.records import Claim, Lease, RunRow
from perdure.options import LEASE_TTL, EngineSettings, Options, counts_from_now
from perdure.result import Outcome, Suspended
from perdure.snapshots.importer import Arguments
from perdure.store import Store
from perdure.stores import choose_store
from perdure.worker.active_runs import active_runs
from perdure.worker.child_runs import ChildrenWithoutWorker, StoredChildren, drive_in_memory, start_in_memory
from perdure.worker.host import Host
from perdure.worker.outcomes import drive_whenever_due, resume, run_to_outcome
from perdure.worker.workflow_body import WorkflowDefinition


async def run_once(
    workflow: WorkflowDefinition, args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]
) -> Outcome[Any]:
    """`wf.run(...)`: one run, driven here, on the store that `store=` or PERDURE_STORE names."""
    store, is_owned, is_implicit = choose_store(options.get("store"), is_anonymous="id" not in options)
    host = _host_for(workflow, store, is_implicit=is_implicit)
    try:
        if counts_from_now(options):
            await host.ask_time()
        start = host.new_run(workflow, args, kwargs, options)
        start = await host.with_state(workflow, start, options, is_named="id" in options)
        retry_failed, wait = options.get("retry_failed", False), options.get("wait", True)
        return await run_to_outcome(host, workflow, start, options, retry_failed=retry_failed, wait=wait)
    except asyncio.CancelledError as cancelled:
        raise cancelled.with_traceback(None) from None  # Ctrl-C shows it, and how perdure waited tells nobody anything
    finally:
        if is_owned:
            await host.close_store()


async def start_once(
    workflow: WorkflowDefinition, args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]
) -> tuple[Host, str]:
    """`wf.start(...)`: one run, driven in the background of this process by the host that is returned with its id."""
    is_private = "id" not in options and options.get("store") is None
    store, _, is_implicit = choose_store(options.get("store"), is_anonymous=is_private)
    host = _host_for(workflow, store, is_implicit=is_implicit and not is_private)
    host.is_in_background = True
    if counts_from_now(options):
        await host.ask_time()
    start = host.new_run(workflow, args, kwargs, options)
    start = await host.with_state(workflow, start, options, is_named="id" in options)
    run_id = start.new.id
    await store.setup()
    retry_failed = options.get("retry_failed", False)
    active = await host.create_and_drive(workflow, start, options, is_background=True, retry_failed=retry_failed)
    if active is None and not (row := await host.row(run_id)).ended:
        host.definition_of(row)  # a run of another version cannot be driven here, and the caller should know
    active_runs.keep_driving(run_id, drive_whenever_due(host, run_id, options))
    return host, run_id


class _HostOfOne(Host):
    """A host without a worker: what a run starts is driven here for it."""

    is_in_background = False

    def _children_of_drive(self) -> StoredChildren:
        return ChildrenWithoutWorker(self, self._drive_child)

    async def _drive_child(self, run_id: str) -> Outcome[Any]:
        """Drive the child until it ends or suspends; in the background of this process, until it ends."""
        outcome = await resume(self, run_id, {}, at_once=False)
        if self.is_in_background and isinstance(outcome, Suspended):
            active_runs.keep_driving(run_id, drive_whenever_due(self, run_id, {}))
        return outcome


def _host_for(workflow: WorkflowDefinition, store: Store, *, is_implicit: bool) -> _HostOfOne:
    host = _HostOfOne(store, _settings(), lease_ttl=LEASE_TTL, process_options={}, is_implicit=is_implicit)
    host.register(workflow)
    return host


@lru_cache(maxsize=1)
def _settings() -> EngineSettings:
    """The settings of all runs without a runtime: a heartbeat is shared by hosts that have the same clock."""
    return EngineSettings()


async def call_in_memory(workflow: WorkflowDefinition, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The workflow's value, or its exception. Nothing is stored: the run ends with this call."""
    settings, options = EngineSettings(), Options.nearest(workflow.process_options)
    claim = _claim_without_store(workflow, settings.clock.now())
    claim, body = await start_in_memory(workflow, claim, Arguments(args, kwargs), options)
    try:
        outcome = await drive_in_memory(workflow, body, claim, settings, options)
    except asyncio.CancelledError as cancelled:
        raise cancelled.with_traceback(None) from None  # as above
    return outcome.unwrap()


def _claim_without_store(workflow: WorkflowDefinition, now: int) -> Claim:
    run = RunRow(
        id=str(uuid.uuid4()),
        workflow=workflow.name,
        version=workflow.version,
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
