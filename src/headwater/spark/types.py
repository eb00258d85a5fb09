"""Arrow types as Spark has them: which schema a stream has in Spark, and batches that are exactly of it, copied only where they must be."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from headwater import InvalidRequestError

TIME = pa.timestamp("us", tz="UTC")
#: What a source adds to the stream's own columns, in this order.
METADATA = pa.schema(
    [
        pa.field("_key", pa.binary()),
        pa.field("_time", TIME, nullable=False),
        pa.field("_stream", pa.string(), nullable=False),
        pa.field("_segment", pa.int64(), nullable=False),
        pa.field("_number", pa.int64(), nullable=False),
    ]
)
#: Only read where it is asked for.
APPENDED = pa.field("_appended", TIME, nullable=False)

_UNSIGNED = {pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64(), pa.uint64(): pa.decimal128(20, 0)}


def spark_arrow_type(kind: pa.DataType) -> pa.DataType:
    """The type nearest to this one that Spark has; no value is lost but nanoseconds."""
    if kind in _UNSIGNED:
        return _UNSIGNED[kind]
    if pt.is_float16(kind):
        return pa.float32()
    if pt.is_large_string(kind):
        return pa.string()
    if pt.is_large_binary(kind) or pt.is_fixed_size_binary(kind):
        return pa.binary()
    if pt.is_date64(kind):
        return pa.date32()
    if pt.is_time(kind):
        return pa.time64("ns")
    if pt.is_timestamp(kind):
        return pa.timestamp("us", tz="UTC" if kind.tz is not None else None)
    if pt.is_duration(kind):
        return pa.duration("us")
    if pt.is_decimal(kind):
        if kind.precision > 38:
            raise InvalidRequestError(f"Spark's decimals have up to 38 digits, not {kind.precision}: leave the column out with `columns`")
        return pa.decimal128(kind.precision, kind.scale)
    if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
        return pa.list_(pa.field("element", spark_arrow_type(kind.value_type), kind.value_field.nullable))
    if pt.is_struct(kind):
        return pa.struct([pa.field(field.name, spark_arrow_type(field.type), field.nullable) for field in kind])
    if pt.is_map(kind):
        return pa.map_(spark_arrow_type(kind.key_type), spark_arrow_type(kind.item_type))
    return kind


def spark_arrow_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema([pa.field(field.name, spark_arrow_type(field.type), field.nullable) for field in schema])


def to_spark_schema(schema: pa.Schema) -> StructType:
    """An Arrow schema as Spark has it."""
    return from_arrow_schema(spark_arrow_schema(schema))


def to_arrow(schema: StructType) -> pa.Schema:
    """The Arrow schema that Spark wants for this one of its own, to the letter."""
    return to_arrow_schema(schema, timezone="UTC")


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch with the columns, types and order of a schema that Spark wants."""
    return pa.RecordBatch.from_arrays([convert(batch.column(field.name), field.type) for field in schema], schema=schema)


def convert(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if column.type.equals(kind):
        return column
    # Nanoseconds are cut off, also nested ones, as they are for Python's own datetime; anything else that does not fit is an error.
    return column.cast(options=pc.CastOptions(kind, allow_time_truncate=True))


def union_schema(schemas: Sequence[pa.Schema], names: Sequence[str]) -> pa.Schema:
    """The one schema of several streams that are read together: all columns; those that some lack are nullable there."""
    fields: dict[str, pa.Field] = {}
    for schema, name in zip(schemas, names, strict=True):
        for field in schema:
            found = fields.get(field.name)
            if found is None:
                fields[field.name] = field
            elif not found.type.equals(field.type):
                raise InvalidRequestError(
                    f"column {field.name!r} is {field.type} in {name} and {found.type} in another stream: "
                    "read them apart, or leave the column out with `columns`"
                )
            elif field.nullable:
                fields[field.name] = field
    return pa.schema(
        [
            field if all(schema.get_field_index(field.name) >= 0 for schema in schemas) else field.with_nullable(True)
            for field in fields.values()
        ]
    )
