"""The file system: whether it is local, how keys become file names, and how what was written gets onto the disk (fsync).

Every key has one file name, and no two keys share one, also on file systems that ignore case or Unicode normalization. A name
is made of lower-case letters, digits and `-`, with every other byte of the key as `_` and two hex digits. It begins with a letter
and `-`, so it is never reserved (`con`, `nul`), hidden, empty or a way up (`..`). A key whose name would be longer than file
systems take is named by its hash; the content of the file says which key it really is.
"""

# Paths are the strings that the kernel takes.
# ruff: noqa: PTH102, PTH110, PTH112, PTH120

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

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

# How the name of a key's file begins, unless it is a hash.
PLAIN_NAME: Final = "k-"
_PLAIN: Final = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-")
_BYTES: Final = tuple(chr(byte) if byte in _PLAIN else f"_{byte:02x}" for byte in range(256))
# File systems take 255 bytes, encrypted ones 143.
_LONGEST: Final = 140


def key_name(key: str) -> str:
    """Return the name of this key's file."""
    return _file_name(PLAIN_NAME, "h-", key)


def namespace_name(namespace: str) -> str:
    """Return the name of this namespace's directory."""
    return _file_name("n-", "m-", namespace)


def _file_name(plain: str, hashed: str, text: str) -> str:
    encoded = text.encode()
    name = plain + "".join([_BYTES[byte] for byte in encoded])
    return name if len(name) <= _LONGEST else hashed + hashlib.sha256(encoded).hexdigest()


def refuse_network(path: str) -> None:
    """Raise `PersistenceError` if the directory is not, or would not be, on a local file system."""
    there = path
    while not os.path.exists(there):
        there = os.path.dirname(there)
    kind = _NOT_LOCAL.get(file_system_magic(there))
    if kind is not None:
        raise PersistenceError(
            f"key-value files {path!r}",
            f"it is on {kind}, where locks and fsync do not work everywhere; use a directory on a local disk, or a database",
        )


def file_system_magic(path: str) -> int:
    """Return the type of the file system according to statfs; 0 where that is unknown."""
    if not sys.platform.startswith("linux"):
        return 0
    answer = ctypes.create_string_buffer(512)
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(path), answer) != 0:
        return 0
    (kind,) = struct.unpack_from("@l", answer)
    return int(kind) & 0xFFFFFFFF


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
    """Open the file for the length of the block. Symbolic links are refused; a new file has mode 0600."""
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


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data` to an empty file."""
    view, offset = memoryview(data), 0
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def read_all(fd: int) -> bytes:
    """Return the whole content of the file."""
    return b"".join(_parts(fd))


def _parts(fd: int) -> Iterable[bytes]:
    offset = 0
    while part := os.pread(fd, 1 << 20, offset):
        yield part
        offset += len(part)
