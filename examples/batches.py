"""A typed stream, written and read as Arrow: python batches.py STORE

A batch is stored whole or not at all. What was read is a pyarrow.Table: hand it to pandas, DuckDB or Polars as it is.
"""

import sys

import pyarrow as pa
import pyarrow.compute as pc

import headwater as hw

SCHEMA = pa.schema([("city", pa.string()), ("fare", pa.float64())])


def main() -> None:
    with hw.open(sys.argv[1]) as store:
        rides = store.create_stream("taxi/rides", schema=SCHEMA, scaling=hw.Scaling.fixed(4), exist_ok=True)
        with rides.writer() as writer:
            batch = pa.RecordBatch.from_pydict({"city": ["Oslo", "Bern", "Oslo"], "fare": [21.0, 34.5, 18.0]}, schema=SCHEMA)
            ack = writer.write_batch(batch, key="city")
        print(f"{sum(part.count for part in ack.result())} rides stored")
        table = rides.to_arrow(columns=["city", "fare", "_segment", "_number"])
        print(f"{table.num_rows} rides in all, {pc.sum(table['fare']).as_py()} in fares")


if __name__ == "__main__":
    main()
