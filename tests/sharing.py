"""How the tests are shared out where several processes run them (`pytest -n`): by file, the long ones first.

A file stays together, so that what its tests share is made once. A long file that comes last would keep one process busy and the
others waiting, so those are named here, roughly in the order of their lengths; what is not named is short. What needs MongoDB,
whose server is emulated and a burden by itself, goes to one process.
"""

from __future__ import annotations

from typing import Final

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]  # it ships no types

MONGO: Final = "what needs MongoDB"
LONGEST_FIRST: Final = (
    MONGO,
    "tests/backends/test_silence.py",
    "tests/backends/test_lost_replies.py",
    "tests/backends/test_patterns_killed.py",
    "tests/contract/test_key_value.py",
    "tests/backends/test_worker_processes.py",
    "tests/backends/test_restarts.py",
    "tests/backends/test_zombies.py",
    "tests/backends/postgres/test_pgbouncer.py",
    "tests/backends/test_server_restarts.py",
    "tests/contract/test_postgres.py",
    "tests/kv/test_processes.py",
    "tests/contract/test_mysql.py",
    "tests/backends/test_starting_together.py",
    "tests/backends/test_killing.py",
    "tests/backends/test_random_sagas_killed.py",
    "tests/migration/test_killed.py",
    "tests/backends/test_fleets.py",
    "tests/backends/test_ids.py",
    "tests/backends/test_costs.py",
    "tests/backends/test_forks.py",
    "tests/backends/redis/test_servers.py",
    "tests/backends/user_defined/test_own_stores_killed.py",
    "tests/engine/test_branches_replay_alike.py",
    "tests/fuzz/test_fuzz.py",
    "tests/backends/test_random_programs_killed.py",
    "tests/engine/test_random_programs.py",
    "tests/sagas/test_random_sagas.py",
    "tests/engine/test_late_failures.py",
    "tests/worker/test_sigterm.py",
    "tests/test_docs.py",
    "tests/test_examples.py",
    "tests/test_typing.py",
)


class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # of an unknown type
    """Gives a process one unit after the other, in the order in which the tests were collected."""

    def __init__(self, config: pytest.Config, log: object) -> None:
        config.option.loadscopereorder = False  # which would put the unit with the most tests first
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


def unit_of(nodeid: str) -> str:
    """What a test stays together with."""
    return MONGO if "mongo" in nodeid.lower() else nodeid.partition("::")[0]


def longest_first(items: list[pytest.Item]) -> None:
    """Bring the tests into the order in which they are given out."""
    places = {unit: place for place, unit in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(unit_of(item.nodeid), len(places)))
