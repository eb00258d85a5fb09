-- The tables of a new catalog. BLOB, BYTEWISE and CLUSTERED are words of the dialects: see schema.py.

-- `schema_hash` is of this file's statements: a store whose tables were made by other statements is refused.
CREATE TABLE store (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    id TEXT NOT NULL,
    format BIGINT NOT NULL,
    schema_hash TEXT NOT NULL,
    created_at BIGINT NOT NULL
);

-- Ids are never used again, also not after a deletion. They follow the clock: see next_id.
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
-- `claim`: who alone may append to it while it is open, and the entry that such a commit requires.
-- `base_until`: numbers below it are in other logs (see base). `dropped`: truncated away, and kept only because a tag pins it.
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
    base_until BIGINT NOT NULL DEFAULT 0,
    dropped INTEGER NOT NULL DEFAULT 0,
    claim TEXT,
    PRIMARY KEY (stream, number)
);

-- Numbers [first, first + count) of a log, in one block: inline, or `length` bytes at `position` of an object.
-- `form` 0: a block as it was appended; 1: a Parquet chunk, the object as a whole, `crc` being its footer's and, from bit 32
-- on, its filters'; 2: raw bytes in a chunk.
-- Chunks also have `raw`, the bytes before compression, and `last_at`, when their last event was appended; `appended_at` is their first's.
CREATE TABLE extent (
    log BIGINT NOT NULL,
    first BIGINT NOT NULL,
    count BIGINT NOT NULL,
    length BIGINT NOT NULL,
    crc BIGINT NOT NULL,
    appended_at BIGINT NOT NULL,
    object BIGINT,
    position BIGINT NOT NULL,
    form INTEGER NOT NULL DEFAULT 0,
    raw BIGINT,
    last_at BIGINT,
    PRIMARY KEY (log, first)
) CLUSTERED;

CREATE TABLE inline_block (
    log BIGINT NOT NULL,
    first BIGINT NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (log, first)
);

-- What storage holds. An object without a row here is garbage, or not yet committed.
-- `dead_at`: when it was seen that nothing names it, and nobody may name it again.
CREATE TABLE object (
    id BIGINT PRIMARY KEY,
    key TEXT NOT NULL,
    session BIGINT NOT NULL,
    dead_at BIGINT
);
-- Of staged objects only, whose ids are negative and tell nothing of the key: an append pays nothing for it.
CREATE INDEX staged_object_by_key ON object (key) WHERE id < 0;

-- Logs whose stream or segment is gone; their extents are deleted in slices.
CREATE TABLE dead_log (
    log BIGINT PRIMARY KEY
);

-- `first_file`: no later commit of the session names a file of its journal with a lower index.
CREATE TABLE session (
    id BIGINT PRIMARY KEY,
    live INTEGER NOT NULL,
    last_flush BIGINT NOT NULL,
    last_result TEXT,
    first_file BIGINT NOT NULL DEFAULT 0,
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
    data BLOB,
    PRIMARY KEY (txn, ordinal)
);
CREATE INDEX txn_extent_by_segment ON txn_extent (stream, segment);

-- The terms of a transaction's commit: conditions, and what it changes beside blocks. A term about a block has the block's ordinal.
-- An ordinal below zero marks a batch that was staged, so that it is not staged again.
CREATE TABLE txn_term (
    txn TEXT NOT NULL REFERENCES txn (id),
    ordinal BIGINT NOT NULL,
    place BIGINT NOT NULL,
    kind TEXT NOT NULL,
    fields TEXT NOT NULL,
    data BLOB,
    PRIMARY KEY (txn, ordinal, place)
);

-- The last sequence that each owner committed, and with which transaction.
CREATE TABLE marker (
    owner TEXT PRIMARY KEY,
    sequence BIGINT NOT NULL,
    fingerprint TEXT,
    txn TEXT NOT NULL,
    result TEXT NOT NULL,
    committed_at BIGINT NOT NULL DEFAULT 0
);

-- The present entries of tables. A table is a stream of its changes; an entry's version is the number of its change, plus one.
CREATE TABLE entry (
    stream BIGINT NOT NULL REFERENCES stream (id),
    key TEXT BYTEWISE NOT NULL,
    version BIGINT NOT NULL,
    value BLOB NOT NULL,
    PRIMARY KEY (stream, key)
);

-- Tables that are being filled by a fork: streams of kind "filling", whose names nobody can give. 0: it is being dropped. See fills.py.
CREATE TABLE filling (
    stream BIGINT PRIMARY KEY REFERENCES stream (id),
    renewed_at BIGINT NOT NULL
);

