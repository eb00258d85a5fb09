"""A wire format for operations, made of their annotations alone: what it can carry, a client in another process could send.

A codec turns a value of an annotated type into plain lists, numbers, text and bytes, and back. It refuses a value that is not of the type:
so an annotation that says less than the truth is found.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from enum import Enum
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, Union

from headwater.catalog.operations import Operation
from headwater.catalog.parts import Staged, Term, dump_term, load_term
from headwater.catalog.refusals import dump_error, load_error
from headwater.catalog.targets import RollNeeded, RouteStale, ScaledMeanwhile
from headwater.errors import HeadwaterError, InvalidRequestError

#: Raised by operations beside errors: they say what the caller is to do, and have no facts.
SIGNALS = {kind.__name__: kind for kind in (RollNeeded, RouteStale, ScaledMeanwhile)}
_PLAIN = (bool, int, float, str, type(None))


class Codec(NamedTuple):
    """`fits` says whether a value is of the type, `encode` makes it plain, `decode` makes the value again."""

    fits: Callable[[Any], bool]
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


@cache
def codec(kind: Any) -> Codec:
    """The codec of a type. TypeError if there is none: no client could send it."""
    origin = typing.get_origin(kind)
    if kind is Any:
        return Codec(_is_plain, _encode_any, _decode_any)
    if origin is Literal:
        return Codec(lambda value: value in typing.get_args(kind), _same, _same)
    if origin in (Union, types.UnionType):
        return _union([codec(member) for member in typing.get_args(kind)])
    if origin is tuple and typing.get_args(kind)[1:] != (...,):
        return _fields([codec(part) for part in typing.get_args(kind)], tuple, list)
    if origin in (tuple, list, set, frozenset, Sequence, Collection):
        return _items(codec(typing.get_args(kind)[0]), origin)
    if origin in (dict, Mapping):
        return _mapping(*[codec(part) for part in typing.get_args(kind)])
    return _single(kind)


def _single(kind: Any) -> Codec:
    if kind in (None, type(None)):
        return Codec(lambda value: value is None, _same, _same)
    if kind is int:
        # MessagePack has numbers of 64 bits.
        return Codec(lambda value: type(value) is int, lambda value: value if abs(value) < 1 << 63 else str(value), int)
    if kind is float:
        return Codec(lambda value: type(value) in (int, float), float, float)
    if kind in (bool, str):
        return Codec(lambda value: type(value) is kind, _same, _same)
    if kind is bytes:
        return Codec(lambda value: isinstance(value, bytes | memoryview), bytes, _same)
    if kind is datetime:
        return Codec(lambda value: isinstance(value, datetime), datetime.isoformat, datetime.fromisoformat)
    if kind is Staged:
        return Codec(lambda _: False, _same, _same)  # What a transaction staged is in the catalog, and never sent.
    if not isinstance(kind, type):
        raise TypeError(f"{kind} can't be sent")
    if issubclass(kind, Enum):
        return Codec(lambda value: isinstance(value, kind), lambda value: value.value, kind)
    if kind is Term:
        return Codec(lambda value: isinstance(value, Term), lambda term: [*dump_term(term), term.block], lambda plain: load_term(*plain))
    if issubclass(kind, HeadwaterError):
        return Codec(lambda value: isinstance(value, kind), encode_error, decode_error)
    if hasattr(kind, "_fields"):
        hints = typing.get_type_hints(kind)
        return _fields([codec(hints[name]) for name in kind._fields], lambda values: kind(*values), list, kind)
    if dataclasses.is_dataclass(kind):
        hints = _hints(kind)
        names = [field.name for field in dataclasses.fields(kind)]
        fields = [codec(hints[name]) for name in names]
        return _fields(fields, lambda values: kind(**dict(zip(names, values, strict=True))), lambda value: _attributes(value, names), kind)
    raise TypeError(f"{kind} can't be sent")


def _hints(kind: type) -> dict[str, Any]:
    """The types of a class's fields, by the names of its module: a property may have the name of a type."""
    found: dict[str, Any] = {}
    for each in reversed(kind.__mro__):
        names = vars(sys.modules[each.__module__])
        for name, hint in vars(each).get("__annotations__", {}).items():
            found[name] = eval(hint, dict(names)) if isinstance(hint, str) else hint
    return {name: hint for name, hint in found.items() if typing.get_origin(hint) is not ClassVar}


def _same(value: Any) -> Any:
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, [*value, *value.values()]))
    return type(value) in _PLAIN or (type(value) in (list, tuple) and all(map(_is_plain, value)))


