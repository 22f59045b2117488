"""Processes for cases that need several: real ones, which share nothing with the test and can be killed."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Final

# Forked from a server that has imported what `multiprocessing.set_forkserver_preload` names, and nothing of the test, one is
# there in milliseconds. Where the platform cannot do that, every process begins from nothing.
_METHOD: Final = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


def process_pool(number: int) -> ProcessPoolExecutor:
    """An executor with as many processes."""
    return ProcessPoolExecutor(number, mp_context=multiprocessing.get_context(_METHOD))
