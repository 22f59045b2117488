"""The file system: whether it is local, how ids become file names, and how what was written gets onto the disk (fsync).

Every id has one file name, and no two ids share one, also on file systems that ignore case or Unicode normalization. A name is
made of lower-case letters, digits and `-`, with every other byte of the id as `_` and two hex digits. It begins with a letter and
`-`, so it is never reserved (`con`, `nul`), hidden, empty or a way up (`..`). An id whose name would be longer than file systems
take is named by its hash; the content of the file says which id it really is.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final
from urllib.parse import unquote

from perdure.errors import PersistenceError

# From linux/magic.h and the file systems' own sources. FUSE is here because it does not say what is behind it.
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

_PLAIN: Final = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-")
_BYTES: Final = tuple(chr(byte) if byte in _PLAIN else f"_{byte:02x}" for byte in range(256))
# File systems take 255 bytes, encrypted ones 143.
_LONGEST: Final = 140


def run_name(run_id: str) -> str:
    """The directory of this run."""
    return _file_name("r-", "s-", run_id)


def run_id_of(name: str) -> str | None:
    """The id of the run in this directory, or None when it is named by its hash."""
    if not name.startswith("r-"):
        return None
    try:
        return unquote(name.removeprefix("r-").replace("_", "%"), errors="strict")
    except UnicodeDecodeError:
        return None


def namespace_name(prefix: str) -> str:
    """The directory of this namespace."""
    return _file_name("n-", "m-", prefix)


def _file_name(plain: str, hashed: str, text: str) -> str:
    encoded = text.encode()
    name = plain + "".join([_BYTES[byte] for byte in encoded])
    return name if len(name) <= _LONGEST else hashed + hashlib.sha256(encoded).hexdigest()


def refuse_network(path: str) -> None:
    """Raise `PersistenceError` when the directory is not, or would not be, on a local file system."""
    there = path
    while not os.path.exists(there):
        there = os.path.dirname(there)
    kind = _NOT_LOCAL.get(file_system_magic(there))
    if kind is not None:
        raise PersistenceError(
            f"files store {path!r}",
            f"it is on {kind}, where locks and fsync do not work everywhere; use a directory on a local disk, or a database",
        )


def file_system_magic(path: str) -> int:
    """The type of the file system according to statfs; 0 where that is unknown."""
    if not sys.platform.startswith("linux"):
        return 0
    answer = ctypes.create_string_buffer(512)
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(path), answer) != 0:
        return 0
    (kind,) = struct.unpack_from("@l", answer)
    return int(kind) & 0xFFFFFFFF


def boot_id() -> str:
    """The id of this boot of the machine, "" if unknown. Within one boot, written pages are seen by all processes unsynced."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


if sys.platform == "darwin":

    def sync(fd: int) -> None:
        """Wait until the file's content is on the disk."""
        import fcntl

        fcntl.fcntl(fd, _F_FULLFSYNC)

else:

    def sync(fd: int) -> None:
        """Wait until the file's content is on the disk."""
        os.fdatasync(fd)


@contextmanager
def open_file(path: str, flags: int) -> Iterator[int]:
    """A descriptor of the file for the length of the block. Symbolic links are refused; a new file has mode 0600."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def sync_directory(path: str) -> None:
    """Wait until the directory's entries are on the disk."""
    with open_file(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)


def make_directory(path: str) -> None:
    """Create this directory and those above it, and sync them, also those that another process has just created."""
    above = os.path.dirname(path)
    if not os.path.isdir(above):
        make_directory(above)
    with suppress(FileExistsError):
        os.mkdir(path, 0o700)
    sync_directory(above)


def write_all(fd: int, data: bytes, offset: int) -> None:
    """Write all of `data` at `offset`."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def replace_file(path: str, data: bytes) -> None:
    """Replace the file at `path` atomically: a crash leaves the old content or the new one."""
    draft = f"{path}.new"
    with open_file(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as fd:
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
    """What the caller gets for this error: a `PersistenceError` for an `OSError`, others as they are."""
    if not isinstance(error, OSError):
        return error
    result = PersistenceError(f"files store {path!r}", f"{error.strerror or error} ({error.filename})")
    result.__cause__ = error
    return result
