"""What all commands have in common: `--json`, the store, the program's runtime, and JSON in arguments."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import tomllib
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec
from cyclopts import Parameter

from perdure.cli.output import print_error
from perdure.model.durations import seconds
from perdure.model.records import Status
from perdure.model.run_filter import MetadataValue
from perdure.operations.run_selection import RunSelection
from perdure.runtime import Runtime
from perdure.store import Store

T = TypeVar("T")

# How many seconds a command waits for its store without a word.
NOTICE_AFTER: Final = 2.0

# The schemes whose stores can refuse to create what is not there.
_CREATING: Final = frozenset({"sqlite", "file", "libsql", "postgresql", "postgres", "mysql", "mariadb", "mongodb", "mongodb+srv"})


class UsageError(Exception):
    """The arguments or settings are wrong: exit code 2."""


class CommandFailed(Exception):
    """What was asked for could not be done: exit code 1."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class JsonOption:
    """The option of every command."""

    json: Annotated[bool, Parameter(negative=(), show_default=False, help="Print JSON on stdout, and nothing else.")] = False


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class StoreOptions(JsonOption):
    """The options of a command that works on a store."""

    store: Annotated[
        str | None,
        Parameter(
            help="DSN of the store, such as sqlite:///app.db. Default: $PERDURE_STORE, or [tool.perdure] in pyproject.toml."
        ),
    ] = None

    def call(self, verb: Callable[[Runtime], Awaitable[T]], *, create: bool = False) -> T:
        """The result of `verb`, which gets a client of the store. A store that is not there is only made with `create`."""
        dsn = self.dsn()
        runtime = Runtime(dsn if create else _without_creation(dsn), concurrency=0)

        async def call(runtime: Runtime) -> T:
            await _reach(runtime.store)
            return await verb(runtime)

        return call_runtime(runtime, call, create=create)

    def dsn(self) -> str:
        """The DSN given here, in the environment or in pyproject.toml. Raises `UsageError`."""
        if self.store == "":
            raise UsageError("--store is empty; is the variable set that it was taken from?")
        found = self.store or os.environ.get("PERDURE_STORE") or _dsn_in_pyproject()
        if not found:
            raise UsageError(
                'which store? Pass --store DSN, set PERDURE_STORE, or write store = "DSN" under [tool.perdure] in pyproject.toml'
            )
        return found


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class FilterOptions:
    """The options of a command that works on the runs that have all that is given."""

    workflow: Annotated[str | None, Parameter(help="Only runs of this workflow.")] = None
    status: Annotated[list[Status] | None, Parameter(negative=(), help="Only runs in this status; may be repeated.")] = None
    queue: Annotated[str | None, Parameter(help="Only runs of this queue.")] = None
    prefix: Annotated[str, Parameter(help="Only runs whose id begins so.", show_default=False)] = ""
    since: Annotated[str | None, Parameter(help="Only runs changed since then: 2h ago, or 2026-11-16T09:30 (UTC).")] = None
    until: Annotated[str | None, Parameter(help="Only runs not changed since then.")] = None
    metadata: Annotated[str | None, Parameter(help="Only runs with this in their metadata: key=value.")] = None

    def selection(self) -> RunSelection:
        """The selection, as `Runtime.list` takes it. Raises `UsageError`."""
        return {
            "workflow": self.workflow,
            "status": self.status,
            "queue": self.queue,
            "prefix": self.prefix,
            "updated_after": _parse_instant(self.since, "--since"),
            "updated_before": _parse_instant(self.until, "--until"),
            "metadata": None if self.metadata is None else _parse_metadata(self.metadata),
        }


def _parse_instant(text: str | None, option: str) -> datetime | float | None:
    if text is None:
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        pass
    else:
        return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    try:
        return seconds(text, what=option)
    except ValueError:
        raise UsageError(f"{option} {text!r} must be how long ago, such as 1h30m or 2d, or a time: 2026-11-16T09:30") from None


def _parse_metadata(text: str) -> dict[str, MetadataValue]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UsageError(f"--metadata {text!r} must be key=value")
    try:
        parsed: MetadataValue = msgspec.json.decode(value, type=MetadataValue)
    except msgspec.MsgspecError:
        parsed = value  # no JSON, or no single value: it is text
    return {key: parsed}


async def _reach(store: Store) -> None:
    """Return when the store has answered. A server that is away is tried for some time, and a line on stderr says so."""

    def notice() -> None:
        print_error("the store has not answered yet; waiting (Ctrl-C ends this)")

    timer = asyncio.get_running_loop().call_later(NOTICE_AFTER, notice)
    try:
        await store.claim(0, 1.0, ())
    finally:
        timer.cancel()


def call_runtime(runtime: Runtime, verb: Callable[[Runtime], Awaitable[T]], *, create: bool = False) -> T:
    """The result of `verb`, on an event loop of its own. The runtime is closed afterwards."""

    async def call() -> T:
        try:
            if create:
                await runtime.store.setup()
            return await verb(runtime)
        finally:
            await runtime.close()

    return asyncio.run(call())


def _without_creation(dsn: str) -> str:
    """The DSN of a store that must exist: a mistyped path would otherwise be an empty store."""
    if dsn.partition(":")[0] not in _CREATING or "auto_migrate=" in dsn:
        return dsn
    return f"{dsn}{'&' if '?' in dsn else '?'}auto_migrate=false"


def _dsn_in_pyproject() -> str | None:
    """`store` under `[tool.perdure]` in pyproject.toml, of this directory or of the nearest one above that has it."""
    here = Path.cwd()
    path = next((file for each in (here, *here.parents) if (file := each / "pyproject.toml").is_file()), None)
    if path is None:
        return None
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("perdure", {}).get("store")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as reason:
        raise UsageError(f"{path} cannot be read: {reason}") from reason
    if found is not None and not isinstance(found, str):
        raise UsageError(f"store under [tool.perdure] in {path} must be a DSN in quotes")
    return found


def load_runtime(target: str) -> Runtime:
    """The `Runtime` that `module:name` names; the module is imported, from the current directory too."""
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise UsageError(f"{target!r} must be module:name, such as app:runtime for `runtime` in app.py")
    found: Any = _import(module_name)
    for part in name.split("."):
        if not hasattr(found, part):
            raise CommandFailed(f"{module_name} has no {name!r}; write the name of its Runtime after the colon")
        found = getattr(found, part)
    if not isinstance(found, Runtime):
        raise CommandFailed(f"{target} is of type {type(found).__name__}, and must be a Runtime")
    return found


def _import(module_name: str) -> object:
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109 - sys.path has strings
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise CommandFailed(f"there is no module {error.name!r}, neither in this directory nor installed") from error
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.filename}, line {place.lineno}"
        raise CommandFailed(f"importing {module_name} failed: {type(error).__name__}: {error} ({where})") from error


def parse_json(text: str, what: str) -> Any:
    """The value of a JSON text. Raises `UsageError`."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeEncodeError) as reason:
        raise UsageError(
            f"{what} is not JSON ({reason}): {text[:60]!r}; text has quotes of its own, as in '\"text\"'"
        ) from reason
