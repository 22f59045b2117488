"""A disk that loses power: `python power.py DIRECTORY` does `write_everything`, and before every sync copies what is safe then.

Safe is of a file what it held when it was last synced, and of a directory the entries it had then; a file that was never
synced is empty. The copies are DIRECTORY/<n>/runs, beside a file with the words that were said until then. This is the harshest
disk: a real one also has some of what was not synced, which killing the process shows.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from urllib.parse import quote

from perdure.backends.files import disk, log, namespace
from tests.backends import disk_child

AT = Path(sys.argv[1])
ROOT = AT / "runs"


class Platter:
    """What is safe, by the numbers of files and directories."""

    def __init__(self) -> None:
        self.files: dict[int, bytes] = {}
        self.entries: dict[int, dict[str, tuple[int, bool]]] = {}
        self.said: list[str] = []
        self.copies = 0

    def copy(self) -> None:
        target = AT / str(self.copies)
        target.mkdir()
        self.copies += 1
        (target / "said").write_text("\n".join(self.said))
        if ROOT.exists():
            self._copy_directory(ROOT.stat().st_ino, target / "runs")

    def _copy_directory(self, number: int, target: Path) -> None:
        target.mkdir()
        for name, (entry, is_directory) in self.entries.get(number, {}).items():
            if is_directory:
                self._copy_directory(entry, target / name)
            else:
                (target / name).write_bytes(self.files.get(entry, b""))

    def sync(self, fd: int) -> None:
        self.copy()
        os.fdatasync(fd)
        self.files[os.fstat(fd).st_ino] = Path(f"/proc/self/fd/{fd}").read_bytes()

    def sync_directory(self, path: str) -> None:
        self.copy()
        with os.scandir(path) as found:
            self.entries[Path(path).stat().st_ino] = {entry.name: (entry.inode(), entry.is_dir()) for entry in found}


def main() -> None:
    platter = Platter()
    for module in (disk, log):
        vars(module)["sync"] = platter.sync
    for module in (disk, log, namespace):
        vars(module)["sync_directory"] = platter.sync_directory
    disk_child.say = lambda *words: platter.said.append(" ".join(map(str, words)))
    asyncio.run(disk_child.write_everything(f"files:{quote(str(ROOT))}"))
    platter.copy()
    print(platter.copies)


if __name__ == "__main__":
    main()
