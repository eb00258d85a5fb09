"""Texts of the command line that mean something: places in a stream, times, schemas."""

from __future__ import annotations

import json
import math
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import pyarrow as pa

import headwater as hw

_PARAMETRIC = re.compile(r"(\w+)\[(.*)\]|decimal(?:128)?\((\d+),(-?\d+)\)")


PLACE = "head|tail|CUT|TIME"


class Number(click.FloatRange):
    """A number within bounds. Click's own takes nan, which is never outside of any."""

    def __init__(self, min: float, max: float, *, min_open: bool = False) -> None:
        super().__init__(min, max, min_open=min_open)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = float(super().convert(value, param, ctx))
        if math.isnan(found):
            self.fail(f"{value!r} is no number", param, ctx)
        return found


def parse_place(text: str) -> hw.Cut | datetime | str:
    """head, tail, the text of a cut, or a time; one without a zone is UTC."""
    text = text.strip()
    if text in ("head", "tail"):
        return text
    try:
        return hw.Cut.parse(text) if text.startswith("{") else parse_time(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is neither head, tail, the text of a cut, nor a time like 2031-05-01T12:30Z") from error


def parse_time(text: str) -> datetime:
    """A time in ISO form; without a zone it is UTC, as all times that are printed."""
    time = datetime.fromisoformat(text)
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def parse_schema(text: str) -> pa.Schema:
    """A schema from 'a:int64,b:string!' (! means: never null), or from a JSON file with the same as an object or a list of fields."""
    try:
        if text.endswith(".json") or os.path.isfile(text):
            return pa.schema(_json_fields(_read_json(text)))
        return pa.schema([_field(name.strip(), kind.strip()) for name, kind in map(_split_field, _split(text))])
    except RecursionError:
        raise click.BadParameter("its types are nested too deeply", param_hint="--schema") from None
    except UnicodeEncodeError as error:
        raise click.BadParameter(f"it is no text in UTF-8: {error}", param_hint="--schema") from error


def _read_json(path: str) -> object:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise click.BadParameter(f"{path} can't be read: {error.strerror}", param_hint="--schema") from error
    except ValueError as error:
        raise click.BadParameter(f"{path} is not JSON: {error}", param_hint="--schema") from error


def _json_fields(fields: object) -> list[pa.Field]:
    """{"a": "int64"} or [{"name": "a", "type": "int64", "nullable": false}]."""
    if isinstance(fields, dict):
        return [_field(str(name), str(kind)) for name, kind in fields.items()]
    if isinstance(fields, list) and all(
        isinstance(field, dict) and all(isinstance(field.get(word), str) for word in ("name", "type")) for field in fields
    ):
        return [_field(field["name"], field["type"] + ("" if field.get("nullable", True) else "!")) for field in fields]
    raise click.BadParameter(
        'a schema in JSON is {"column": "type"} or [{"name": ..., "type": ..., "nullable": ...}]', param_hint="--schema"
    )


def _split_field(text: str) -> tuple[str, str]:
    name, colon, kind = text.partition(":")
    if not colon:
        raise click.BadParameter(f"{text!r} is not of the form column:type", param_hint="--schema")
    return name, kind


def _split(text: str) -> list[str]:
    """At commas that stand outside brackets."""
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "[(<{") - (letter in "])>}")
        if letter == "," and not depth:
            parts.append(text[start:at])
            start = at + 1
    return [part for part in (*parts, text[start:]) if part.strip()]


def _field(name: str, kind: str) -> pa.Field:
    return pa.field(name, parse_type(kind.removesuffix("!")), nullable=not kind.endswith("!"))


def parse_type(text: str) -> pa.DataType:
    """An Arrow type: int64, string, timestamp[us], decimal(10,2), list[int64], struct[a:int64,b:string], map[string,int64] ..."""
    text = text.strip()
    found = _PARAMETRIC.fullmatch(text)
    try:
        if found is None:
            return pa.timestamp("us", tz="UTC") if text == "timestamp" else pa.type_for_alias(text)
        if found[3] is not None:
            return pa.decimal128(int(found[3]), int(found[4]))
        word, inner = found[1], found[2]
        if word == "list":
            return pa.list_(parse_type(inner))
        if word == "struct":
            return pa.struct([_field(name.strip(), kind.strip()) for name, kind in map(_split_field, _split(inner))])
        if word == "map":
            key, value = _split(inner)
            return pa.map_(parse_type(key), parse_type(value))
        if word == "timestamp":
            unit, _, zone = (part.strip() for part in inner.partition(","))
            return pa.timestamp(unit, tz=zone.removeprefix("tz=") or None)
        return pa.type_for_alias(text)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        examples = "int64, double, string, binary, bool, timestamp, date32, decimal(10,2), list[int64], struct[a:int64], map[string,double]"
        raise click.BadParameter(f"{text!r} is no type; types are like {examples}", param_hint="--schema") from error
