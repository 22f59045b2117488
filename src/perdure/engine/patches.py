"""`ctx.patched`: whether a run takes code that was inserted after the run had begun.

The journal answers it. A run whose journal goes on after the call has been here under the old code and keeps to it; a run whose
journal ends here has not, so it takes the new code, and that is recorded for its replays.
"""

from __future__ import annotations

from perdure.engine.drive import Drive
from perdure.engine.keyed_calls import CtxCall


async def is_patched(drive: Drive, key: str, name: str) -> bool:
    """Whether the run takes the new code. Decided by the first call with this name, for the whole run."""
    calls = drive.calls
    await calls.admitted()
    known = calls.patches.get(key)
    if known is not None:
        return known
    call = calls.begin(key, "patch")
    if drive.results.is_next(key) and not call.was_cancelled:
        drive.results.take()
        calls.patches[key] = True
        return True
    with call:
        found = await calls.find_patch(call)
        calls.patches[key] = await _record(drive, call, name) if found is None else found
    return calls.patches[key]


async def _record(drive: Drive, call: CtxCall, name: str) -> bool:
    now = drive.clock.now()
    entry = drive.recorder.append(call.key, name, kind="patch", payload=b"true", started_at=now, ended_at=now)
    if not drive.results.reaches_body_at_once(entry):
        await drive.calls.wait_for_delivery(call, entry)
    return True
