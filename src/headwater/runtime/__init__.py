"""What a test replaces: clocks, ids, retries and failpoints."""
