"""An operator of the runs of one program: what is done to them, how they are brought to an end, and how they ended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from perdure import Runtime
from perdure.errors import PerdureError
from perdure.model.records import UNFINISHED, RunInfo
from tests.sagas.bodies import Process, main_flow
from tests.sagas.judge import Ended, Violation
from tests.sagas.programs import Op, Program, Version, edited, retiring

# A program has a few runs, and their children and forks.
_MOST_RUNS = 1000


class Operator:
    """Operates on the runs of a program through a client, and remembers what it has deployed."""

    def __init__(
        self, runtime: Runtime, program: Program, prefix: str = "", note: Callable[[str], None] = lambda _: None
    ) -> None:
        self.runtime = runtime
        self.program = program
        self.prefix = prefix
        self._note = note
        self.versions: list[Version] = [program.version]
        self.current = 0
        # How many of the versions were deployed before the runs had to be brought to an end.
        self._deployed = 1
        # The forks, each with the id of the run that it has taken over from.
        self._forks: dict[str, str | None] = {}
        self._abandoned: set[str] = set()
        self._retried: set[str] = set()

    async def start(self, process: Process) -> None:
        """Start the runs of the program."""
        flow = main_flow(process, self.program.version)
        for start in self.program.starts:
            options: dict[str, Any] = {} if start.deadline is None else {"deadline": start.deadline * process.pace}
            await self.runtime.start(flow, 0, id=f"{self.prefix}{start.run_id}", **options)

    def deploy(self, op: Op) -> bool:
        """Change the code as this says; False if this does something else."""
        if op.kind == "deploy":
            self.versions.append(edited(self.versions[self.current], op.what, op.n))
            self.current = len(self.versions) - 1
            self._deployed = len(self.versions)
        elif op.kind == "rollback":
            self.current = max(0, self.current - 1)
        return op.kind in ("deploy", "rollback")

    async def roll_back(self) -> None:
        """Go to the version before this one, and from the first to the last."""
        self.current = (self.current - 1) % len(self.versions)
        self._note(f"version {self.current}")

    async def repair(self) -> None:
        """Deploy what the problems of the runs ask for: each version again, which knows how to undo what it does not reach.

        Code that has not changed may need it too: after a failed compensation and a retry, it may fail before it gets that far.
        """
        keys = set[str]()
        for info in await self._list(status=UNFINISHED):
            keys |= {*(await self.runtime.describe(info.id)).not_undone}
        self.versions += [retiring(version, sorted(keys), undoes=True) for version in self.versions[: self._deployed]]
        self.current = len(self.versions) - 1
        self._note(f"version {self.current} undoes what was retired: {sorted(keys)}")

    async def change_runs(self, op: Op) -> None:
        """Do this to the run that it picks, or to all, if they can take it."""
        ids = sorted(info.id for info in await self._list())
        for run_id in [ids[int(op.pick * len(ids))]] if op.pick < 1 else ids:
            try:
                await self._change_run(op, run_id)
            except (PerdureError, ValueError) as refusal:
                self._note(f"{op.kind} {run_id!r} refused: {refusal}")
            else:
                self._note(f"{op.kind} {run_id!r}")

    async def _change_run(self, op: Op, run_id: str) -> None:
        match op.kind:
            case "cancel":
                await self.runtime.cancel(run_id)
            case "abandon":
                await self.runtime.cancel(run_id, undo=False)
                self._abandoned.add(run_id)
            case "retry":
                await self.runtime.retry(run_id)
                self._abandoned.discard(run_id)
                self._retried.add(run_id)
            case "signal":
                await self.runtime.signal(run_id, op.what)
            case "fork":
                await self._fork(op, run_id)

    async def _fork(self, op: Op, run_id: str) -> None:
        keys = list(dict.fromkeys(entry.key for entry in await self.runtime.store.journal(run_id) if entry.key))
        keys = [key for key in keys if not key.startswith("%")]
        if keys:
            new_id = f"{self.prefix}x{len(self._forks)}"
            takes_over = op.what == "take over"
            await self.runtime.fork(run_id, from_step=keys[op.n % len(keys)], id=new_id, take_over=takes_over)
            self._forks[new_id] = run_id if takes_over else None

    async def push_on(self) -> bool:
        """Send the runs what they wait for, and have those with a problem tried again at once. Whether one has not ended."""
        left = await self._list(status=UNFINISHED)
        for info in left:
            with contextlib.suppress(PerdureError):
                for awaited in info.waiting_for:
                    if awaited.kind == "signal":
                        await self.runtime.signal(info.id, awaited.name)
                if info.problem is not None:
                    await self.runtime.unhold(info.id)
        return bool(left)

    async def hanging(self) -> list[Violation]:
        """The runs that have not ended, each with its journal."""
        return [Violation("hang", await self._describe(info)) for info in await self._list(status=UNFINISHED)]

    async def ended(self) -> dict[str, Ended]:
        """How the runs have ended, by their ids."""
        return {info.id: await self._ended(info) for info in await self._list()}

    async def statuses(self) -> list[str]:
        return [info.status for info in await self._list()]

    async def _list(self, **selection: Any) -> list[RunInfo]:
        return await self.runtime.list(prefix=self.prefix, limit=_MOST_RUNS, **selection)

    async def _ended(self, info: RunInfo) -> Ended:
        described = await self.runtime.describe(info.id)
        value = described.value if info.status == "completed" else None
        is_main = described.parent_id is None and isinstance(described.input[0][0], int)
        return Ended(
            info,
            receipts=[(thing, key) for thing, key in value or []],
            not_undone=set(described.not_undone),
            error="" if described.error is None else f"{described.error.type} {described.error.message}",
            again=described.input[0][0] if is_main else 0,
            parent_id=described.parent_id,
            parent_key=described.parent_key or "",
            place=_place_of(described.input) if described.parent_id is not None else "",
            takes_over=self._forks.get(info.id),
            was_retried=info.id in self._retried,
            is_abandoned=info.id in self._abandoned,
        )

    async def _describe(self, info: RunInfo) -> str:
        waits = ", ".join(map(str, info.waiting_for)) or "nothing"
        journal = [
            f"{entry.phase} {entry.key}{'' if entry.ok else ' failed'}" for entry in await self.runtime.store.journal(info.id)
        ]
        said = f"run {info.id!r} is {info.status} and waits for {waits}, wake_at={info.wake_at}, problem={info.problem!r}"
        return f"{said}, journal: {'; '.join(journal)}"


def _place_of(given: Any) -> str:
    """The place that the parent of a child has given it, alone or in the item of a map."""
    first: Any = given[0][0]
    return str(first[0] if isinstance(first, list) else first)
