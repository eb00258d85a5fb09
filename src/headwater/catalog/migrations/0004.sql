-- Format 4: objects that nothing names are kept for a while.

-- When it was seen that nothing names this object, and nobody may name it again.
ALTER TABLE object ADD COLUMN dead_at BIGINT;
