"""`Codec`: values to bytes and back, exactly, with limits.

Most values are plain JSON, and for those the tree of `tagging` is the value itself. Whether that is so is decided in C: what
would be read back must equal what was given, and `marshal` must accept it. Why that is exact:

- marshal refuses every subclass, enum and object, whatever their `==` says, except that it takes anything with a buffer;
  msgspec refuses those but bytes, bytearray and memoryview themselves. So only builtin types are left. (From Python 3.12 on
  a StrEnum could be given a `__buffer__` of its own, and would come back as text.)
- msgspec writes bool, int and float differently and reads each back as what it was, -0.0 and integers beyond 64 bits
  included; nan and inf it writes as null, which equals neither. Dicts keep their order.
- A tuple, set, bytes, or a dict key that is no text comes back as a list or text, which never equals it.
- A cycle or a deep value makes one of the three raise.

Nothing is ever loaded from marshal, and no value is written much further than the limit (`encode_bounded`). Two things are not
kept, on either way: that two parts were one object, and the payload bits of a NaN.
"""

from __future__ import annotations

import contextlib
import inspect
import marshal
from collections.abc import Callable
from hashlib import blake2b
from typing import Any
from zlib import crc32

import msgspec

from perdure.codec.checking import conform
from perdure.codec.checksums import find_types, four_bytes, pack_checksum
from perdure.codec.hints import class_for, name_for
from perdure.codec.losses import LOST, Loss
from perdure.codec.shapes import error_text, name_of
from perdure.codec.tagging import NotAwaited, Tagger, limit_text
from perdure.codec.untagging import Untagger
from perdure.errors import ValueNotStorable

_encode = msgspec.json.Encoder().encode
_encode_sorted = msgspec.json.Encoder(order="deterministic").encode
_decode = msgspec.json.Decoder().decode
_SCALARS = frozenset({type(None), bool, int, float, str})
# A list of these is the same again when it is read back.
_EXACT, _FEW = frozenset({type(None), bool, int, str}), 16
# As numbers, because one byte is found in C without making an object of it.
_BRACE, _DOLLAR = b"{$"
_TAG = b'"$'
# The first buffer of `encode_bounded` fits nearly every value. With this growth, writing a part of a larger value in vain and
# clearing a buffer that is too large for it cost about the same.
_FIRST_BUFFER, _BUFFER_GROWTH = 1024, 8
_PER_ITEM = 128
_encode_into = msgspec.json.Encoder().encode_into
_encode_sorted_into = msgspec.json.Encoder(order="deterministic").encode_into
_SETS = frozenset({set, frozenset})
# A tuple's tree is this, its items and a brace.
_TUPLE = b'{"$tuple":'
_CRC_OF_TUPLE = crc32(_TUPLE)


