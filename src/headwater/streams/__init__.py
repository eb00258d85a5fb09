"""The life of streams: creation, scaling, truncation, cuts, and reading all their segments in order."""
