"""Object storage against a server that misbehaves: what is repeated, what is not, and what the caller is told."""

from __future__ import annotations

import os
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import obstore
import pytest
from obstore import exceptions

from headwater.errors import AlreadyExistsError, CorruptDataError, HeadwaterError, InvalidRequestError, UnavailableError
from headwater.model import limits
from headwater.model.limits import RETRY_SECONDS
from headwater.storage import objects
from headwater.storage.layout import object_key
from headwater.storage.objects import ObjectStorage
from tests.s3server import BUCKET, FaultyServer, S3Server, options_for, running_s3

KEY = object_key(1, 0)
PATH = f"/{BUCKET}/{KEY}"
URL = f"s3://{BUCKET}"
TRANSIENT = ["500", "502", "503", "504", "429", "408", "drop", "lose"]
FINAL = ["400", "401", "403", "301", "405"]


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.waits: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.seconds += seconds

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    with running_s3() as server:
        yield server


def open_on(server: FaultyServer, time: Time | None = None) -> ObjectStorage:
    time = time or Time()
    return ObjectStorage(URL, server.options, sleep=time.sleep, monotonic=time.monotonic)


@pytest.mark.parametrize("fault", TRANSIENT)
def test_a_put_that_may_succeed_later_is_repeated(fault: str) -> None:
    time = Time()
    with FaultyServer(fault, fault) as server:
        open_on(server, time).put(KEY, [b"con", b"tent"])
        assert server.objects == {PATH: b"content"}
    assert len(time.waits) == 2


@pytest.mark.parametrize("fault", [*TRANSIENT, "cut"])
def test_a_get_that_may_succeed_later_is_repeated(fault: str) -> None:
    time = Time()
    with FaultyServer("", fault, fault) as server:
        storage = open_on(server, time)
        storage.put(KEY, [b"content"])
        assert bytes(storage.get(KEY, 1, 5)) == b"onten"
        assert server.requests == ["PUT", "GET", "GET", "GET"]
    assert len(time.waits) == 2


@pytest.mark.parametrize("fault", ["503", "drop"])
def test_a_size_that_may_be_known_later_is_asked_for_again(fault: str) -> None:
    with FaultyServer("", fault) as server:
        storage = open_on(server)
        storage.put(KEY, [b"content"])
        assert storage.size(KEY) == 7


@pytest.mark.parametrize("fault", FINAL)
def test_what_cannot_succeed_is_not_repeated(fault: str) -> None:
    time = Time()
    calls: list[Any] = [
        lambda storage: storage.put(KEY, [b"x"]),
        lambda storage: storage.get(KEY, 0, 1),
        lambda storage: storage.size(KEY),
        lambda storage: storage.delete([KEY]),
        lambda storage: list(storage.list("l0/")),
    ]
    for call in calls:
        with FaultyServer(fault) as server:
            storage = open_on(server, time)
            with pytest.raises(HeadwaterError, match=r"^cannot ") as caught:
                call(storage)
            assert len(server.requests) == 1
        assert isinstance(caught.value, InvalidRequestError if fault == "301" else UnavailableError)
        assert "Debug source" not in str(caught.value)
    assert time.waits == []


def test_refused_credentials_are_said_in_a_sentence() -> None:
    with FaultyServer("403") as server, pytest.raises(UnavailableError, match=r"refused it\. Check its credentials and what they allow"):
        open_on(server).put(KEY, [b"x"])


@pytest.mark.parametrize(
    ("fault", "kind", "advice"),
    [
        ("400 ExpiredToken", UnavailableError, "Check its credentials"),
        ("403 RequestTimeTooSkewed", UnavailableError, "Check its credentials"),
        ("400 AuthorizationHeaderMalformed", InvalidRequestError, "Give the storage option `region`"),
        ("501 NotImplemented", InvalidRequestError, "create objects conditionally"),
    ],
)
def test_an_answer_that_only_the_user_can_mend_is_told_at_once_with_what_the_store_said(
    fault: str, kind: type[HeadwaterError], advice: str
) -> None:
    time = Time()
    with FaultyServer(fault) as server, pytest.raises(kind, match=rf"{advice}.*\({fault[4:]}\)"):
        open_on(server, time).put(KEY, [b"x"])
    assert time.waits == []


