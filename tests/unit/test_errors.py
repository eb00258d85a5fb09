"""Errors: their family, and that they arrive whole in another process."""

from __future__ import annotations

import copy
import pickle

import pytest

import headwater as hw
from headwater.model.cuts import StreamCut

ALL = [value for value in vars(hw).values() if isinstance(value, type) and issubclass(value, hw.HeadwaterError)]


def test_there_are_as_many_errors_as_promised() -> None:
    assert {kind.__name__ for kind in ALL} == {
        "HeadwaterError",
        "InvalidRequestError",
        "NotFoundError",
        "AlreadyExistsError",
        "ConflictError",
        "ConditionFailedError",
        "SealedError",
        "TransactionEndedError",
        "FencedError",
        "TruncatedError",
        "RolledBackError",
        "UnavailableError",
        "OutcomeUnknownError",
        "CorruptDataError",
    }


def test_errors_are_found_by_what_they_mean() -> None:
    assert issubclass(hw.InvalidRequestError, ValueError)
    assert issubclass(hw.NotFoundError, LookupError)
    for kind in (hw.ConditionFailedError, hw.SealedError, hw.TransactionEndedError):
        assert issubclass(kind, hw.ConflictError)
    assert not issubclass(hw.FencedError, hw.ConflictError)


@pytest.mark.parametrize("kind", ALL)
def test_every_error_says_in_its_docstring_what_to_do(kind: type[hw.HeadwaterError]) -> None:
    assert kind.__doc__


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_errors_survive_pickling(kind: type[hw.HeadwaterError], protocol: int) -> None:
    for twin in (pickle.loads(pickle.dumps(kind("a sentence", number=7), protocol)), copy.copy(kind("a sentence", number=7))):
        assert type(twin) is kind
        assert str(twin) == twin.message == "a sentence"
        assert twin.facts == {"number": 7}


def test_an_error_s_own_attributes_survive_pickling() -> None:
    head = hw.Cut("f00", {"a/x": StreamCut(1, {0: 3})})
    truncated = pickle.loads(pickle.dumps(hw.TruncatedError("gone", head, number=7)))
    assert truncated.head == head and truncated.facts == {"number": 7}
    assert pickle.loads(pickle.dumps(hw.TruncatedError("gone"))).head is None
    corrupt = pickle.loads(pickle.dumps(hw.CorruptDataError("damaged", object="journal/1", number=7)))
    assert corrupt.object == "journal/1" and corrupt.facts == {"number": 7}
