"""Store every line of every file in a folder, exactly once: python ingest_files.py STORE STREAM FOLDER

Kill it whenever you like and start it again. Each file has a named writer, each line its number: the store knows how far it came.
"""

import sys
from pathlib import Path

import headwater as hw


def ingest(stream: hw.Stream, path: Path) -> int:
    """Store the lines that are not stored yet; returns how many those were."""
    stored = 0
    with stream.writer(path.name) as writer, path.open("rb") as file:
        before = writer.last_number
        for number, line in enumerate(file, start=1):
            if number > before:
                writer.write(line.rstrip(b"\n"), key=path.name, number=number)
                stored += 1
    return stored  # the writer is closed, so they are durable


def main() -> None:
    url, name, folder = sys.argv[1:]
    with hw.open(url) as store:
        stream = store.create_stream(name, exist_ok=True)
        for path in sorted(Path(folder).iterdir()):
            print(f"{path.name}: {ingest(stream, path)} lines stored")


if __name__ == "__main__":
    main()
