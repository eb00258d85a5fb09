"""Headwater: a store for data streams, and the exactly-once pipelines that fill and drain it."""

import typing as _typing

from headwater.batch import ChunkRange, SegmentRange
from headwater.bytestream import ByteReader, ByteWriter
from headwater.catalog.tables import ABSENT
from headwater.errors import (
    AlreadyExistsError,
    ConditionFailedError,
    ConflictError,
    CorruptDataError,
    FencedError,
    HeadwaterError,
    InvalidRequestError,
    NotFoundError,
    OutcomeUnknownError,
    RolledBackError,
    SealedError,
    TransactionEndedError,
    TruncatedError,
    UnavailableError,
)
from headwater.journals.journal import Journal
from headwater.journals.merged import Merged
from headwater.journals.persisting import Persisted
from headwater.journals.queries import Query
from headwater.model.cuts import Cut
from headwater.model.events import Event
from headwater.model.markers import CommittedMarker, Look, Marker
from headwater.model.matches import EXISTS, Match
from headwater.model.policies import Retention, Scaling
from headwater.model.positions import Position, Segment
from headwater.model.records import Head, Record, Recorded, Snapshot
from headwater.model.scaling_history import ScalingHistory
from headwater.readers.group import HeldSegment, Lag, ReaderGroup, TimeWindow
from headwater.readers.reader import Reader
from headwater.segments.metrics import Metrics, OperationMetrics
from headwater.store import Store, open
from headwater.stream import Stream
from headwater.streams.autoscaling import ScalingReport
from headwater.streams.upkeep import UpkeepReport
from headwater.synchronizer import Revision, Revisioned, Synchronizer
from headwater.tables import Entry, Table, TableChange
from headwater.transactions import Commit, Transaction, TransactionInfo, TransactionStatus
from headwater.writer import Ack, Writer

__all__ = [
    "ABSENT",
    "Ack",
    "AlreadyExistsError",
    "ByteReader",
    "ByteWriter",
    "ChunkRange",
    "Commit",
    "CommittedMarker",
    "ConditionFailedError",
    "ConflictError",
    "CorruptDataError",
    "Cut",
    "EXISTS",
    "Entry",
    "Event",
    "FencedError",
    "Head",
    "HeadwaterError",
    "HeldSegment",
    "InvalidRequestError",
    "Journal",
    "Lag",
    "Look",
    "Marker",
    "Match",
    "Merged",
    "Metrics",
    "NotFoundError",
    "OperationMetrics",
    "OutcomeUnknownError",
    "Persisted",
    "Position",
    "Query",
    "Reader",
    "ReaderGroup",
    "Record",
    "Recorded",
    "Retention",
    "Revision",
    "Revisioned",
    "RolledBackError",
    "Scaling",
    "ScalingHistory",
    "ScalingReport",
    "SealedError",
    "Segment",
    "SegmentRange",
    "Snapshot",
    "Store",
    "Stream",
    "Synchronizer",
    "Table",
    "TableChange",
    "TimeWindow",
    "Transaction",
    "TransactionEndedError",
    "TransactionInfo",
    "TransactionStatus",
    "TruncatedError",
    "UnavailableError",
    "UpkeepReport",
    "Writer",
    "open",
]

if _typing.TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        if name == "__version__":
            from importlib.metadata import version  # it takes longer than most of the rest

            return version("headwater")
        raise AttributeError(f"module 'headwater' has no attribute {name!r}")
