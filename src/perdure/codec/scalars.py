"""The values without parts that JSON has no type for, as text and back.

Each function here is exact: what `read_x(write_x(v))` gives has the type and value of `v`, in any process, whatever its
locale, decimal context or limits. The `read_*` functions take whatever JSON held and raise `ValueError` or `TypeError`.
"""

from __future__ import annotations

import binascii
import re
import sys
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Context, Decimal
from typing import Any, TypeVar
from uuid import UUID

# A process may lower the number of digits it converts to 640, and no further: what is written with more of them in one
# process could be unreadable in another.
_PLAIN_BITS = 2126
# How a decimal is written does not depend on the context of the process, as `str` does.
_DECIMALS = Context(capitals=1)
_ZONE_KEY = re.compile(r"[A-Za-z0-9_+\-]+(/[A-Za-z0-9_+\-]+)*")

T = TypeVar("T", datetime, time)


def is_text(value: str) -> bool:
    """Whether a string can stand in JSON as it is; one with a lone surrogate is no Unicode text."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_plain_int(value: int) -> bool:
    """Whether every Python reads this integer back from decimal digits."""
    return value.bit_length() <= _PLAIN_BITS


def text(content: Any) -> str:
    """The content of a tag that must be a string."""
    if type(content) is not str:
        raise ValueError(f"a string was expected, not {type(content).__name__}")
    return content


def write_bytes(value: bytes | bytearray) -> str:
    return binascii.b2a_base64(value, newline=False).decode()


def read_bytes(content: Any) -> bytes:
    return binascii.a2b_base64(text(content), strict_mode=True)


def read_str(content: Any) -> str:
    return read_bytes(content).decode("utf-8", "surrogatepass")


def write_str(value: str) -> str:
    return write_bytes(value.encode("utf-8", "surrogatepass"))


def read_int(content: Any) -> int:
    value = int(text(content), 16)
    if hex(value) != content:
        raise ValueError("an integer's hexadecimal digits are malformed")
    return value


def read_float(content: Any) -> float:
    # A new object each time: two NaN that were two elements of a set stay two.
    if content not in ("nan", "inf", "-inf"):
        raise ValueError("a float that is no number must be nan, inf or -inf")
    return float(content)


def write_decimal(value: Decimal) -> str:
    return _DECIMALS.to_sci_string(value)


def read_decimal(content: Any) -> Decimal:
    value = Decimal(text(content))
    # A decimal context without traps makes NaN of garbage, and one may write the exponent in lower case.
    if str(value).lower() != text(content).lower():
        raise ValueError("a decimal is malformed")
    return value


def read_uuid(content: Any) -> UUID:
    value = UUID(text(content))
    if str(value) != content:
        raise ValueError("a UUID is malformed")
    return value


def write_timedelta(value: timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def read_timedelta(content: Any) -> timedelta:
    days, seconds, microseconds = (whole(part) for part in content)
    value = timedelta(days, seconds, microseconds)
    if write_timedelta(value) != content:
        raise ValueError("a timedelta is malformed")
    return value


def whole(content: Any) -> int:
    """The content of a tag that must be an integer."""
    if type(content) is not int:
        raise ValueError(f"an integer was expected, not {type(content).__name__}")
    return content


def read_date(content: Any) -> date:
    return date.fromisoformat(text(content))


def write_moment(value: datetime | time) -> Any:
    """The ISO text, or an object when it says too little: a named zone or offset, or `fold`; None for a foreign tzinfo."""
    zone = _write_zone(value.tzinfo)
    if zone is None:
        return None
    if not zone and not value.fold:
        return value.isoformat()
    iso = value.replace(tzinfo=None).isoformat() if zone else value.isoformat()
    return {"iso": iso, **zone, **({"fold": 1} if value.fold else {})}


def read_moment(content: Any, parse: Callable[[str], T]) -> T:
    if type(content) is str:
        return parse(content)
    if type(content) is not dict or not content.keys() <= {"iso", "fold", "zone", "offset", "name", "pydantic"}:
        raise ValueError("a date or time is malformed")
    value = parse(text(content.get("iso")))
    if content.keys() & {"zone", "offset", "pydantic"}:
        value = value.replace(tzinfo=_read_zone(content))
    if "fold" in content:
        value = value.replace(fold=whole(content["fold"]))
    return value


def _write_zone(zone: Any) -> dict[str, Any] | None:
    """What ISO text leaves out about a zone: nothing, its key, its offset and name, or its class; None for a foreign one."""
    if zone is None:
        return {}
    if type(zone) is timezone:
        # The arguments it was made with: (offset,) or (offset, name).
        arguments: tuple[Any, ...] = zone.__getinitargs__()  # type: ignore[attr-defined]
        offset = arguments[0] // timedelta(microseconds=1)
        if len(arguments) == 2:
            name = arguments[1]
            return {"offset": offset, "name": name} if type(name) is str and is_text(name) else None
        # datetime.fromisoformat may drop the fraction of a second of an offset.
        return {"offset": offset} if offset % 1_000_000 else {}
    if type(zone) is _pydantic_zone():
        return {"pydantic": zone.utcoffset(None) // timedelta(seconds=1)}
    zoneinfo = sys.modules.get("zoneinfo")
    if zoneinfo is None or type(zone) is not zoneinfo.ZoneInfo or not _is_named(zone):
        return None
    return {"zone": zone.key}


def _pydantic_zone() -> Any:
    """The class of the fixed offsets that pydantic reads from JSON; None where pydantic is not loaded."""
    return getattr(sys.modules.get("pydantic_core"), "TzInfo", None)


def _is_named(zone: Any) -> bool:
    """Whether a zone is the one that its key names; one that was read from a file may have been given any key."""
    try:
        zone.__reduce__()
    except Exception:  # noqa: BLE001 - a PicklingError, from a module that need not be imported
        return False
    return zone.key is not None


def _read_zone(content: dict[str, Any]) -> tzinfo:
    if "pydantic" in content:
        seconds, make = whole(content["pydantic"]), _pydantic_zone()
        fixed: tzinfo = timezone(timedelta(seconds=seconds)) if make is None else make(seconds)  # which are equal
        return fixed
    if "offset" in content:
        offset = timedelta(microseconds=whole(content["offset"]))
        return timezone(offset, text(content["name"])) if "name" in content else timezone(offset)
    from zoneinfo import ZoneInfo

    key = text(content["zone"])
    if not _ZONE_KEY.fullmatch(key):
        raise ValueError(f"{key[:80]!r} is no time zone")
    try:
        return ZoneInfo(key)
    except Exception as error:  # KeyError, OSError or ValueError, depending on where zoneinfo looked
        raise ValueError(f"time zone {key!r} is not known on this machine") from error
