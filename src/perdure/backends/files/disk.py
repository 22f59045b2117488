"""What is asked of the file system: that it is local, and that what was written is on the disk."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from perdure.errors import PersistenceError

# From linux/magic.h and the file systems' own sources. FUSE is here because it says nothing of what is behind it.
_NOT_LOCAL: Final = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x73757245: "Coda",
    0x564C: "NCP",
    0x01021997: "9P",
    0x00C36400: "Ceph",
    0x0BD00BD0: "Lustre",
    0x01161970: "GFS2",
    0x7461636F: "OCFS2",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0xAAD7AAEA: "PanFS",
    0x65735546: "FUSE",
}
_F_FULLFSYNC: Final = 51  # macOS: fsync alone does not reach the disk


def refuse_network(path: str) -> None:
    """Raise `PersistenceError` when the directory is not, or would not be, on a local file system."""
    there = path
    while not os.path.exists(there):
        there = os.path.dirname(there)
    kind = _NOT_LOCAL.get(file_system_magic(there))
    if kind is not None:
        raise PersistenceError(
            f"files store {path!r}",
            f"it is on {kind}, where locks and fsync do not hold for everybody; use a directory on a local disk, or a database",
        )


def file_system_magic(path: str) -> int:
    """What statfs says the file system is; 0 where nobody says."""
    if not sys.platform.startswith("linux"):
        return 0
    answer = ctypes.create_string_buffer(512)
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(path), answer) != 0:
        return 0
    (kind,) = struct.unpack_from("@l", answer)
    return int(kind) & 0xFFFFFFFF


def boot_id() -> str:
    """Names the time since the machine was started, within which a page once written is there for everybody; "" if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


if sys.platform == "darwin":

    def sync(fd: int) -> None:
        """Have the file's content on the disk."""
        import fcntl

        fcntl.fcntl(fd, _F_FULLFSYNC)

else:

    def sync(fd: int) -> None:
        """Have the file's content on the disk."""
        os.fdatasync(fd)


@contextmanager
def opened(path: str, flags: int) -> Iterator[int]:
    """A descriptor of the file for the length of the block, and not of what a link leads to; a new one is for its owner alone."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def sync_directory(path: str) -> None:
    """Have the directory's entries on the disk."""
    with opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)


def make_directory(path: str) -> None:
    """Have this directory and those above it, on the disk, whoever made them."""
    above = os.path.dirname(path)
    if not os.path.isdir(above):
        make_directory(above)
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    sync_directory(above)


def write_all(fd: int, data: bytes, offset: int) -> None:
    """Put all of `data` at `offset`."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def replace_file(path: str, data: bytes) -> None:
    """Have a file with just this content at `path`, or what was there before, but nothing in between."""
    draft = f"{path}.new"
    with opened(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
        write_all(fd, data, 0)
        sync(fd)
    os.rename(draft, path)
    sync_directory(os.path.dirname(path))


def read_all(fd: int, offset: int) -> bytes:
    """Everything from `offset` on."""
    return b"".join(_parts(fd, offset))


def _parts(fd: int, offset: int) -> Iterable[bytes]:
    while part := os.pread(fd, 1 << 20, offset):
        yield part
        offset += len(part)


def map_error(error: BaseException, path: str) -> BaseException:
    """What the caller gets for an error met while working on the files: `PersistenceError` for the system's."""
    if not isinstance(error, OSError):
        return error
    result = PersistenceError(f"files store {path!r}", f"{error.strerror or error} ({error.filename})")
    result.__cause__ = error
    return result
