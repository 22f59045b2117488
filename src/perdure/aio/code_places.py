"""Where the code of users is right now: in a task that does not end, and in a thread that does not come back.

What helps is a line of the user's own. So frames of perdure, of the standard library and, where there are others, of installed
packages are passed over.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

_OWN: Final = str(Path(__file__).parent.parent) + os.sep
_LIBRARY: Final = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
_INSTALLED: Final = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
# Modules in which a thread stands while somebody debugs it.
_DEBUGGERS: Final = frozenset({"bdb", "pdb", "pydevd", "debugpy"})


class CodePlace(NamedTuple):
    """A line of code, and the function that it is in."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


def place_in_thread(thread_id: int) -> CodePlace | None:
    """Where this thread is. None when it has ended, or is in no code but perdure's and that of the standard library."""
    return innermost_place(list(_frames_of(thread_id))[::-1])


def is_in_debugger(thread_id: int) -> bool:
    """Whether somebody debugs this thread just now."""
    return any(str(frame.f_globals.get("__name__")).partition(".")[0] in _DEBUGGERS for frame in _frames_of(thread_id))


def _frames_of(thread_id: int) -> Iterator[FrameType]:
    """The frames of a thread, the innermost first."""
    frame = sys._current_frames().get(thread_id)  # noqa: SLF001 - documented
    while frame is not None:
        yield frame
        frame = frame.f_back


def innermost_place(frames: list[FrameType]) -> CodePlace | None:
    """The place in the last of these frames that is the user's; without one, in the last that is an installed package's."""
    others = [frame for frame in frames if not _is_library(frame.f_code.co_filename)]
    own = [frame for frame in others if not any(part in frame.f_code.co_filename for part in _INSTALLED)]
    found = next(iter((own or others)[-1:]), None)
    return None if found is None else CodePlace(found.f_code.co_filename, found.f_lineno, found.f_code.co_qualname)


def _is_library(file: str) -> bool:
    if file.startswith((_OWN, "<frozen ")):
        return True
    return file.startswith(_LIBRARY) and not any(part in file for part in _INSTALLED)