class Codec:
    """Writes values as JSON and reads them back with the same types; a value beyond the limits is refused."""

    __slots__ = ("_short", "max_bytes", "max_depth")

    def __init__(self, *, max_bytes: int = 8 * 2**20, max_depth: int = 200) -> None:
        self.max_bytes = max_bytes
        self.max_depth = max_depth
        # What is no longer than this is neither too deep nor has a number with too many digits.
        self._short = min(2 * max_depth, 640)

    def dump(self, value: Any, hint: Any = Any, *, losses: list[Loss] | None = None, path: str = "value") -> tuple[bytes, Any]:
        """The value as JSON, and as `load` will return it: a copy that shares nothing mutable with the original.

        A part that cannot be stored raises `ValueNotStorable` with its path; when `losses` is given the part becomes None
        instead, is noted there, and is marked in the JSON, so `tree_of` can find it. Values past the size or depth limit
        are refused in either case.
        """
        data, copy = self._dump_plain(value) or self._dump_tagged(value, hint, losses, path)
        if len(data) > self.max_bytes:
            raise ValueNotStorable(path, f"it takes {len(data):,} bytes, {limit_text(self.max_bytes)}")
        return data, copy

    def load(self, data: bytes, hint: Any = Any) -> Any:
        """The value that was dumped; `ValueError` when these bytes are not what `dump` wrote for an allowed value."""
        if len(data) > self.max_bytes:
            raise ValueError(f"the data is longer than {self.max_bytes:,} bytes (max_bytes)")
        try:
            tree = _decode(data)
            if type(tree) is not dict and type(tree) is not list:
                return tree
            # What msgspec wrote it writes again, so other bytes mean a repeated key, or JSON that came another way.
            as_written = _BRACE not in data or _encode(tree) == data
            if not as_written:
                refuse_repeated_keys(data)
            if as_written and not _may_have_tags(data) and not self._too_deep(data, tree):
                return tree
            return Untagger(class_for(hint), self.max_depth).value(tree)
        except MemoryError:  # no fault of the data
            raise
        except RecursionError as error:
            raise ValueError("the data is nested too deeply to be read") from error
        except Exception as error:  # what a malformed tree makes a constructor raise is as various as the constructors
            raise ValueError(f"the data cannot be read: {error_text(error)}") from error

    def digest(self, value: Any) -> bytes | None:
        """16 bytes that are equal for equal values of equal types, in every process; None for what could not be stored."""
        try:
            return blake2b(self._canonical(value), digest_size=16).digest()
        except Exception:  # noqa: BLE001 - refused, or code of the user's class raised: either way there is no canonical form
            return None

    def checksum(self, args: tuple[Any, ...]) -> bytes | None:
        """A short sum for `have_changed`, which may prove that a step is called with other arguments. None if there is none.

        An equal sum proves nothing. Arguments that differ within four consecutive bytes always have different sums; of all others
        one pair in 2**32 has the same.
        """
        try:
            short = self._few_scalars(args)
            if short is not None:
                return four_bytes(crc32(short, _CRC_OF_TUPLE))
            types = find_types(args)
            return pack_checksum(self._sum(args, types), types)
        except Exception:  # noqa: BLE001 - as above
            return None

    def _sum(self, args: tuple[Any, ...], types: set[type]) -> int:
        """The sum of the arguments as msgspec writes them, objects included, or else in their canonical form.

        msgspec sorts sets by `<`, which does not order every kind of element.
        """
        if types.isdisjoint(_SETS):
            try:
                # A long list, such as an agent's history, gets a buffer into which it probably fits.
                size = _FIRST_BUFFER + _PER_ITEM * sum([len(arg) for arg in args if type(arg) is list])
                data = encode_bounded(args, self.max_bytes, min(size, self.max_bytes), encode_into=_encode_sorted_into)
            except Exception:  # noqa: BLE001 - of a kind that it does not write
                data = None
            if data is not None:
                # In JSON a tuple is a list.
                kinds = ",".join([type(arg).__name__ for arg in args if type(arg) not in _EXACT])
                return crc32(data, crc32(kinds.encode("utf-8", "surrogatepass"), _CRC_OF_TUPLE))
        return crc32(self._canonical(args)[:-1])

    def conform(self, value: Any, hint: Any) -> Any:
        """A value from outside as its annotation describes it; `ValueError` with path and reason when it does not fit."""
        return conform(value, hint, "value")

    def _dump_plain(self, value: Any) -> tuple[bytes, Any] | None:
        """The value's JSON and its copy if its tree is the value itself, otherwise None."""
        try:
            if (kind := type(value)) in _SCALARS:
                data = _encode(value)
                # null for a float is nan or inf; the digits of an integer may be too many for another process.
                is_plain = (kind is not float or data != b"null") and (kind is not int or len(data) < 640)
                return (data, value) if is_plain else None
            if kind is not list and kind is not dict:
                return None
            if kind is list and (short := self._few_scalars(value)) is not None:
                return short, value.copy()
            if (within := encode_bounded(value, self.max_bytes)) is None:
                return None
            data, copy = within, _decode(within)
            # Compared first: marshal sorts sets, in time that doubles with each level, and what equals JSON has no sets.
            if copy != value:
                return None
            marshal.dumps(value, 2)
        except Exception:  # noqa: BLE001 - not plain, too deep, circular, or no Unicode: the tagging walk finds out which and where
            return None
        if _may_have_tags(data):
            return None
        is_plain = len(data) <= self._short or not (_has_long_number(data) or self._too_deep(data, copy))
        return (data, copy) if is_plain else None

    def _few_scalars(self, value: list[Any] | tuple[Any, ...]) -> bytes | None:
        """The JSON of a list of a few plain scalars, such as the arguments of a step, for which no further check is needed."""
        if len(value) > _FEW:
            return None
        for item in value:
            if type(item) not in _EXACT:
                return None
        try:
            data = _encode(value)
        except (ValueError, OverflowError):  # no Unicode, or more digits than msgspec writes
            return None
        return None if len(data) >= self._short or (_DOLLAR in data and _TAG in data) else data

    def _dump_tagged(self, value: Any, hint: Any, losses: list[Loss] | None, path: str) -> tuple[bytes, Any]:
        tagger = Tagger(name_for(hint), self.max_depth, room=self.max_bytes, losses=losses)
        try:
            if (data := encode_bounded(tagger.tag(value, path), self.max_bytes)) is None:
                raise ValueNotStorable(path, f"it takes {limit_text(self.max_bytes)}")
            return data, Untagger(class_for(hint), self.max_depth).value(_decode(data))
        except (ValueNotStorable, MemoryError) as refusal:
            if isinstance(refusal, NotAwaited):
                self._close_unawaited(value)
                raise ValueNotStorable(*refusal.args) from None
            raise
        except RecursionError as error:
            raise ValueNotStorable(path, "it is nested too deeply for the stack that is left") from error
        except (
            Exception
        ) as error:  # code of the user's classes runs here: __hash__, __post_init__ of a Struct, _missing_ of an Enum
            if losses is None:
                raise ValueNotStorable(path, f"it could not be rebuilt: {type(error).__name__}: {error_text(error)}") from error
            losses.append(Loss(path, "encode-failed"))
            return _encode({LOST: "encode-failed"}), None

    def _close_unawaited(self, value: Any) -> None:
        """Close the coroutines in a value that is refused for them, since Python warns of each that nobody has awaited."""
        found: list[Any] = []
        with contextlib.suppress(Exception):  # of the user's classes
            Tagger(name_of, self.max_depth, room=self.max_bytes, losses=[], unawaited=found).tag(value, "value")
        for each in found:
            if inspect.iscoroutine(each) and inspect.getcoroutinestate(each) == inspect.CORO_CREATED:
                each.close()

    def _canonical(self, value: Any) -> bytes:
        is_tuple = type(value) is tuple
        items = list(value) if is_tuple else value
        if (plain := self._dump_plain(items)) is None:
            return _encode_sorted(Tagger(name_of, self.max_depth, room=self.max_bytes, canonical=True).tag(value, "value"))
        data = _encode_sorted(items) if _BRACE in plain[0] else plain[0]
        return _as_tuple(data) if is_tuple else data

    def _too_deep(self, data: bytes, plain: Any) -> bool:
        # Each level takes two bytes and opens one bracket, so the length and the brackets decide for nearly every value.
        if len(data) <= 2 * self.max_depth or data.count(b"[") + data.count(b"{") <= self.max_depth:
            return False
        return _is_deeper(plain, self.max_depth)


