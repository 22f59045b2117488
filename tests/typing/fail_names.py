"""Names that no checker finds. Each line marked `error` is one."""

from __future__ import annotations

from perdure import NoSuchName  # error
from perdure.errors import NoSuchError  # error
from perdure.kv import NoSuchStore  # error
from perdure.testing import no_such_runtime  # error

__all__ = ["NoSuchError", "NoSuchName", "NoSuchStore", "no_such_runtime"]
