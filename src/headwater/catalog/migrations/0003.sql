-- Format 3: long-term chunks, upkeep and its lease.

-- `form` 0: a block as it was appended; 1: a Parquet chunk, the object as a whole, `crc` being its footer's; 2: raw bytes in a chunk.
-- Chunks also have `raw`, the bytes before compression, and `last_at`, when their last event was appended; `appended_at` is their first's.
ALTER TABLE extent ADD COLUMN form INTEGER NOT NULL DEFAULT 0;
ALTER TABLE extent ADD COLUMN raw BIGINT;
ALTER TABLE extent ADD COLUMN last_at BIGINT;

-- A log's numbers below `until` are in chunks, or truncated; about `small` of them are small. Inline blocks below it are garbage.
CREATE TABLE tier (
    log BIGINT PRIMARY KEY,
    until BIGINT NOT NULL,
    small BIGINT NOT NULL
);

-- Who does the upkeep: a session, until its lease runs out. One taken by hand goes over one of the background.
CREATE TABLE lease (
    name TEXT PRIMARY KEY,
    session BIGINT NOT NULL,
    holder TEXT NOT NULL,
    by_hand INTEGER NOT NULL,
    expires_at BIGINT NOT NULL
);

-- A hold is a tag of a running reader, which ends by itself.
ALTER TABLE tag ADD COLUMN expires_at BIGINT;

-- A marker's age, so that those of pipelines long gone can go.
ALTER TABLE marker ADD COLUMN committed_at BIGINT NOT NULL DEFAULT 0;

-- What is known of the load of a stream that scales by rate, as of its last sample: see model/load.py.
CREATE TABLE stream_load (
    stream BIGINT PRIMARY KEY REFERENCES stream (id),
    sampled_at BIGINT NOT NULL,
    state TEXT NOT NULL
);

-- Its rates by key range: a row for a minute with load, fewer of older ones.
CREATE TABLE load_history (
    stream BIGINT NOT NULL REFERENCES stream (id),
    at BIGINT NOT NULL,
    rates TEXT NOT NULL,
    PRIMARY KEY (stream, at)
);

-- The epochs that scaling by rate made, the last ones, and why.
CREATE TABLE scale_event (
    stream BIGINT NOT NULL REFERENCES stream (id),
    epoch BIGINT NOT NULL,
    at BIGINT NOT NULL,
    changes TEXT NOT NULL,
    PRIMARY KEY (stream, epoch)
);
