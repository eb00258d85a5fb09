"""Headwater: a store for data streams, and the exactly-once pipelines that fill and drain it."""

from headwater.batch import SegmentRange
from headwater.bytestream import ByteReader, ByteWriter
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
    SealedError,
    TransactionEndedError,
    TruncatedError,
    UnavailableError,
)
from headwater.model.cuts import Cut
from headwater.model.events import Event
from headwater.model.policies import Retention, Scaling
from headwater.model.positions import Position, Segment
from headwater.store import Store, UpkeepReport, open
from headwater.stream import Stream
from headwater.writer import Ack, Writer

__all__ = [
    "Ack",
    "AlreadyExistsError",
    "ByteReader",
    "ByteWriter",
    "ConditionFailedError",
    "ConflictError",
    "CorruptDataError",
    "Cut",
    "Event",
    "FencedError",
    "HeadwaterError",
    "InvalidRequestError",
    "NotFoundError",
    "OutcomeUnknownError",
    "Position",
    "Retention",
    "Scaling",
    "SealedError",
    "Segment",
    "SegmentRange",
    "Store",
    "Stream",
    "TransactionEndedError",
    "TruncatedError",
    "UnavailableError",
    "UpkeepReport",
    "Writer",
    "open",
]
