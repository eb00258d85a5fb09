"""Small scripts that Spark starts instead of a program, to start that program in another way."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """For what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headwater"


def keep_script(name: str, text: str) -> Path:
    """The path of a script with this text: below the user's cache, or in a temporary folder where there can be none."""
    try:
        return _write(cache_folder() / name, text)
    except OSError:
        return _write(Path(tempfile.mkdtemp(prefix="headwater-")) / name, text)


def _write(path: Path, text: str) -> Path:
    if path.exists() and path.read_text(encoding="utf-8") == text and os.access(path, os.X_OK):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another process may be starting from it just now, so it is replaced in one step.
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(text, encoding="utf-8")
    fresh.chmod(0o755)
    fresh.replace(path)
    return path
