"""Commands on a store as a whole, and on runs as documents: export, import, migrate, workers, doctor."""

from __future__ import annotations

import asyncio
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from cyclopts import App, Parameter

from perdure.cli.options import CommandFailed, JsonOption, StoreOptions, UsageError
from perdure.cli.output import (
    in_utc,
    print_json,
    print_json_lines,
    print_table,
    print_text,
    progress_bar,
    report,
    safe_json,
    shown_in,
)
from perdure.errors import RunNotFound
from perdure.migration import Migration, migrate_store
from perdure.operations.health import ask_store
from perdure.runtime import Runtime
from perdure.snapshots.snapshot import Snapshot
from perdure.store import Durability, require
from perdure.worker.worker_registry import WorkerInfo

_DEFAULT: Final = StoreOptions()
_WORKER_COLUMNS: Final = ("worker", "is", "seen (UTC)", "started (UTC)", "runs", "queues", "workflows")
_SURVIVES: Final[dict[Durability, str]] = {
    "process": "the end of the process that wrote it; not a power loss",
    "disk": "a power loss",
    "replicated": "the loss of a minority of the servers",
}


def add_commands(app: App) -> None:
    """Add the commands of this module."""
    app.command(export)
    app.command(import_run, name="import")
    app.command(migrate)
    app.command(workers)
    app.command(doctor)


def export(
    run_id: str,
    /,
    *,
    output: Annotated[Path | None, Parameter(help="The file to write. Default: stdout.")] = None,
    options: StoreOptions = _DEFAULT,
) -> None:
    """Print a run as a snapshot in JSON."""

    async def load(runtime: Runtime) -> Snapshot:
        found = await require(runtime.store, "operators").load(run_id)
        if found is None:
            raise RunNotFound(run_id)
        return found

    text = msgspec.json.encode(options.call(load).to_dict())
    if not options.json:
        text = msgspec.json.format(text, indent=2)
    if output is None:
        sys.stdout.write(safe_json(text) + "\n")
        return
    output.write_bytes(text + b"\n")
    report(options.json, f"wrote run {run_id!r} to {output}", {"id": run_id, "output": str(output)})


def import_run(
    file: Path,
    /,
    *,
    run_id: Annotated[str | None, Parameter(name="--id", help="Another id than the one in the snapshot.")] = None,
    replace: Annotated[bool, Parameter(negative=(), show_default=False, help="Replace the run that has this id.")] = False,
    options: StoreOptions = _DEFAULT,
) -> None:
    """Store the run of a snapshot; workers go on with it.

    Parameters
    ----------
    file
        The file to read; - is stdin.
    """
    document = _read_document(file)
    metadata = document.get("metadata")
    target = run_id or (metadata.get("workflowId") if isinstance(metadata, dict) else None)
    if not isinstance(target, str):
        raise UsageError(f"the snapshot in {file} does not say which run it is of; pass --id")

    async def save(runtime: Runtime) -> None:
        if not replace and await runtime.get(target) is not None:
            raise CommandFailed(
                f"there is a run {target!r} in this store; pass --replace to put the snapshot in its place, or --id"
            )
        await require(runtime.store, "operators").save(target, document)

    options.call(save, create=True)
    report(options.json, f"imported run {target!r}", {"id": target})


def _read_document(file: Path) -> dict[str, Any]:
    text = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError) as reason:
        raise CommandFailed(f"{file} is no snapshot: {reason}") from reason


def migrate(
    source: str,
    target: str,
    /,
    *,
    batch: Annotated[int, Parameter(help="How many runs are copied at a time.")] = 100,
    options: JsonOption = JsonOption(),  # noqa: B008 - immutable
) -> int:
    """Copy all runs, schedules and queue limits into another store.

    It can be repeated. The exit code is 1 when something was left out.

    Parameters
    ----------
    source
        DSN of the store to copy from.
    target
        DSN of the store to copy to.
    """
    StoreOptions(store=source).call(lambda runtime: runtime.list(limit=1))  # a mistyped source would be an empty one
    with progress_bar() as bar:
        done = asyncio.run(migrate_store(source, target, batch=batch, on_progress=shown_in(bar)))
    if options.json:
        skipped = [each._asdict() for each in done.skipped]
        print_json({"copied": done.copied, "already_there": done.already_there, "skipped": skipped})
    else:
        _print_migration(done)
    return 0 if done.is_complete else 1


def _print_migration(done: Migration) -> None:
    print_text(f"copied {done.copied}, already there {done.already_there}, left out {len(done.skipped)}")
    for each in done.skipped:
        print_text(f"left out {each.kind} {each.id}: {each.reason}")


def workers(*, options: StoreOptions = _DEFAULT) -> None:
    """List the workers on the store, and say which are silent, or gone with their process."""
    found = options.call(lambda runtime: runtime.workers())
    if options.json:
        print_json_lines(found)
    elif found:
        print_table(_WORKER_COLUMNS, [_worker_row(each) for each in found])
    else:
        print_text("no workers")


def _worker_row(worker: WorkerInfo) -> list[str]:
    return [
        worker.name,
        "gone" if worker.is_gone else "silent" if worker.is_silent else "alive",
        in_utc(worker.seen_at),
        in_utc(worker.started_at),
        f"{worker.driven} of {worker.concurrency}",
        "all" if worker.queues is None else ", ".join(worker.queues),
        ", ".join(name if version == 1 else f"{name} v{version}" for name, version in worker.workflows),
    ]


class StoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `perdure doctor` found."""

    store: str
    location: tuple[str, ...]
    durability: Durability
    capabilities: tuple[str, ...]
    schema_version: int | None
    reply_seconds: float
    # How far the store's clock is ahead of this machine's; zero when the time until the reply explains the difference.
    clock_ahead_seconds: float
    perdure: str
    python: str


def doctor(*, options: StoreOptions = _DEFAULT) -> None:
    """Show how the store is set up: durability, capabilities, schema version, clock."""
    installed = version("perdure")  # before the event loop runs: it reads a file
    found = options.call(lambda runtime: _examine(runtime, installed))
    if options.json:
        print_json(found)
        return
    ahead = found.clock_ahead_seconds
    clock = "as this machine's" if not ahead else f"{abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} this machine's"
    rows = {
        "store": f"{found.store} ({', '.join(part for part in found.location if part)})",
        "durability": f"{found.durability}: an acknowledged write survives {_SURVIVES[found.durability]}",
        "capabilities": ", ".join(found.capabilities),
        "schema version": "not known" if found.schema_version is None else str(found.schema_version),
        "reply": f"after {found.reply_seconds * 1000:.1f} ms",
        "clock": clock,
        "perdure": f"{found.perdure} on Python {found.python}",
    }
    for name, text in rows.items():
        print_text(f"{name:<15} {text}")


async def _examine(runtime: Runtime, installed: str) -> StoreReport:
    store = runtime.store
    await store.claim(0, 1.0, ())  # connects; a store knows its settings after the first verb
    reply = await ask_store(store)
    return StoreReport(
        store=store.key[0],
        location=store.key[1:],
        durability=store.durability,
        capabilities=tuple(sorted(store.capabilities)),
        schema_version=getattr(store, "schema_version", None),
        reply_seconds=reply.seconds,
        clock_ahead_seconds=reply.clock_ahead_seconds,
        perdure=installed,
        python=platform.python_version(),
    )
