"""A pytest plugin that reports which backends were exercised by a whole test run, and fails the run if a required one was not.

A backend is exercised when every case of its contract suite and every test of its process suite ran; one that was skipped or not
collected was not. PERDURE_REQUIRE_BACKENDS names the required ones: `all`, or a list such as `sqlite,postgres`. A run of selected
tests reports and requires nothing.

A contract suite that takes too long may be left to `make chaos`. Elsewhere only its process suite is required, and the report
names the suite that did not run. It also names those of which only some cases ran.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import pytest

from tests.campaign import IS_FULL

VARIABLE: Final = "PERDURE_REQUIRE_BACKENDS"
OUTPUT: Final = "perdure-backends"


class Exercised:
    """The plugin. `contracts` has the contract suite of each backend, as `file::test` in `tests/contract`."""

    def __init__(self, contracts: Mapping[str, str], left_to_chaos: Collection[str] = (), sampled: Collection[str] = ()) -> None:
        self._contracts = contracts
        self._left_to_chaos = left_to_chaos
        self._sampled = sampled
        self._required = parse_required(os.environ.get(VARIABLE, ""), contracts)
        self._is_whole = False
        self._collected: dict[tuple[str, str], set[str]] = defaultdict(set)
        self._ran: set[str] = set()

    def pytest_configure(self, config: pytest.Config) -> None:
        self._is_whole = _is_whole(config)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            if isinstance(item, pytest.Function):
                for suite in self._suites(item):
                    self._collected[suite].add(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # One that failed counts, also in its set-up: it fails the run by itself, and may be repeated.
        if report.failed or (report.when == "call" and not report.skipped):
            self._ran.add(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """With `-n`, the worker processes collect the tests, and this process gets the reports."""
        for suite, name, nodeids in getattr(node, "workeroutput", {}).get(OUTPUT, ()):
            self._collected[suite, name].update(nodeids)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[OUTPUT] = [(*suite, sorted(nodeids)) for suite, nodeids in self._collected.items()]
        elif self._is_whole and self.missing_backends() and exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR  # which repeating the failed tests cannot mend

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._is_whole:
            return
        terminalreporter.write_line(f"backends exercised: {', '.join(map(self._label, self.exercised_backends())) or 'none'}")
        if self.missing_backends():
            required = f"{VARIABLE} requires {', '.join(self.missing_backends())} too"
            terminalreporter.write_line(f"{required}: look above for what was skipped, failed to start or was left out", red=True)

    def exercised_backends(self) -> list[str]:
        """The backends whose two suites ran as a whole; the process suite alone where the other is left to `make chaos`."""
        return [
            name
            for name in self._contracts
            if self._ran_whole("processes", name) and (self._ran_whole("contract", name) or self._is_left_to_chaos(name))
        ]

    def missing_backends(self) -> list[str]:
        """The required backends that were not exercised."""
        return [name for name in self._required if name not in self.exercised_backends()]

    def _ran_whole(self, suite: str, name: str) -> bool:
        collected = self._collected[suite, name]
        return bool(collected) and collected <= self._ran

    def _is_left_to_chaos(self, name: str) -> bool:
        return name in self._left_to_chaos and not self._collected["contract", name] and not IS_FULL

    def _label(self, name: str) -> str:
        if self._is_left_to_chaos(name):
            return f"{name} (its contract suite in make chaos only)"
        is_sampled = name in self._sampled and not IS_FULL
        return f"{name} (every fifth case of its contract suite, all of them in make contracts)" if is_sampled else name

    def _suites(self, item: pytest.Function) -> Iterable[tuple[str, str]]:
        """The suites that a test belongs to: none or one."""
        folder = item.path.parent.name
        if folder == "contract":
            address = f"{item.path.name}::{item.originalname}"
            return [("contract", name) for name, contract in self._contracts.items() if contract == address]
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        return [("processes", str(parameters["backend"]))] if folder == "backends" and "backend" in parameters else []


def parse_required(text: str, known: Iterable[str]) -> list[str]:
    """The names in the variable. Raises `pytest.UsageError` for an unknown one."""
    if text == "all":
        return list(known)
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise pytest.UsageError(f"{VARIABLE} names {', '.join(unknown)}; there are {', '.join(known)}, or write all")
    return names


def _is_whole(config: pytest.Config) -> bool:
    """Whether everything in `testpaths` runs, apart from what a marker expression leaves out."""
    selects = any(config.getoption(name, None) for name in ("keyword", "deselect", "lf", "ignore", "ignore_glob"))
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS and not selects and not config.option.collectonly
