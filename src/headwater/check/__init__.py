"""Looking at a whole store from outside its streams: what it holds, and whether all of it is as it was written.

Nothing here changes anything, and nothing holds a transaction for longer than one slice of rows, but for SQLite's look at its own file.
"""

from __future__ import annotations

from headwater.check.inventory import SegmentContents, StoreContents, StreamContents, list_contents, store_contents, stream_contents
from headwater.check.operations import OperationInfo, list_operations
from headwater.check.report import CheckReport, Problem, Progress, Unused
from headwater.check.verification import check_store

__all__ = [
    "CheckReport",
    "OperationInfo",
    "Problem",
    "Progress",
    "SegmentContents",
    "StoreContents",
    "StreamContents",
    "Unused",
    "check_store",
    "list_contents",
    "list_operations",
    "store_contents",
    "stream_contents",
]