def _encode_any(value: Any) -> Any:
    """A plain value whose type nobody knows, with the name of its container."""
    if isinstance(value, dict):
        return ["dict", [[_encode_any(key), _encode_any(each)] for key, each in value.items()]]
    return [type(value).__name__, list(map(_encode_any, value))] if isinstance(value, list | tuple) else value


def _decode_any(plain: Any) -> Any:
    if not isinstance(plain, list):
        return plain
    name, items = plain
    if name == "dict":
        return {_decode_any(key): _decode_any(each) for key, each in items}
    return {"list": list, "tuple": tuple}[name](map(_decode_any, items))


def _attributes(value: Any, names: Sequence[str]) -> list[Any]:
    return [getattr(value, name) for name in names]


def _union(members: list[Codec]) -> Codec:
    def encode(value: Any) -> Any:
        index = next(index for index, member in enumerate(members) if member.fits(value))
        return [index, members[index].encode(value)]

    return Codec(lambda value: any(member.fits(value) for member in members), encode, lambda plain: members[plain[0]].decode(plain[1]))


def _fields(parts: list[Codec], make: Callable[[list[Any]], Any], take: Callable[[Any], list[Any]], kind: type = tuple) -> Codec:
    def fits(value: Any) -> bool:
        if not isinstance(value, kind):
            return False
        values = take(value)
        return len(values) == len(parts) and all(part.fits(each) for part, each in zip(parts, values, strict=True))

    return Codec(
        fits,
        lambda value: [part.encode(each) for part, each in zip(parts, take(value), strict=True)],
        lambda plain: make([part.decode(each) for part, each in zip(parts, plain, strict=True)]),
    )


def _items(part: Codec, origin: Any) -> Codec:
    made = origin if origin in (tuple, set, frozenset) else list
    return Codec(
        lambda value: isinstance(value, origin) and not isinstance(value, str | bytes) and all(map(part.fits, value)),
        lambda value: [part.encode(each) for each in value],
        lambda plain: made(map(part.decode, plain)),
    )


def _mapping(key: Codec, value: Codec) -> Codec:
    return Codec(
        lambda found: isinstance(found, Mapping) and all(key.fits(name) and value.fits(each) for name, each in found.items()),
        lambda found: [[key.encode(name), value.encode(each)] for name, each in found.items()],
        lambda plain: {key.decode(name): value.decode(each) for name, each in plain},
    )


def encode_error(error: Exception) -> Any:
    """An error of an operation, with its class, which may be known to its own module alone."""
    if isinstance(error, HeadwaterError):
        return [type(error).__module__, type(error).__name__, dump_error(error)]
    return ["", type(error).__name__, None]


def decode_error(plain: Any) -> Exception:
    module, name, found = plain
    if not module:
        return SIGNALS[name]()
    _, (_, message, facts) = load_error(found).__reduce__()
    error: Exception = getattr(importlib.import_module(module), name)(message, **facts)
    return error


class Shape:
    """How the calls of one operation and its answers are sent."""

    def __init__(self, operation: Operation[..., Any]) -> None:
        self.name = operation.name
        hints = typing.get_type_hints(operation.function)
        self._arguments = {name: codec(hints[name]) for name in list(inspect.signature(operation.function).parameters)[1:]}
        self._answer = codec(hints["return"])

    def encode_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A plain value of another type than the annotation's is sent all the same: an operation refuses it with a better sentence."""
        named = zip(self._arguments, args, strict=False)
        return [[self._encode_argument(name, value) for name, value in named], {k: self._encode_argument(k, v) for k, v in kwargs.items()}]

    def _encode_argument(self, name: str, value: Any) -> Any:
        if self._arguments[name].fits(value):
            return [name, True, self._arguments[name].encode(value)]
        if not _is_plain(value):
            raise InvalidRequestError(f"{name} of {self.name} can't be {value!r}, of {type(value)}")
        return [name, False, _encode_any(value)]

    def decode_call(self, plain: Any) -> tuple[list[Any], dict[str, Any]]:
        args, kwargs = plain
        return [self._decode_argument(*value) for value in args], {name: self._decode_argument(*value) for name, value in kwargs.items()}

    def _decode_argument(self, name: str, fits: bool, plain: Any) -> Any:
        return self._arguments[name].decode(plain) if fits else _decode_any(plain)

    def encode_answer(self, value: Any) -> Any:
        if not self._answer.fits(value):
            raise TypeError(f"the answer of {self.name} is {value!r}, of {type(value)}, which is not what its annotation says")
        return self._answer.encode(value)

    def decode_answer(self, plain: Any) -> Any:
        return self._answer.decode(plain)


@cache
def shape(operation: Operation[..., Any]) -> Shape:
    return Shape(operation)
