"""The demo: files ingested exactly once, through Spark exactly once, while everything is killed again and again; and then the proof."""