def _as_tuple(items: bytes) -> bytes:
    """The tree of a tuple with these items, without the walk."""
    return _TUPLE + items + b"}"


def _may_have_tags(data: bytes) -> bool:
    return _DOLLAR in data and _TAG in data


def _is_deeper(plain: Any, limit: int) -> bool:
    level = [plain]
    for _ in range(limit + 1):
        inside = [part.values() if type(part) is dict else part for part in level if type(part) is dict or type(part) is list]
        if not inside:
            return False
        level = [part for parts in inside for part in parts if type(part) is dict or type(part) is list]
    return True


def _has_long_number(data: bytes) -> bool:
    # Python may refuse to convert more than 640 digits, so such integers are tagged. That many digits in a row fill at
    # least one of these blocks.
    return len(data) > 640 and any(data[start : start + 320].isdigit() for start in range(0, len(data), 320))


def encode_bounded(
    value: Any, limit: int, size: int = _FIRST_BUFFER, *, encode_into: Callable[[Any, bytearray], None] = _encode_into
) -> bytes | None:
    """The value's JSON, or None when it is much longer than `limit`; memory for many times the limit is never taken.

    JSON that is only a little longer is returned, so the caller can report its length.

    A value may refer to one part a billion times, and a step may return a whole table, so the JSON of a value that fits into
    memory need not fit. msgspec has no limit of its own, but it writes into a bytearray, and a bytearray with an exported
    buffer cannot grow.
    """
    buffer = bytearray(size)
    _export = memoryview(buffer)
    try:
        encode_into(value, buffer)
    except BufferError:
        # msgspec asks for some room before it knows what it needs, hence twice.
        enough = 2 * limit + _FIRST_BUFFER
        if size >= enough:
            return None
        return encode_bounded(value, limit, min(size * _BUFFER_GROWTH, enough), encode_into=encode_into)
    return bytes(buffer)


def refuse_repeated_keys(data: bytes) -> None:
    """Raise `ValueError` if an object in this JSON has a key twice, which msgspec accepts silently."""
    import json

    json.loads(data, object_pairs_hook=_check_pairs)


def _check_pairs(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"the key {key[:80]!r} stands twice in one object")
        seen.add(key)