def test_an_endpoint_without_tls_that_is_not_allowed_is_told_at_once() -> None:
    time = Time()
    with FaultyServer() as server:
        options = {name: value for name, value in server.options.items() if name != "allow_http"}
        storage = ObjectStorage(URL, options, sleep=time.sleep, monotonic=time.monotonic)
        with pytest.raises(InvalidRequestError, match="needs the storage option allow_http=true"):
            storage.size(KEY)
    assert time.waits == []


def test_a_put_whose_answer_was_lost_is_recognised_as_done() -> None:
    with FaultyServer("lose") as server:
        open_on(server).put(KEY, [b"content"])
        assert server.requests == ["PUT", "PUT", "HEAD", "GET"]
        assert server.objects == {PATH: b"content"}


def test_a_put_that_comes_after_one_of_other_bytes_is_refused_also_when_it_was_repeated() -> None:
    with FaultyServer("503") as server:
        server.objects[PATH] = b"CONTENT"
        with pytest.raises(AlreadyExistsError, match=KEY):
            open_on(server).put(KEY, [b"content"])
        assert server.objects == {PATH: b"CONTENT"}


def test_a_put_that_meets_another_one_under_way_waits_for_its_outcome() -> None:
    time = Time()
    with FaultyServer("409") as server:
        open_on(server, time).put(KEY, [b"content"])
        assert server.requests == ["PUT", "HEAD", "PUT"]
        assert server.objects == {PATH: b"content"}
    assert len(time.waits) == 1


def test_a_put_whose_object_is_deleted_while_it_is_compared_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    real = obstore.head

    def head_then_delete(*args: Any) -> Any:
        found = real(*args)
        server.objects.clear()  # By another process, which takes it for garbage.
        return found

    monkeypatch.setattr(obstore, "head", head_then_delete)
    with FaultyServer("lose") as server:
        open_on(server).put(KEY, [b"content"])
        assert server.requests == ["PUT", "PUT", "HEAD", "GET", "PUT"]
        assert server.objects == {PATH: b"content"}


def test_repeating_ends_at_the_deadline_with_an_error_that_says_to_repeat() -> None:
    time = Time()
    with (
        FaultyServer(*["503"] * 10_000) as server,
        pytest.raises(UnavailableError, match=rf"write {KEY} in {URL}: .*503.* Repeat the call"),
    ):
        open_on(server, time).put(KEY, [b"x"])
    assert RETRY_SECONDS - 2 < time.seconds <= RETRY_SECONDS


def test_a_server_that_is_not_there_is_unavailable() -> None:
    time = Time()
    with FaultyServer() as server:
        options = server.options
    with pytest.raises(UnavailableError, match="error sending request"):
        ObjectStorage(URL, options, sleep=time.sleep, monotonic=time.monotonic).put(KEY, [b"x"])
    assert len(time.waits) > 5


def test_a_server_that_does_not_answer_in_time_is_tried_again() -> None:
    time = Time()
    with FaultyServer("hang") as server:
        storage = ObjectStorage(URL, {**server.options, "timeout": "100ms"}, sleep=time.sleep, monotonic=time.monotonic)
        storage.put(KEY, [b"content"])
        assert server.objects == {PATH: b"content"}
    assert len(time.waits) == 1


