"""The demo: files ingested exactly once by a process that is killed again and again, while another follows the tail, and then the proof."""
