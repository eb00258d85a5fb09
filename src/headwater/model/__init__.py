"""Frozen values without I/O: names, limits, key ranges, positions, cuts, policies, schemas, keys."""
