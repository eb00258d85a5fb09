"""The truth: a SQL catalog, whose transactions are the only commit points. Functions take `tx` first; both dialects run them."""
