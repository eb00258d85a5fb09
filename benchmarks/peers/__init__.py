"""The same work through headwater and through the systems one would pick instead: `python -m benchmarks.peers --help`.

Every peer is the real server, started on loopback by the bench and stopped by it, with its data on the disk where headwater's is.
"""