CREATE TABLE reader_group (
    id BIGINT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    generation BIGINT NOT NULL,
    checkpoint BIGINT NOT NULL,
    end_cut TEXT,
    created_at BIGINT NOT NULL,
    -- The last generation that began with a roll-back which put the group back, and where to.
    rolled_generation BIGINT NOT NULL DEFAULT 0,
    rolled_to TEXT
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

-- A fork's segment: its log has the numbers [first, until) from the log `source`, below its own extents.
CREATE TABLE base (
    log BIGINT NOT NULL,
    first BIGINT NOT NULL,
    until BIGINT NOT NULL,
    source BIGINT NOT NULL,
    PRIMARY KEY (log, first)
);
CREATE INDEX base_by_source ON base (source);

-- Named cuts, with the head at the time, and the numbers they keep readable. One that expires is a reader's hold.
CREATE TABLE tag (
    name TEXT PRIMARY KEY,
    cut TEXT NOT NULL,
    head TEXT NOT NULL,
    created_at BIGINT NOT NULL,
    expires_at BIGINT
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

-- Floors with a name: of these streams nothing from the cut on goes, in segments that are made later either.
CREATE TABLE floor (
    name TEXT NOT NULL,
    stream BIGINT NOT NULL,
    numbers TEXT NOT NULL,
    PRIMARY KEY (name, stream)
);
CREATE INDEX floor_by_stream ON floor (stream);

-- Of the places in a segment, those past `first` are undone: the stream was rolled back. `first` is -1 where the segment is gone.
CREATE TABLE undone (
    stream BIGINT NOT NULL,
    segment BIGINT NOT NULL,
    first BIGINT NOT NULL,
    first_key BIGINT NOT NULL,
    last_key BIGINT NOT NULL,
    roll_back BIGINT NOT NULL,
    PRIMARY KEY (stream, segment)
);

-- Roll-backs: the cut as numbers by segment, and the stream that has what lay past it.
CREATE TABLE roll_back (
    id BIGINT PRIMARY KEY,
    stream BIGINT NOT NULL,
    cut TEXT NOT NULL,
    kept BIGINT NOT NULL,
    made_at BIGINT NOT NULL
);
CREATE INDEX roll_back_by_stream ON roll_back (stream);

-- Where a fork parted from the stream that it was made of, as numbers by segment.
CREATE TABLE fork_point (
    stream BIGINT PRIMARY KEY,
    parent BIGINT NOT NULL,
    numbers TEXT NOT NULL
);

-- A stream whose name another one has now. Places of the stream up to `numbers` hold in the other one; NULL: none do.
CREATE TABLE replacement (
    stream BIGINT PRIMARY KEY,
    successor BIGINT NOT NULL,
    numbers TEXT
);

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

-- A journal's index. It is `ready`, `building`: upkeep makes it anew from the events, or `dead`: its stream was deleted, and its rows go
-- in slices. `deletions` counts the changes of entities' `low`. `builds` counts the rebuilds; `build` is the progress of the last one, and
-- until its end, old rows of entities have the negative id of the stream: see rebuilds.py.
CREATE TABLE journal (
    stream BIGINT PRIMARY KEY,
    state TEXT NOT NULL,
    deletions BIGINT NOT NULL,
    builds BIGINT NOT NULL,
    build TEXT
);

-- A journal's entities: where each one's last event is, and, in `recent`, where those after sequence `paged` are: see model/numbers.py.
-- Events below `low` are deleted, as of the journal's deletion `deletion`. `deleted` is the first sequence after the entity's last deletion
-- as a whole: the entity is deleted while `sequence` is below it.
-- `last_ids` is a hash of the event ids of the last persist, which had `last_count` events.
CREATE TABLE entity (
    stream BIGINT NOT NULL,
    id TEXT BYTEWISE NOT NULL,
    sequence BIGINT NOT NULL,
    low BIGINT NOT NULL,
    segment BIGINT NOT NULL,
    number BIGINT NOT NULL,
    paged BIGINT NOT NULL,
    recent TEXT NOT NULL,
    last_count BIGINT NOT NULL,
    last_ids BLOB,
    deleted BIGINT NOT NULL DEFAULT 0,
    deletion BIGINT,
    PRIMARY KEY (stream, id)
) CLUSTERED;
CREATE INDEX entity_by_deletion ON entity (stream, deletion) WHERE deletion IS NOT NULL;

-- Where an entity's events from sequence `first` on are.
CREATE TABLE entity_page (
    stream BIGINT NOT NULL,
    id TEXT BYTEWISE NOT NULL,
    first BIGINT NOT NULL,
    numbers TEXT NOT NULL,
    PRIMARY KEY (stream, id, first)
) CLUSTERED;

-- Tags (kind 0) and types (kind 1) of a journal's events, by segment: how many events have the word, and the number of the last one.
-- Of a tag, `recent` and the pages say where all of them are.
CREATE TABLE word (
    stream BIGINT NOT NULL,
    kind INTEGER NOT NULL,
    word TEXT BYTEWISE NOT NULL,
    segment BIGINT NOT NULL,
    number BIGINT NOT NULL,
    count BIGINT NOT NULL,
    recent TEXT NOT NULL,
    PRIMARY KEY (stream, kind, word, segment)
) CLUSTERED;

-- Where a tag's events from number `first` on are.
CREATE TABLE word_page (
    stream BIGINT NOT NULL,
    word TEXT BYTEWISE NOT NULL,
    segment BIGINT NOT NULL,
    first BIGINT NOT NULL,
    numbers TEXT NOT NULL,
    PRIMARY KEY (stream, word, segment, first)
) CLUSTERED;

-- Entities' states as of a sequence, as JSON. Those that were not made by hand are replaced by newer ones.
CREATE TABLE snapshot (
    stream BIGINT NOT NULL,
    id TEXT BYTEWISE NOT NULL,
    sequence BIGINT NOT NULL,
    version BIGINT NOT NULL,
    by_hand INTEGER NOT NULL,
    state TEXT NOT NULL,
    PRIMARY KEY (stream, id, sequence)
);
