"""Byte streams: an append-only file of any length, read as a file."""

from __future__ import annotations

import array
import io
import os
import random
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headwater as hw
from headwater.model.cuts import StreamCut

MIB = 1024 * 1024


@pytest.fixture
def store(tmp_path: Path, catalog_url: str | None) -> Iterator[hw.Store]:
    with hw.open(tmp_path / "store", catalog=catalog_url) as store:
        yield store


@pytest.fixture
def stream(store: hw.Store) -> hw.Stream:
    return store.create_stream("a/bytes", kind="bytes")


def cut(stream: hw.Stream, offset: int) -> hw.Cut:
    return hw.Cut(stream.tail().store, {stream.name: StreamCut(stream.id, {0: offset})})


def test_what_is_written_is_read_from_any_offset(stream: hw.Stream) -> None:
    with stream.byte_writer() as writer:
        assert writer.write(b"hello ") == 6
        assert writer.write(bytearray(b"wor")) == 3
        writer.flush()
        assert writer.write(memoryview(b"ld")) == 2
        assert writer.write(b"") == 0
    with stream.byte_reader() as reader:
        assert reader.readall() == b"hello world" == stream.byte_reader(0).read()
        assert reader.tell() == 11 and reader.read() == b"" == reader.read(5)
    assert stream.byte_reader(start=6).readall() == b"world"
    assert dict(stream.tail().streams["a/bytes"].segments) == {0: 11}
    assert (stream.segments()[0].events, stream.segments()[0].bytes) == (11, 11)


def test_a_writer_is_a_raw_file_for_what_writes_to_files(stream: hw.Stream) -> None:
    writer = stream.byte_writer()
    assert isinstance(writer, io.RawIOBase) and writer.writable() and not writer.readable() and not writer.seekable()
    writer.writelines([b"one,", b"two\n"])
    shutil.copyfileobj(io.BytesIO(b"copied\n"), writer)
    buffered = io.BufferedWriter(writer)
    buffered.write(b"buffered\n")
    buffered.detach().flush()
    assert stream.byte_reader().readlines() == [b"one,two\n", b"copied\n", b"buffered\n"]
    assert writer.write(array.array("H", [1, 2])) == 4
    with pa.PythonFile(writer, mode="w") as arrow:
        arrow.write(b"arrow\n")
    assert writer.closed and stream.byte_reader().read().endswith(b"arrow\n")
    with io.TextIOWrapper(io.BufferedWriter(stream.byte_writer()), encoding="utf-8") as text:
        print("télé", file=text)
    assert stream.byte_reader().read().endswith("télé\n".encode())
    with pytest.raises(hw.InvalidRequestError, match="closed"):
        writer.write(b"x")


def test_a_closed_reader_says_so(stream: hw.Stream) -> None:
    reader = stream.byte_reader()
    reader.close()
    for call in (reader.read, reader.tell, lambda: reader.seek(0), lambda: reader.readinto(bytearray(1))):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_an_abandoned_writer_of_bytes_warns_and_its_bytes_are_stored(store: hw.Store, stream: hw.Stream) -> None:
    writer = stream.byte_writer()
    writer.write(b"all of it")
    with pytest.warns(ResourceWarning, match="a writer of a/bytes was abandoned"):
        del writer
    store.close()
    with hw.open(store.address[0], catalog=store.address[1]) as again:
        assert again.stream("a/bytes").byte_reader().read() == b"all of it"


def test_a_reader_is_a_raw_file_that_can_seek(stream: hw.Stream) -> None:
    with stream.byte_writer() as writer:
        writer.write(b"0123456789")
    reader = stream.byte_reader()
    assert isinstance(reader, io.RawIOBase) and reader.readable() and reader.seekable() and not reader.writable()
    assert reader.seek(3) == 3 and reader.read(2) == b"34" and reader.tell() == 5
    assert reader.seek(-4, os.SEEK_END) == 6 and reader.read(1) == b"6"
    assert reader.seek(-2, os.SEEK_CUR) == 5 and reader.read(1) == b"5"
    buffer = bytearray(3)
    assert reader.readinto(buffer) == 3 and bytes(buffer) == b"678"
    assert reader.readinto(bytearray(0)) == 0
    with io.BufferedReader(stream.byte_reader()) as buffered:
        assert buffered.read(4) == b"0123" and buffered.peek(1)[:1] == b"4"
    for offset, whence in ((-1, 0), (-11, 2), (-1, 1)):
        with pytest.raises(hw.InvalidRequestError, match="no offset"):
            stream.byte_reader().seek(offset, whence)
    with pytest.raises(hw.InvalidRequestError, match="seek goes from"):
        reader.seek(0, 7)
    assert reader.tell() == 9


def test_reading_begins_at_an_offset_or_at_a_place(store: hw.Store, stream: hw.Stream) -> None:
    with stream.byte_writer() as writer:
        writer.write(b"0123456789")
    middle = datetime.now(UTC)
    with stream.byte_writer() as writer:
        writer.write(b"later")
    stream.truncate(cut(stream, 2))
    for start, expected in (
        (4, b"456789later"),
        (cut(stream, 4), b"456789later"),
        ("head", b"23456789later"),
        (None, b"23456789later"),
        (middle, b"later"),
        ("tail", b""),
    ):
        assert stream.byte_reader(start).read() == expected, start
    with pytest.raises(hw.TruncatedError):
        stream.byte_reader(cut(stream, 1))
    wrong: Any
    for wrong in ("x", 1.5, [], b"head", store.create_stream("a/other").tail(), datetime(2026, 1, 1)):
        with pytest.raises(hw.InvalidRequestError):
            stream.byte_reader(wrong)
    for wrong in (1.5, "1", None):
        with pytest.raises(hw.InvalidRequestError, match="an offset in a byte stream is a whole number"):
            stream.byte_reader("head").seek(wrong)


