"""Conditions on rows, pushed to the source: a small part of SQL's WHERE, and Spark's own filters.

A condition is nested tuples, so that it travels: ("and" | "or", left, right), ("not", inner), ("null", column), ("like", column, pattern)
or (operator, column, value). Nulls are treated as SQL treats them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from pyspark.sql import datasource as filters

from headwater import InvalidRequestError
from headwater.spark.types import convert

Condition = tuple[Any, ...]

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)|'(?P<text>(?:[^']|'')*)'|`(?P<quoted>[^`]+)`"
    r"|(?P<word>[A-Za-z_][A-Za-z0-9_]*)|(?P<sign><=|>=|<>|!=|==|[=<>(),-]))"
)
_OPERATORS = {"=": "=", "==": "=", "<>": "!=", "!=": "!=", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
_WORDS = {"and", "or", "not", "in", "is", "null", "between", "like", "true", "false", "timestamp", "date"}


def parse_where(text: str) -> Condition:
    """The condition that a text like `amount > 10 AND _time >= '2026-01-01'` says."""
    return _Parser(text).parse()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, str]] = []
        at = 0
        while text[at:].strip():
            match = _TOKEN.match(text, at)
            if match is None:
                raise self._error(f"{text[at:].strip()[:20]!r} is not understood")
            kind = str(match.lastgroup)
            value = match[kind].replace("''", "'") if kind == "text" else match[kind]
            if kind == "word" and value.lower() in _WORDS:
                kind, value = "keyword", value.lower()
            self._tokens.append((kind, value))
            at = match.end()
        self._at = 0

    def _error(self, reason: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"where {self._text!r}: {reason}. It takes comparisons of a column with a value, IN, BETWEEN, LIKE, IS NULL, AND, OR, NOT"
        )

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("end", "")

    def _next(self) -> tuple[str, str]:
        token = self._peek()
        self._at += 1
        return token

    def _accept(self, kind: str, value: str) -> bool:
        if self._peek() == (kind, value):
            self._at += 1
            return True
        return False

    def _expect(self, kind: str, value: str) -> None:
        if not self._accept(kind, value):
            raise self._error(f"{value.upper()!r} is expected where {self._peek()[1] or 'it ends'!r} is")

    def parse(self) -> Condition:
        found = self._either()
        if self._peek()[0] != "end":
            raise self._error(f"{self._peek()[1]!r} is one too many")
        return found

    def _either(self) -> Condition:
        found = self._both()
        while self._accept("keyword", "or"):
            found = ("or", found, self._both())
        return found

    def _both(self) -> Condition:
        found = self._single()
        while self._accept("keyword", "and"):
            found = ("and", found, self._single())
        return found

    def _single(self) -> Condition:
        if self._accept("keyword", "not"):
            return ("not", self._single())
        if self._accept("sign", "("):
            found = self._either()
            self._expect("sign", ")")
            return found
        kind, column = self._next()
        if kind not in ("word", "quoted"):
            raise self._error(f"a column's name is expected where {column or 'it ends'!r} is")
        return self._comparison(column)

    def _comparison(self, column: str) -> Condition:
        if self._accept("keyword", "is"):
            negated = self._accept("keyword", "not")
            self._expect("keyword", "null")
            return ("not", ("null", column)) if negated else ("null", column)
        if self._accept("keyword", "not"):
            return ("not", self._tested(column))
        if self._peek()[0] == "keyword":
            return self._tested(column)
        kind, sign = self._next()
        if kind != "sign" or sign not in _OPERATORS:
            raise self._error(f"a comparison is expected behind {column!r}")
        return (_OPERATORS[sign], column, self._value())

    def _tested(self, column: str) -> Condition:
        if self._accept("keyword", "in"):
            self._expect("sign", "(")
            found: Condition = ("=", column, self._value())
            while self._accept("sign", ","):
                found = ("or", found, ("=", column, self._value()))
            self._expect("sign", ")")
            return found
        if self._accept("keyword", "between"):
            low = self._value()
            self._expect("keyword", "and")
            return ("and", (">=", column, low), ("<=", column, self._value()))
        if self._accept("keyword", "like"):
            return ("like", column, self._value())
        raise self._error(f"a comparison is expected behind {column!r}")

    def _value(self) -> Any:
        if self._accept("keyword", "timestamp") or self._accept("keyword", "date"):
            kind, text = self._next()
            if kind != "text":
                raise self._error("a time is given as TIMESTAMP '2026-01-01 12:00:00'")
            return text
        negative = self._accept("sign", "-")
        kind, text = self._next()
        if kind == "number":
            # As in SQL: 1.5 is a decimal, 15e-1 a double.
            number = int(text) if text.isdigit() else float(text) if "e" in text.lower() else Decimal(text)
            return -number if negative else number
        if kind == "text" and not negative:
            return text
        if kind == "keyword" and text in ("true", "false"):
            return text == "true"
        raise self._error(f"a value is expected where {text or 'it ends'!r} is")


def columns_of(condition: Condition | None) -> set[str]:
    """The columns that a condition looks at."""
    return set(_columns(condition)) if condition is not None else set()


def _columns(condition: Condition) -> Iterator[str]:
    if condition[0] in ("and", "or", "not"):
        for inner in condition[1:]:
            yield from _columns(inner)
    else:
        yield condition[1]


def make_expression(condition: Condition, schema: pa.Schema) -> Any:
    """The condition for batches of this schema. InvalidRequestError if a column is missing or a value can't be compared with it."""
    expression = _make(condition, schema)
    try:
        # What Arrow can't compare it says when it meets the types: here, and not in a task.
        schema.empty_table().filter(expression)
    except pa.ArrowException as error:
        raise InvalidRequestError(f"where: it can't be applied to these columns: {error}") from error
    return expression


