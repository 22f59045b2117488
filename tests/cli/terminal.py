"""The command as a person sees it: on a terminal of 100 columns."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from typing import Final

PERDURE: Final = (sys.executable, "-m", "perdure")
_STYLES: Final = re.compile(r"\x1b\[[0-9;]*m")


def on_terminal(*arguments: str, columns: int = 100) -> str:
    """Return what the command shows, without colours."""
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")} | {"TERM": "xterm"}
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    with subprocess.Popen([*PERDURE, *arguments], env=environment, stdin=theirs, stdout=theirs, stderr=theirs):
        os.close(theirs)
        shown = _read(ours)
    os.close(ours)
    return _STYLES.sub("", shown.replace("\r\n", "\n"))


def _read(terminal: int) -> str:
    """Return everything that is written until the last writer has left."""
    found = b""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # Linux says so that there is no writer
            part = b""
        if not part:
            return found.decode()
        found += part
