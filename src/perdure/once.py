"""One run of one workflow, without a `Runtime`: what `wf.run` and `wf.start` do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from perdure.engine import Settings
from perdure.host import Host
from perdure.options import stored_part
from perdure.result import Outcome
from perdure.run import Run
from perdure.store import Store
from perdure.storechoice import choose_store

if TYPE_CHECKING:
    from perdure.definition import Workflow

LEASE_TTL: Final = 30.0


async def run_once(workflow: Workflow[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any) -> Outcome[Any]:
    """`wf.run(...)`: one run, driven here, on the store that `store=` or PERDURE_STORE names."""
    store, is_owned, is_implicit = choose_store(options.get("store"), is_anonymous="id" not in options)
    host = _one_workflow(workflow, store, is_implicit=is_implicit)
    try:
        new = host.new_run(workflow, args, kwargs, stored_part(options))
        wait, retry_failed = options.get("wait", True), options.get("retry_failed", False)
        return await host.run(workflow, new, options, retry_failed=retry_failed, wait=wait)
    finally:
        if is_owned:
            await host.close_store()


async def start_once(workflow: Workflow[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any) -> Run[Any]:
    """`wf.start(...)`: one run, driven in the background of this process."""
    is_private = "id" not in options and options.get("store") is None
    store, _, is_implicit = choose_store(options.get("store"), is_anonymous=is_private)
    host = _one_workflow(workflow, store, is_implicit=is_implicit and not is_private)
    new = host.new_run(workflow, args, kwargs, stored_part(options))
    await store.setup()
    ttl = None if new.start_at is not None else host.lease_ttl
    created = await host.create(new, ttl)
    if created.claim is not None:
        host.drive(workflow, created.claim, options, is_background=True)
    elif options.get("retry_failed") and created.run.ended and created.run.status != "completed":
        await host.reopen(new.id)
    host.see_through(new.id, workflow, options)
    return Run(host, new.id)


def _one_workflow(workflow: Workflow[Any, Any], store: Store, *, is_implicit: bool) -> Host:
    host = Host(store, Settings(), lease_ttl=LEASE_TTL, options={}, is_implicit=is_implicit)
    host.register(workflow)
    return host