def _make(condition: Condition, schema: pa.Schema) -> Any:
    operator, *rest = condition
    if operator == "and":
        return _make(rest[0], schema) & _make(rest[1], schema)
    if operator == "or":
        return _make(rest[0], schema) | _make(rest[1], schema)
    if operator == "not":
        return ~_make(rest[0], schema)
    if schema.get_field_index(rest[0]) < 0:
        raise InvalidRequestError(f"where: there is no column {rest[0]!r}; there are: {', '.join(schema.names)}")
    column, kind = pc.field(rest[0]), schema.field(rest[0]).type
    if operator == "null":
        return column.is_null()
    if operator == "like":
        # Bytes are matched as they are: a key need not be UTF-8.
        if not (_is_text(kind) or _is_blob(kind)):
            raise InvalidRequestError(f"where: column {rest[0]!r} is {kind}, and LIKE is for texts and bytes")
        return pc.match_like(column, str(rest[1]))
    return _compare(operator, column, kind, _literal(rest[1], kind, rest[0]))


def _compare(operator: str, column: Any, kind: pa.DataType, value: pa.Scalar) -> Any:
    """A comparison as Spark makes it: NaN is equal to itself, and larger than all other numbers."""
    if pt.is_floating(value.type):
        if pt.is_integer(kind):
            # Arrow alone takes a float32, and fails above 2^24.
            column = column.cast(pa.float64(), safe=False)
        is_nan = pc.is_nan(column)
        if math.isnan(value.as_py()):
            return {
                "=": is_nan,
                ">=": is_nan,
                "!=": ~is_nan,
                "<": ~is_nan,
                "<=": is_nan | ~is_nan,
                ">": is_nan & ~is_nan,
            }[operator]
        if operator in (">", ">="):
            return (column > value if operator == ">" else column >= value) | is_nan
    return {
        "=": column.__eq__,
        "!=": column.__ne__,
        "<": column.__lt__,
        "<=": column.__le__,
        ">": column.__gt__,
        ">=": column.__ge__,
    }[operator](value)


def may_match(condition: Condition, bounds: Mapping[str, Any], schema: pa.Schema) -> Sequence[bool] | None:
    """Whether each row group may have rows that a condition chooses, by the bounds of its columns; None if nothing is known of them.

    `schema` is that of the batches that the condition is for. It may only ever be wrong by keeping too much.
    """
    made: dict[str, Any] = {}
    for name, found in bounds.items():
        kind = schema.field(name).type
        # What grows with a value grows with what is made of it, but for texts made of numbers.
        if (_is_text(kind) or _is_blob(kind)) != (_is_text(found.least.type) or _is_blob(found.least.type)):
            continue
        with suppress(pa.ArrowException):
            made[name] = found._replace(least=convert(found.least, kind), most=convert(found.most, kind))
    if not made:
        return None
    count = len(next(iter(made.values())).least)
    return list(_may(condition, False, made, schema, count))


_OPPOSITES = {"=": "!=", "!=": "=", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}


def _may(condition: Condition, negated: bool, bounds: Mapping[str, Any], schema: pa.Schema, count: int) -> Iterable[bool]:
    operator, *rest = condition
    if operator == "not":
        return _may(rest[0], not negated, bounds, schema, count)
    if operator in ("and", "or"):
        pairs = zip(*(_may(inner, negated, bounds, schema, count) for inner in rest), strict=True)
        return [all(pair) if (operator == "and") != negated else any(pair) for pair in pairs]
    found = bounds.get(rest[0])
    if found is None:
        return [True] * count
    if operator == "null" and not negated:
        return list(found.has_nulls)
    # Nothing else, nor its opposite, is true of a null.
    possible = [not only_nulls for only_nulls in found.only_nulls]
    if operator in ("null", "like"):
        return possible
    kind = schema.field(rest[0]).type
    value = _literal(rest[1], kind, rest[0])
    operator = _OPPOSITES[operator] if negated else operator
    is_nan = pt.is_floating(value.type) and math.isnan(value.as_py())
    if is_nan or (pt.is_floating(kind) and operator in (">", ">=", "!=")):
        # There may be NaN, of which statistics say nothing, and which is the largest.
        return possible
    least = _holds({"=": "<=", ">": None, ">=": None}.get(operator, operator), found.least, kind, value)
    most = _holds({"=": ">=", "<": None, "<=": None}.get(operator, operator), found.most, kind, value)
    either = operator == "!="
    return [may and ((low or high) if either else (low and high)) for may, low, high in zip(possible, least, most, strict=True)]


