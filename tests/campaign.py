"""How often a randomised or crashing test repeats: a tenth by default, in full under `make chaos`."""

from __future__ import annotations

import os
from typing import Final

IS_FULL: Final = os.environ.get("PERDURE_CHAOS") == "1"


def times(full: int) -> int:
    """`full` when PERDURE_CHAOS=1, otherwise a tenth of it, and never less than one."""
    return max(1, full if IS_FULL else full // 10)
