"""One run of one workflow, without a `Runtime`: what `wf.run` and `wf.start` do."""

from __future__ import annotations

import uuid
from functools import lru_cache
from typing import Any, Final

from perdure.engine.drive import Drive
from perdure.model.ids import random_bytes
from perdure.model.records import Claim, Lease, RunRow
from perdure.options import Options, Settings
from perdure.result import Outcome
from perdure.snapshots.importer import RunStart, has_state, import_state, resolve_state
from perdure.snapshots.resume_state import ResumeState
from perdure.snapshots.snapshot import Snapshot
from perdure.store import Store
from perdure.stores import choose_store
from perdure.worker.host import Host, WorkflowDefinition, shared_threads

LEASE_TTL: Final = 30.0


async def run_once(
    workflow: WorkflowDefinition, args: tuple[Any, ...], kwargs: dict[str, Any], options: dict[str, Any]
) -> Outcome[Any]:
    """`wf.run(...)`: one run, driven here, on the store that `store=` or PERDURE_STORE names."""
    state = await resolve_state(options) if has_state(options) else None
    store, is_owned, is_implicit = choose_store(options.get("store"), is_anonymous="id" not in options)
    host = _one_workflow(workflow, store, is_implicit=is_implicit)
    try:
        start = _beginning(host, workflow, args, kwargs, state, options)
        driving = await host.begin(workflow, start, options, retry_failed=options.get("retry_failed", False))
        if driving is not None:
            return await driving.joined()
        return await host.go_on(start.new.id, workflow, options, wait=options.get("wait", True))
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
    host = _one_workflow(workflow, store, is_implicit=is_implicit and not is_private)
    start = _beginning(host, workflow, args, kwargs, state, options)
    new = start.new
    await store.setup()
    ttl = None if new.start_at is not None else host.lease_ttl
    created = await host.create(start, ttl)
    if created.claim is not None:
        host.drive(workflow, created.claim, options, arguments=start.arguments, is_background=True)
    elif options.get("retry_failed") and created.run.ended and created.run.status != "completed":
        await host.reopen(new.id)
    host.see_through(new.id, workflow, options)
    return host, new.id


def _beginning(
    host: Host,
    workflow: WorkflowDefinition,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: Snapshot | ResumeState | None,
    options: dict[str, Any],
) -> RunStart:
    start = host.beginning(workflow, args, kwargs, options)
    if state is None:
        return start
    on_change = Options.nearest(workflow.process_options, options).on_definition_change
    return import_state(start.new, state, on_change, without_failed=bool(options.get("retry_failed")), is_named="id" in options)


def _one_workflow(workflow: WorkflowDefinition, store: Store, *, is_implicit: bool) -> Host:
    host = Host(store, _settings(), lease_ttl=LEASE_TTL, options={}, is_implicit=is_implicit)
    host.register(workflow)
    return host


@lru_cache(maxsize=1)
def _settings() -> Settings:
    """The same for all runs without a runtime, so that they share a heartbeat."""
    return Settings(executor=shared_threads())


async def call_in_memory(workflow: WorkflowDefinition, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
