"""How often a randomised or crashing test repeats: a tenth by default, in full under `make chaos`."""

from __future__ import annotations

import os


def times(full: int) -> int:
    """`full` when PERDURE_CHAOS=1, otherwise a tenth of it, and never less than one."""
    return max(1, full if os.environ.get("PERDURE_CHAOS") == "1" else full // 10)
