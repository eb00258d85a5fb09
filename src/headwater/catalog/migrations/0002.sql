-- Format 2: transactions, markers, tables and reader groups.

-- A transaction: open, committing (all is staged, it waits for a roll), committed or aborted. `result` is its cut, or why it failed.
CREATE TABLE txn (
    id TEXT PRIMARY KEY,
    state TEXT NOT NULL,
    begun_at BIGINT NOT NULL,
    lease BIGINT NOT NULL,
    expires_at BIGINT NOT NULL,
    ended_at BIGINT,
    next_ordinal BIGINT NOT NULL,
    marker_owner TEXT,
    marker_sequence BIGINT,
    marker_fingerprint TEXT,
    result TEXT
);
CREATE INDEX txn_by_state ON txn (state, expires_at);

-- Blocks that wait for their transaction's commit, for the segment that was open when they were staged.
CREATE TABLE txn_extent (
    txn TEXT NOT NULL REFERENCES txn (id),
    ordinal BIGINT NOT NULL,
    stream BIGINT NOT NULL,
    segment BIGINT NOT NULL,
    count BIGINT NOT NULL,
    length BIGINT NOT NULL,
    crc BIGINT NOT NULL,
    object BIGINT,
    position BIGINT NOT NULL,
    expected_tail BIGINT,
    data BLOB,
    PRIMARY KEY (txn, ordinal)
);
CREATE INDEX txn_extent_by_segment ON txn_extent (stream, segment);

-- What else a transaction changes: the event `place` of the block `ordinal` puts or removes a table's key; or a reader's positions.
-- An ordinal below zero marks a batch that was staged, so that it is not staged again.
CREATE TABLE txn_change (
    txn TEXT NOT NULL REFERENCES txn (id),
    ordinal BIGINT NOT NULL,
    place BIGINT NOT NULL,
    kind TEXT NOT NULL,
    target BIGINT NOT NULL,
    name TEXT NOT NULL,
    expected BIGINT,
    data BLOB,
    PRIMARY KEY (txn, ordinal, place)
);

-- The last sequence that each owner committed, and with which transaction.
CREATE TABLE marker (
    owner TEXT PRIMARY KEY,
    sequence BIGINT NOT NULL,
    fingerprint TEXT,
    txn TEXT NOT NULL,
    result TEXT NOT NULL
);

-- The present entries of tables. A table is a stream of its changes; an entry's version is the number of its change, plus one.
CREATE TABLE entry (
    stream BIGINT NOT NULL REFERENCES stream (id),
    key TEXT BYTEWISE NOT NULL,
    version BIGINT NOT NULL,
    value BLOB NOT NULL,
    PRIMARY KEY (stream, key)
);

CREATE TABLE reader_group (
    id BIGINT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    generation BIGINT NOT NULL,
    checkpoint BIGINT NOT NULL,
    end_cut TEXT,
    created_at BIGINT NOT NULL
);

CREATE TABLE group_stream (
    grp BIGINT NOT NULL REFERENCES reader_group (id),
    stream BIGINT NOT NULL,
    name TEXT NOT NULL,
    PRIMARY KEY (grp, stream)
);

-- The segments a group is at: its committed position in each, and who reads it. `end` is where the group stops, if it is bounded.
CREATE TABLE group_segment (
    grp BIGINT NOT NULL REFERENCES reader_group (id),
    stream BIGINT NOT NULL,
    segment BIGINT NOT NULL,
    position BIGINT NOT NULL,
    done INTEGER NOT NULL,
    reader TEXT,
    since BIGINT NOT NULL,
    PRIMARY KEY (grp, stream, segment)
);

CREATE TABLE group_reader (
    grp BIGINT NOT NULL REFERENCES reader_group (id),
    id TEXT NOT NULL,
    generation BIGINT NOT NULL,
    seen_at BIGINT NOT NULL,
    checkpoint BIGINT NOT NULL,
    positions TEXT,
    PRIMARY KEY (grp, id)
);

-- Event times that writers noted, and the marks made of them: `numbers` are the tails at that moment, by segment.
CREATE TABLE noted_time (
    stream BIGINT NOT NULL REFERENCES stream (id),
    writer TEXT NOT NULL,
    time BIGINT NOT NULL,
    noted_at BIGINT NOT NULL,
    PRIMARY KEY (stream, writer)
);

CREATE TABLE watermark (
    stream BIGINT NOT NULL REFERENCES stream (id),
    number BIGINT NOT NULL,
    low BIGINT NOT NULL,
    high BIGINT NOT NULL,
    numbers TEXT NOT NULL,
    PRIMARY KEY (stream, number)
);

-- `base_until`: numbers below it are in other logs (see base). `dropped`: truncated away, and kept only because a tag pins it.
ALTER TABLE segment ADD COLUMN base_until BIGINT NOT NULL DEFAULT 0;
ALTER TABLE segment ADD COLUMN dropped INTEGER NOT NULL DEFAULT 0;

-- A fork's segment: its log has the numbers [first, until) from the log `source`, below its own extents.
CREATE TABLE base (
    log BIGINT NOT NULL,
    first BIGINT NOT NULL,
    until BIGINT NOT NULL,
    source BIGINT NOT NULL,
    PRIMARY KEY (log, first)
);
CREATE INDEX base_by_source ON base (source);

-- Named cuts, with the head at the time, and the numbers they keep readable.
CREATE TABLE tag (
    name TEXT PRIMARY KEY,
    cut TEXT NOT NULL,
    head TEXT NOT NULL,
    created_at BIGINT NOT NULL
);

CREATE TABLE pin (
    tag TEXT NOT NULL REFERENCES tag (name),
    stream BIGINT NOT NULL,
    segment BIGINT NOT NULL,
    first BIGINT NOT NULL,
    until BIGINT NOT NULL,
    PRIMARY KEY (tag, stream, segment)
);
CREATE INDEX pin_by_segment ON pin (stream, segment, until);
