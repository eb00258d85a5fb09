-- Format 1. BLOB and CLUSTERED are words of the dialects: see schema.py.

CREATE TABLE store (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    id TEXT NOT NULL,
    format BIGINT NOT NULL,
    created_at BIGINT NOT NULL
);

-- Ids are never used again, also not after a deletion.
CREATE TABLE sequence (
    name TEXT PRIMARY KEY,
    last BIGINT NOT NULL
);

CREATE TABLE scope (
    name TEXT PRIMARY KEY,
    created_at BIGINT NOT NULL
);

CREATE TABLE stream (
    id BIGINT PRIMARY KEY,
    scope TEXT NOT NULL REFERENCES scope (name),
    name TEXT NOT NULL,
    kind TEXT NOT NULL,
    epoch BIGINT NOT NULL,
    next_segment BIGINT NOT NULL,
    schema_version BIGINT NOT NULL,
    scaling TEXT NOT NULL,
    retention TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    sealed_at BIGINT,
    UNIQUE (scope, name)
);

CREATE TABLE stream_label (
    label TEXT NOT NULL,
    stream BIGINT NOT NULL REFERENCES stream (id),
    PRIMARY KEY (label, stream)
);
CREATE INDEX stream_label_by_stream ON stream_label (stream);

-- Each version of a stream's Arrow schema, as an IPC schema message.
CREATE TABLE stream_schema (
    stream BIGINT NOT NULL REFERENCES stream (id),
    version BIGINT NOT NULL,
    arrow BLOB NOT NULL,
    PRIMARY KEY (stream, version)
);

-- Keys are the routing space [0, 2^64) shifted by -2^63 to fit; last_key is inclusive. Numbers [head, tail) are readable.
CREATE TABLE segment (
    stream BIGINT NOT NULL REFERENCES stream (id),
    number BIGINT NOT NULL,
    log BIGINT NOT NULL UNIQUE,
    first_key BIGINT NOT NULL,
    last_key BIGINT NOT NULL,
    made_epoch BIGINT NOT NULL,
    made_at BIGINT NOT NULL,
    sealed_epoch BIGINT,
    sealed_at BIGINT,
    head BIGINT NOT NULL,
    tail BIGINT NOT NULL,
    bytes BIGINT NOT NULL,
    appended_at BIGINT NOT NULL,
    PRIMARY KEY (stream, number)
);

-- Numbers [first, first + count) of a log, in one block: inline, or `length` bytes at `position` of an object.
CREATE TABLE extent (
    log BIGINT NOT NULL,
    first BIGINT NOT NULL,
    count BIGINT NOT NULL,
    length BIGINT NOT NULL,
    crc BIGINT NOT NULL,
    appended_at BIGINT NOT NULL,
    object BIGINT,
    position BIGINT NOT NULL,
    PRIMARY KEY (log, first)
) CLUSTERED;

CREATE TABLE inline_block (
    log BIGINT NOT NULL,
    first BIGINT NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (log, first)
);

-- What storage holds. An object without a row here is garbage, or not yet committed.
CREATE TABLE object (
    id BIGINT PRIMARY KEY,
    key TEXT NOT NULL,
    session BIGINT NOT NULL
);
-- Of staged objects only, whose ids are negative and tell nothing of the key: an append pays nothing for it.
CREATE INDEX staged_object_by_key ON object (key) WHERE id < 0;

-- Logs whose stream or segment is gone; their extents are deleted in slices.
CREATE TABLE dead_log (
    log BIGINT PRIMARY KEY
);

CREATE TABLE session (
    id BIGINT PRIMARY KEY,
    live INTEGER NOT NULL,
    last_flush BIGINT NOT NULL,
    last_result TEXT,
    renewed_at BIGINT NOT NULL,
    process TEXT NOT NULL
);

CREATE TABLE writer (
    stream BIGINT NOT NULL REFERENCES stream (id),
    id TEXT NOT NULL,
    last_number BIGINT NOT NULL,
    generation BIGINT NOT NULL,
    PRIMARY KEY (stream, id)
);
