"""Where the peers' programs come from: the machine's own package registries, by name and version, kept in a cache folder.

Jars are resolved by the Ivy that comes with PySpark; a digest over all of them is pinned here, so a peer is always the same bytes. Debian's
packages are checked by apt, and their versions are those of the distribution.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import quoteattr

from benchmarks.peers.servers import java


@dataclass(frozen=True)
class Jars:
    """A set of jars: (group, name, version) of what is wanted, with or without what those need, and the digest of all files together."""

    name: str
    wanted: tuple[tuple[str, str, str], ...]
    transitive: bool
    sha256: str
    #: Not on the class path: these begin the names of jars that collide with others.
    without: tuple[str, ...] = field(default=())


KAFKA = Jars(
    "kafka-4.3.1",
    (("org.apache.kafka", "kafka_2.13", "4.3.1"),),
    True,
    "ff8df5417922c42dd6a34af88ed4695d68061be7cd5404dd3a954c472adeb099",
)
PRAVEGA = Jars(
    "pravega-0.13.0",
    (("io.pravega", "pravega-standalone", "0.13.0"),),
    True,
    "10390866d408c9c6eddfb8199e8b1909aef1168093c9d54125f05731cd622452",
    # Two versions of Bouncy Castle don't fit together, and Pravega runs without; two loggers for slf4j.
    without=("bcprov", "bcpkix", "slf4j-reload4j", "log4j-1.2"),
)
# The newest for Scala 2.13 that are there; they work with Spark 4.3.
SPARK_KAFKA = Jars(
    "spark-kafka-4.2.0",
    (
        ("org.apache.spark", "spark-sql-kafka-0-10_2.13", "4.2.0"),
        ("org.apache.spark", "spark-token-provider-kafka-0-10_2.13", "4.0.0"),
        ("org.apache.kafka", "kafka-clients", "4.3.1"),
        ("org.apache.commons", "commons-pool2", "2.12.0"),
    ),
    False,
    "0f5439c1d350ec825b5d1259df83e8bb724a4c05df28dbec98ed420fa173af76",
)
NATS = ("github.com/nats-io/nats-server/v2", "v2.15.2")


def cache_folder() -> Path:
    """Outside of any repository; HEADWATER_PEERS_CACHE chooses another."""
    given = os.environ.get("HEADWATER_PEERS_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given) if given else base / "headwater-peers"


def fetch_jars(jars: Jars, cache: Path | None = None) -> list[Path]:
    """The jars for a class path, downloaded on first use and checked every time."""
    cache = cache or cache_folder()
    folder = cache / jars.name
    if not folder.exists():
        _retrieve(jars, cache, folder)
    found = sorted(folder.glob("*.jar"))
    if (digest := digest_of(found)) != jars.sha256:
        raise RuntimeError(f"{folder} holds other files than the {jars.name} of this benchmark ({digest}): remove it to fetch it again")
    return [path for path in found if not path.name.startswith(jars.without)]


def digest_of(files: list[Path]) -> str:
    """One SHA-256 for the names and bytes of all files."""
    total = hashlib.sha256()
    for path in files:
        with open(path, "rb") as data:
            total.update(f"{path.name} {hashlib.file_digest(data, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def _retrieve(jars: Jars, cache: Path, folder: Path) -> None:
    import pyspark  # an extra

    cache.mkdir(parents=True, exist_ok=True)
    ivy = next(Path(pyspark.__file__).parent.glob("jars/ivy-*.jar"))
    module = cache / f"{jars.name}.ivy.xml"
    module.write_text(ivy_module(jars), encoding="utf-8")
    partial = cache / f"{jars.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    pattern = f"{partial}/[artifact]-[revision](-[classifier]).[ext]"
    command: list[str | Path] = [
        java(),
        "-jar",
        ivy,
        "-cache",
        cache / "ivy",
        "-ivy",
        module,
        "-confs",
        "default",
        "-types",
        "jar",
        "bundle",
    ]
    _run([*command, "-retrieve", pattern])
    partial.rename(folder)


def ivy_module(jars: Jars) -> str:
    """The file that tells Ivy what to resolve."""
    transitive = str(jars.transitive).lower()
    lines = [
        f"<dependency org={quoteattr(group)} name={quoteattr(name)} rev={quoteattr(version)} "
        f'conf="default->default" transitive="{transitive}"/>'
        for group, name, version in jars.wanted
    ]
    return (
        '<ivy-module version="2.0"><info organisation="headwater" module="peers"/><configurations><conf name="default"/></configurations>'
        f"<dependencies>{''.join(lines)}</dependencies></ivy-module>"
    )


@dataclass(frozen=True)
class Program:
    """A server's program, and the environment it needs."""

    path: Path
    environment: dict[str, str] = field(default_factory=dict)


def fetch_redis(cache: Path | None = None) -> Program:
    """The machine's redis-server, else Debian's package, unpacked."""
    found = shutil.which("redis-server")
    if found:
        return Program(Path(found))
    root = _unpack_debian("redis", ("redis-server", "redis-tools", "libjemalloc2", "liblzf1"), cache or cache_folder())
    libraries = ":".join(sorted({str(path.parent) for path in root.glob("usr/lib/*/*.so.*")}))
    return Program(root / "usr/bin/redis-server", {"LD_LIBRARY_PATH": libraries})


def fetch_nats(cache: Path | None = None) -> Program:
    """The machine's nats-server; else a current one built by Go from its module proxy; else Debian's package, which is older."""
    cache = cache or cache_folder()
    found = shutil.which("nats-server")
    if found:
        return Program(Path(found))
    go = shutil.which("go")
    if go is None:
        return Program(_unpack_debian("nats", ("nats-server",), cache) / "usr/sbin/nats-server")
    module, version = NATS
    folder = cache / f"nats-{version.removeprefix('v')}"
    if not (folder / "nats-server").exists():
        _run([go, "install", f"{module}@{version}"], {"GOBIN": str(folder)})
    return Program(folder / "nats-server")


def _unpack_debian(name: str, packages: tuple[str, ...], cache: Path) -> Path:
    root = cache / f"debian-{name}"
    if root.exists():
        return root
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise RuntimeError(f"install {name} yourself: it is not on the PATH, and this is no Debian to take it from")
    partial = cache / f"debian-{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _run(["apt-get", "download", *packages], folder=partial)
    for package in sorted(partial.glob("*.deb")):
        _run(["dpkg", "-x", package, partial])
        package.unlink()
    partial.rename(root)
    return root


def _run(command: list[str | Path], environment: dict[str, str] | None = None, folder: Path | None = None) -> None:
    print(f"fetching: {' '.join(str(word) for word in command[:6])} ...", file=sys.stderr)
    done = subprocess.run(
        [str(word) for word in command], cwd=folder, env={**os.environ, **(environment or {})}, capture_output=True, text=True, timeout=1800
    )
    if done.returncode != 0:
        shown = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise RuntimeError(f"{command[0]} ended with {done.returncode}:\n{shown}")
