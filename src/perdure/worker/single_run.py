"""One run of one workflow, without a `Runtime`: what `wf(...)`, `wf.run(...)` and `wf.start(...)` do."""

from __future__ import annotations

import uuid
from functools import lru_cache
from typing import Any, Final

from perdure.engine.drive import Drive
from perdure.model.ids import random_bytes
from perdure.model.records import Claim, Lease, RunRow
from perdure.options import EngineSettings, Options
from perdure.result import Outcome
from perdure.snapshots.importer import RunStart, has_state, import_state, resolve_state
from perdure.snapshots.resume_state import ResumeState
from perdure.snapshots.snapshot import Snapshot
from perdure.store import Store
from perdure.stores import choose_store
from perdure.worker.active_runs import active_runs
from perdure.worker.host import Host, shared_threads
from perdure.worker.outcomes import drive_whenever_due, run_to_outcome
from perdure.worker.workflow_body import WorkflowDefinition

LEASE_TTL: Final = 30.0


async def run_once(
    workflow: WorkflowDefinition, args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]
) -> Outcome[Any]:
    """`wf.run(...)`: one run, driven here, on the store that `store=` or PERDURE_STORE names."""
    state = await resolve_state(options) if has_state(options) else None
    store, is_owned, is_implicit = choose_store(options.get("store"), is_anonymous="id" not in options)
    host = _host_for(workflow, store, is_implicit=is_implicit)
    try:
        start = _new_run(host, workflow, args, kwargs, state, options)
        retry_failed, wait = options.get("retry_failed", False), options.get("wait", True)
        return await run_to_outcome(host, workflow, start, options, retry_failed=retry_failed, wait=wait)
    finally:
        if is_owned:
            await host.close_store()


async def start_once(
    workflow: WorkflowDefinition, args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]
) -> tuple[Host, str]:
    """`wf.start(...)`: one run, driven in the background of this process by the host that is returned with its id."""
    state = await resolve_state(options) if has_state(options) else None
    is_private = "id" not in options and options.get("store") is None
    store, _, is_implicit = choose_store(options.get("store"), is_anonymous=is_private)
    host = _host_for(workflow, store, is_implicit=is_implicit and not is_private)
    start = _new_run(host, workflow, args, kwargs, state, options)
    run_id = start.new.id
    await store.setup()
    retry_failed = options.get("retry_failed", False)
    active = await host.create_and_drive(workflow, start, options, is_background=True, retry_failed=retry_failed)
    if active is None and not (row := await host.row(run_id)).ended:
        host.definition_of(row)  # a run of another version cannot be driven here, and the caller should know
    active_runs.keep_driving(run_id, drive_whenever_due(host, run_id, options))
    return host, run_id


def _new_run(
    host: Host,
    workflow: WorkflowDefinition,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: Snapshot | ResumeState | None,
    options: dict[str, Any],
) -> RunStart:
    start = host.new_run(workflow, args, kwargs, options)
    if state is None:
        return start
    on_change = Options.nearest(workflow.process_options, options).on_definition_change
    return import_state(start.new, state, on_change, without_failed=bool(options.get("retry_failed")), is_named="id" in options)


def _host_for(workflow: WorkflowDefinition, store: Store, *, is_implicit: bool) -> Host:
    host = Host(store, _settings(), lease_ttl=LEASE_TTL, process_options={}, is_implicit=is_implicit)
    host.register(workflow)
    return host


@lru_cache(maxsize=1)
def _settings() -> EngineSettings:
    """The settings of all runs without a runtime: a heartbeat is shared by hosts that have the same clock."""
    return EngineSettings(executor=shared_threads())


async def call_in_memory(workflow: WorkflowDefinition, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The workflow's value, or its exception. Nothing is stored: the run ends with this call."""
    settings = EngineSettings()
    drive = Drive(
        lambda drive: workflow.body(drive, args, kwargs),
        workflow.hints,
        _claim_without_store(workflow, settings.clock.now()),
        settings,
        Options.nearest(workflow.process_options),
    )
    return (await drive.drive()).unwrap()


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