def test_a_hung_request_is_repeated_once_also_if_it_took_longer_than_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(limits, "REQUEST_SECONDS", 0.1)
    with FaultyServer("", "hang", "", "hang", "hang") as server:
        storage = open_on(server)
        storage.put(KEY, [b"content"])
        assert bytes(storage.get(KEY, 0, 7)) == b"content"
        with pytest.raises(UnavailableError, match="Repeat the call"):
            storage.get(KEY, 0, 7)
        assert server.requests == ["PUT", "GET", "GET", "GET", "GET"]


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second for a request, and of a large read without a byte; ten for all of a read; for a put a second, above 10 MiB ten."""
    monkeypatch.setattr(limits, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(limits, "REQUEST_SECONDS", 1.0)
    monkeypatch.setattr(limits, "TRANSFER_SECONDS", 10.0)
    monkeypatch.setattr(limits, "PUT_SECONDS", {10 * limits.MIB: 1.0, 40 * limits.MIB: 10.0})


LARGE = os.urandom(limits.TRANSFER_BYTES + 1)


@pytest.mark.slow
@pytest.mark.usefixtures("short_limits")
def test_a_large_read_that_moves_may_take_long() -> None:
    with FaultyServer("", "crawl") as server:
        storage = open_on(server)
        storage.put(KEY, [LARGE])
        assert bytes(storage.get(KEY, 0, len(LARGE))) == LARGE
        assert server.requests == ["PUT", "GET"]
        server.faults += ["crawl", ""]
        assert bytes(storage.get(KEY, 0, limits.MIB)) == LARGE[: limits.MIB]
        assert server.requests == ["PUT", "GET", "GET", "GET"], "a small one may not"


@pytest.mark.slow
@pytest.mark.usefixtures("short_limits")
@pytest.mark.parametrize("fault", ["stall", "hang"])
def test_a_large_read_that_stands_still_is_given_up_and_repeated(fault: str) -> None:
    with FaultyServer("", fault) as server:
        storage = open_on(server)
        storage.put(KEY, [LARGE])
        began = time.monotonic()
        assert bytes(storage.get(KEY, 0, len(LARGE))) == LARGE
        assert 1 <= time.monotonic() - began < 8
        assert server.requests == ["PUT", "GET", "GET"]


@pytest.mark.slow
@pytest.mark.usefixtures("short_limits")
def test_a_put_that_hangs_is_given_up_after_the_time_of_its_size_and_repeated() -> None:
    with FaultyServer("hang") as server:
        began = time.monotonic()
        open_on(server).put(KEY, [LARGE])
        assert 1 <= time.monotonic() - began < 8
        assert server.requests == ["PUT", "PUT"]
        assert server.objects == {PATH: LARGE}


@pytest.mark.slow
@pytest.mark.usefixtures("short_limits")
@pytest.mark.parametrize("size", [10 * limits.MIB + 1, 40 * limits.MIB + 1])
def test_a_larger_put_may_be_without_an_answer_for_longer(size: int) -> None:
    with FaultyServer("late") as server:
        open_on(server).put(KEY, [bytes(size)])
        assert server.requests == ["PUT"]


@pytest.mark.slow
@pytest.mark.usefixtures("short_limits")
def test_a_timeout_that_is_given_is_the_only_one() -> None:
    with FaultyServer("late", "late") as server:
        storage = ObjectStorage(URL, {**server.options, "timeout": "60s"})
        storage.put(KEY, [LARGE])
        assert bytes(storage.get(KEY, 0, len(LARGE))) == LARGE
        assert server.requests == ["PUT", "GET"]


def test_each_limit_of_a_put_fits_its_size() -> None:
    for size, seconds in limits.PUT_SECONDS.items():
        assert seconds >= limits.REQUEST_SECONDS + 2 * size / limits.MIB
    assert max(limits.PUT_SECONDS) >= limits.CHUNK_BYTES


def test_a_missing_bucket_is_not_a_missing_object(s3_server: S3Server) -> None:
    time = Time()
    storage = ObjectStorage("s3://nobody/x", s3_server.options, sleep=time.sleep, monotonic=time.monotonic)
    calls: list[Any] = [
        lambda: storage.put(KEY, [b"x"]),
        lambda: storage.get(KEY, 0, 1),
        lambda: storage.delete([KEY]),
        lambda: list(storage.list("l0/")),
    ]
    for call in calls:
        with pytest.raises(InvalidRequestError, match="the bucket of s3://nobody/x does not exist"):
            call()
    assert time.waits == []


def test_a_store_that_complains_about_missing_objects_deletes_the_others() -> None:
    with FaultyServer("404", "", "404") as server:
        server.objects |= {PATH: b"x", f"/{BUCKET}/{object_key(1, 2)}": b"y"}
        open_on(server).delete([KEY, object_key(1, 1), object_key(1, 2)])
        assert server.requests == ["POST", "POST", "POST", "POST"]
        assert server.objects == {}


def test_a_listing_that_breaks_off_goes_on_behind_the_last_key(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time()
    storage = ObjectStorage(f"{URL}/pages", s3_server.options, sleep=time.sleep, monotonic=time.monotonic)
    keys = [object_key(1, index) for index in range(7)]
    for key in keys:
        storage.put(key, [b"x"])
    real, offsets = obstore.list, []

    def list_one_page_then_break(*args: Any, **rest: Any) -> Iterator[Any]:
        offsets.append(rest["offset"])
        pages = iter(real(*args, **rest))
        if len(offsets) == 1:
            yield next(pages)
            raise exceptions.GenericError("Generic S3 error: HTTP error: request or response body error")
        yield from pages

    monkeypatch.setattr(obstore, "list", list_one_page_then_break)
    monkeypatch.setattr(objects, "_LIST_OBJECTS", 3)
    assert [found.key for found in storage.list("l0/")] == keys
    assert offsets == [None, keys[2]]
    assert len(time.waits) == 1


def test_a_key_that_can_not_be_listed_is_named_for_its_owner(s3_server: S3Server) -> None:
    storage = ObjectStorage(f"{URL}/alien", s3_server.options)
    alien = urllib.request.Request(f"{s3_server.endpoint}/{BUCKET}/alien/l0//x", b"", method="PUT")
    with urllib.request.urlopen(alien):
        pass
    with pytest.raises(InvalidRequestError, match=r'a key that headwater never makes\. Delete it: .*"alien/l0//x"'):
        list(storage.list("l0/"))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_told_instead_of_waiting_for_ever() -> None:
    with FaultyServer() as server:
        storage = open_on(server)
        storage.put(KEY, [b"x"])
        child = os.fork()
        if child == 0:
            try:
                storage.size(KEY)
            except InvalidRequestError as error:
                os._exit(0 if "spawn" in str(error) else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_short_object_is_an_error_also_when_many_ranges_are_read() -> None:
    with FaultyServer() as server:
        storage = open_on(server)
        storage.put(KEY, [b"0123456789"])
        with pytest.raises(CorruptDataError, match="too short"):
            storage.get_ranges(KEY, [(0, 4), (4, 4), (8, 4), (12, 4)])


@pytest.mark.parametrize("scheme", ["s3://bucket/prefix", "gs://bucket/prefix", "az://container/prefix"])
def test_every_kind_of_object_store_can_be_opened(scheme: str) -> None:
    storage = ObjectStorage(scheme, {"account_name": "someone"} if scheme.startswith("az") else {})
    assert (storage.url, storage.local) == (scheme, False)
    storage.close()


def test_options_of_the_client_and_of_the_store_go_where_they_belong() -> None:
    ObjectStorage(URL, {**options_for("http://127.0.0.1:1"), "timeout": "5s", "connect_timeout": "1s"})
    with pytest.raises(InvalidRequestError, match="cannot open"):
        ObjectStorage(URL, {"timeout": "soon"})


@pytest.mark.parametrize("name", ["ALLOW_HTTP", "aws_allow_http", "AWS_ALLOW_HTTP"])
def test_options_of_the_client_may_be_written_like_environment_variables(name: str) -> None:
    with FaultyServer() as server:
        options = {key: value for key, value in server.options.items() if key != "allow_http"}
        ObjectStorage(URL, {**options, name: "true"}).put(KEY, [b"content"])
        assert server.objects == {PATH: b"content"}


def test_an_option_that_obstore_panics_on_is_an_invalid_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_CLIENT_OPTIONS", frozenset())  # As for one that only a newer obstore has.
    with pytest.raises(InvalidRequestError, match=f"cannot open {URL}: Expected config prefix"):
        ObjectStorage(URL, {"timeout": "5s"})


def test_a_panic_in_a_request_is_unavailable() -> None:
    with FaultyServer() as server:
        storage = ObjectStorage(URL, {**server.options, "token": "a line\nand another"})
        calls: list[Any] = [
            lambda: storage.put(KEY, [b"x"]),
            lambda: storage.get(KEY, 0, 1),
            lambda: storage.size(KEY),
            lambda: storage.delete([KEY]),
            lambda: list(storage.list("l0/")),
        ]
        for call in calls:
            with pytest.raises(UnavailableError, match=r"obstore failed\. Check the storage options and credentials"):
                call()