def test_a_reader_at_the_tail_reads_on_once_there_is_more(stream: hw.Stream) -> None:
    reader, ahead = stream.byte_reader(), stream.byte_reader(start=4)
    with stream.byte_writer() as writer:
        assert reader.read() == b"" == ahead.read()
        writer.write(b"abc")
        writer.flush()
        assert reader.read() == b"abc" and reader.read() == b"" == ahead.read()
        writer.write(b"def")
        writer.flush()
        assert reader.read() == b"def" and ahead.read() == b"ef"


def test_lines_are_read_through_the_standard_library(stream: hw.Stream) -> None:
    lines = [f"line {n}\n" for n in range(1000)]
    with stream.byte_writer() as writer:
        for line in lines:
            writer.write(line.encode())
    with io.TextIOWrapper(io.BufferedReader(stream.byte_reader())) as text:
        assert list(text) == lines


def test_large_writes_and_random_reads(stream: hw.Stream, seed: int) -> None:
    chance = random.Random(seed)
    content = chance.randbytes(3 * MIB)
    with stream.byte_writer() as writer:
        at = 0
        while at < len(content):
            size = chance.choice([1, 1000, 200_000, MIB])
            writer.write(content[at : at + size])
            at += size
            if chance.random() < 0.3:
                writer.flush()
    reader = io.BufferedReader(stream.byte_reader())
    for _ in range(50):
        start, size = chance.randrange(len(content)), chance.choice([1, 100, 300_000])
        reader.seek(start)
        assert reader.read(size) == content[start : start + size]
    assert stream.byte_reader().readall() == content


@pytest.mark.slow
def test_one_write_may_be_larger_than_everything_that_may_be_buffered(tmp_path: Path) -> None:
    with hw.open(tmp_path / "store") as store:
        stream = store.create_stream("a/bytes", kind="bytes")
        content = bytes(range(256)) * 4096 * 80
        with stream.byte_writer() as writer:
            assert writer.write(content) == len(content) == 80 * MIB
        reader = io.BufferedReader(stream.byte_reader(), buffer_size=MIB)
        assert all(reader.read(MIB) == content[:MIB] for _ in range(80)) and reader.read(1) == b""


def test_what_was_truncated_can_not_be_read(stream: hw.Stream) -> None:
    with stream.byte_writer() as writer:
        writer.write(b"0123456789")
    early = stream.byte_reader()
    stream.truncate(cut(stream, 4))
    with pytest.raises(hw.TruncatedError, match="its head is 4") as caught:
        stream.byte_reader()
    assert caught.value.head == stream.head() == cut(stream, 4)
    reader = stream.byte_reader(4)
    assert reader.read() == b"456789"
    with pytest.raises(hw.TruncatedError):
        reader.seek(3)
    stream.truncate(stream.tail())
    with pytest.raises(hw.TruncatedError) as caught:
        early.read()
    assert caught.value.head == stream.head()
    with stream.byte_writer() as writer:
        writer.write(b"more")
    assert stream.byte_reader(10).read() == b"more"


def test_a_sealed_byte_stream_is_read_and_not_written(store: hw.Store, stream: hw.Stream) -> None:
    writer = stream.byte_writer()
    writer.write(b"kept")
    writer.flush()
    stream.seal()
    writer.write(b"lost")
    with pytest.raises(hw.SealedError):
        writer.flush()
    writer.abandon()
    with pytest.raises(hw.SealedError):
        stream.byte_writer()
    reader = stream.byte_reader()
    assert reader.read() == b"kept"
    store.delete_stream("a/bytes")
    for call in (stream.byte_reader, reader.read, stream.byte_writer):
        with pytest.raises(hw.NotFoundError, match="deleted"):
            call()


def test_bytes_and_events_are_not_mixed(store: hw.Store, stream: hw.Stream) -> None:
    events = store.create_stream("a/events")
    for call in (stream.writer, lambda: list(stream.read()), stream.to_arrow, stream.ranges):
        with pytest.raises(hw.InvalidRequestError, match="stream of bytes"):
            call()
    with pytest.raises(hw.InvalidRequestError, match="stream of events"):
        events.byte_writer()
    with pytest.raises(hw.InvalidRequestError, match="stream of events"):
        events.byte_reader()
    with pytest.raises(hw.InvalidRequestError, match="one segment"):
        stream.split(0)
    with pytest.raises(hw.InvalidRequestError, match="one segment"):
        stream.merge([0, 1])
    with pytest.raises(hw.InvalidRequestError, match="byte stream"):
        store.create_stream("a/other", kind="bytes", schema=events.schema)
    with pytest.raises(hw.InvalidRequestError, match="byte stream"):
        store.create_stream("a/other", kind="bytes", scaling=hw.Scaling.fixed(2))


def test_only_bytes_are_taken_and_a_closed_end_says_so(stream: hw.Stream) -> None:
    writer = stream.byte_writer()
    wrong: Any
    for wrong in ("text", 7, None, [1]):
        with pytest.raises(hw.InvalidRequestError, match="takes bytes"):
            writer.write(wrong)
    writer.close()
    writer.close()
    with pytest.raises(hw.InvalidRequestError, match="closed"):
        writer.write(b"x")
    reader = stream.byte_reader()
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader.read()
    for offset in (-1, -100):
        with pytest.raises(hw.InvalidRequestError):
            stream.byte_reader(offset)
    assert stream.byte_reader().read() == b""
