"""How a case fails: by an AssertionError that says what was promised, also under `python -O` and without pytest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def equal(actual: object, expected: object, what: str) -> None:
    """Fail unless both are the same."""
    if actual != expected:
        raise AssertionError(f"{what}: {expected!r} was promised, but it is {actual!r}")


def holds(condition: object, what: str) -> None:
    """Fail unless the condition is true."""
    if not condition:
        raise AssertionError(f"promised, but not so: {what}")


@contextmanager
def refused(error: type[Exception] | tuple[type[Exception], ...], what: str) -> Iterator[None]:
    """Fail unless the block raises this error, or one of these."""
    try:
        yield
    except error:
        return
    names = " or ".join(one.__name__ for one in (error if isinstance(error, tuple) else (error,)))
    raise AssertionError(f"{what}: it should have raised {names}, but was accepted")
