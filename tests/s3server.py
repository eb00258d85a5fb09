"""Two S3-speaking servers on loopback: moto's, in a process of its own, and a small one that misbehaves on request."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BUCKET = "headwater"
LATE_SECONDS = 1.5
_PIECES = 15

#: The server ends when its input does, so that it never outlives tests that were killed.
_SERVE = """
import os, sys, threading
from moto.server import main
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
main(["-H", "127.0.0.1", "-p", "0"])
"""


class S3Server:
    """moto's server in a subprocess, with one bucket. `options` is what `open_storage` needs to reach it."""

    def __init__(self) -> None:
        command = [sys.executable, "-W", "ignore", "-c", _SERVE]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        # Port 0 lets the kernel choose, so two test runs on one machine never meet; the server prints what it got.
        address = next((found for line in self._process.stderr if (found := re.search(r"http://127\.0\.0\.1:\d+", line))), None)
        if address is None:
            raise RuntimeError(f"moto's server ended with {self._process.wait()} before it listened")
        # It logs every request: unread, the pipe would fill and the server stop.
        self._drain = threading.Thread(target=lambda log: [None for _ in log], args=(self._process.stderr,), daemon=True)
        self._drain.start()
        self.endpoint = address[0]
        self.options = options_for(self.endpoint)
        with urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="PUT")):
            pass

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stderr is not None
        self._process.stdin.close()
        self._process.wait()
        self._drain.join()
        self._process.stderr.close()


@contextlib.contextmanager
def running_s3() -> Iterator[S3Server]:
    """moto's server, until the block ends."""
    server = S3Server()
    try:
        yield server
    finally:
        server.close()


def options_for(endpoint: str) -> dict[str, str]:
    """The options with which `open_storage` reaches a server at this address."""
    return {"endpoint": endpoint, "access_key_id": "test", "secret_access_key": "test", "region": "us-east-1", "allow_http": "true"}


class FaultyServer(ThreadingHTTPServer):
    """Keeps objects like S3, but meets each request with the next of `faults` first.

    A fault is a status ("503", or with a code of S3's, "400 ExpiredToken"), "drop" (close, having done nothing), "hang" (the same, but only
    after `release` is set), "lose" (do it, then close without an answer), "cut" (answer with half the body), "stall" (the same, and say
    nothing more until `release` is set), "late" (answer `LATE_SECONDS` later), "crawl" (answer with a body that takes so long), or "" for
    none. `requests` are the methods of all that came.
    """

    daemon_threads = True

    def __init__(self, *faults: str) -> None:
        self.faults = list(faults)
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.release = threading.Event()
        super().__init__(("127.0.0.1", 0), _FaultyHandler)
        self.options = options_for(f"http://127.0.0.1:{self.server_port}")
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> FaultyServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release.set()
        self.shutdown()
        self._thread.join()
        self.server_close()


class _FaultyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 65536  # Head and body leave together; apart they wait 40 ms for a delayed acknowledgement.
    server: FaultyServer

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append(self.command)
        fault = self.server.faults.pop(0) if self.server.faults else ""
        if fault == "hang":
            self.server.release.wait()
        if fault in ("drop", "hang"):
            self.close_connection = True
        elif fault[:3].isdigit():
            self._answer(int(fault[:3]), b"<Error><Code>%s</Code></Error>" % (fault[4:] or "Injected").encode())
        else:
            status, answer = self._do(body)
            if fault == "late":
                self.server.release.wait(LATE_SECONDS)
            if fault == "lose":
                self.close_connection = True
            else:
                self._answer(status, answer, fault)

    def _do(self, body: bytes) -> tuple[int, bytes]:
        objects = self.server.objects
        if self.command == "PUT":
            if self.path in objects and self.headers["If-None-Match"] == "*":
                return 412, b"<Error><Code>PreconditionFailed</Code></Error>"
            objects[self.path] = body
            return 200, b""
        if self.command == "POST":
            keys = re.findall(rb"<Key>(.*?)</Key>", body)
            for key in keys:
                objects.pop(f"{self.path.partition('?')[0]}/{key.decode()}", None)
            return 200, b"<DeleteResult>%s</DeleteResult>" % b"".join(b"<Deleted><Key>%s</Key></Deleted>" % key for key in keys)
        if self.path not in objects:
            return 404, b"<Error><Code>NoSuchKey</Code></Error>"
        if asked := re.match(r"bytes=(\d+)-(\d+)", self.headers["Range"] or ""):
            self._range = (int(asked[1]), min(int(asked[2]) + 1, len(objects[self.path])), len(objects[self.path]))
            return 206, objects[self.path][self._range[0] : self._range[1]]
        return 200, objects[self.path]

    def _answer(self, status: int, body: bytes, fault: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"etag"')
        self.send_header("Last-Modified", "Wed, 01 Jan 2025 00:00:00 GMT")
        if status == 206:
            start, end, size = self._range
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.end_headers()
        if fault == "crawl":
            for piece in range(_PIECES):
                self.server.release.wait(LATE_SECONDS / _PIECES)
                self.wfile.write(body[len(body) * piece // _PIECES : len(body) * (piece + 1) // _PIECES])
                self.wfile.flush()
        elif self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if fault in ("cut", "stall") else body)
        if fault == "stall":
            self.wfile.flush()
            self.server.release.wait()
        self.close_connection = self.close_connection or fault in ("cut", "stall")

    do_GET = do_PUT = do_HEAD = do_POST = _handle

    def log_message(self, format: str, *args: object) -> None:
        """The test says what went wrong; the server stays quiet."""