def _holds(operator: str | None, values: pa.Array, kind: pa.DataType, value: pa.Scalar) -> list[bool]:
    """Whether a comparison holds for each value; True for those that are not known, and where there is nothing to compare."""
    if operator is None:
        return [True] * len(values)
    column = pc.field("value")
    rows = pa.record_batch({"value": values, "row": pa.array(range(len(values)))})
    held = set(rows.filter(_compare(operator, column, kind, value) | column.is_null()).column("row").to_pylist())
    return [row in held for row in range(len(values))]


def _is_blob(kind: pa.DataType) -> bool:
    return bool(pt.is_binary(kind) or pt.is_large_binary(kind) or pt.is_fixed_size_binary(kind))


def _literal(value: Any, kind: pa.DataType, column: str) -> pa.Scalar:
    try:
        if isinstance(value, bytearray):
            value = bytes(value)
        if isinstance(value, str) and (pt.is_timestamp(kind) or pt.is_date(kind)):
            value = datetime.fromisoformat(value)
        if isinstance(value, datetime) and pt.is_timestamp(kind):
            if kind.tz is not None and value.tzinfo is None:
                value = value.replace(tzinfo=UTC)
            return pa.scalar(value, pa.timestamp("us", tz=kind.tz)).cast(kind)
        if pt.is_date(kind) and isinstance(value, datetime | date):
            return pa.scalar(value.date() if isinstance(value, datetime) else value, pa.date32()).cast(kind)
        if _is_blob(kind):
            # As a routing key: 7, '7' and b'7' are one.
            return pa.scalar(value if isinstance(value, bytes) else str(value).encode(), kind)
        if isinstance(value, str) and (pt.is_integer(kind) or pt.is_floating(kind) or pt.is_decimal(kind)):
            value = Decimal(value)
        if pt.is_decimal(kind) and isinstance(value, int | float) and not isinstance(value, bool):
            # By its digits: 0.1 is the decimal, not the double next to it.
            value = Decimal(str(value))
        if pt.is_floating(kind) and isinstance(value, int | Decimal) and not isinstance(value, bool):
            value = float(value)
        scalar = pa.scalar(value)
        if pt.is_boolean(kind) != pt.is_boolean(scalar.type) or _is_text(kind) != _is_text(scalar.type) or pt.is_temporal(kind):
            raise ValueError(f"{value!r} can't be compared with {kind}")
        # Decimals of any precision are compared as they are.
        return scalar if isinstance(value, float | Decimal) else scalar.cast(kind)
    except (pa.ArrowException, ArithmeticError, ValueError, TypeError) as error:
        raise InvalidRequestError(f"where: column {column!r} is {kind}, and {value!r} can't be compared with it") from error


def _is_text(kind: pa.DataType) -> bool:
    return bool(pt.is_string(kind) or pt.is_large_string(kind))


def from_spark_filter(spark_filter: filters.Filter) -> Condition | None:
    """One of Spark's filters as a condition; None if Spark has to do it itself."""
    if isinstance(spark_filter, filters.Not):
        inner = from_spark_filter(spark_filter.child)
        return ("not", inner) if inner is not None else None
    path: tuple[str, ...] = getattr(spark_filter, "attribute", ())
    if len(path) != 1:
        return None
    column = path[0]
    value = getattr(spark_filter, "value", None)
    if isinstance(spark_filter, filters.IsNull):
        return ("null", column)
    if isinstance(spark_filter, filters.IsNotNull):
        return ("not", ("null", column))
    if isinstance(spark_filter, filters.In):
        found: Condition | None = None
        for item in spark_filter.value:
            if not _is_plain(item):
                return None
            found = ("=", column, item) if found is None else ("or", found, ("=", column, item))
        return found
    for kind, operator in (
        (filters.EqualTo, "="),
        (filters.GreaterThan, ">"),
        (filters.GreaterThanOrEqual, ">="),
        (filters.LessThan, "<"),
        (filters.LessThanOrEqual, "<="),
    ):
        if isinstance(spark_filter, kind) and _is_plain(value):
            return (operator, column, value)
    return None


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | bytes | datetime | date | Decimal | bytearray)
