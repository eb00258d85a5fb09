"""Count the words of text files, each once: python word_count.py STORE FOLDER

Kill it whenever you like and run it again. Lines are stored once, since what is stored of a file is in the same commit as its lines; and
counted once, since the counts are in the same commit as the reader's position.
"""

import re
import sys
from collections import Counter

import headwater as hw
from headwater.ingest import ingest


def main() -> None:
    url, folder = sys.argv[1:]
    with hw.open(url) as store:
        report = ingest(store, f"{folder}/*.txt", "words/lines", segments=2)
        print(f"{report.events} new lines stored")
        counts = store.table("words/counts")
        with store.reader_group("counters", ["words/lines"]).reader("one", commit="manual") as reader:
            while not reader.at_tail:
                batch = reader.read_batch(timeout=1.0)
                if batch is not None:
                    count(store, counts, reader, Counter(word for line in batch["value"].to_pylist() for word in words(line)))
        total = Counter({word: int(entry.value) for word, entry in counts.items()})
        for word, number in total.most_common(3):
            print(f"{number:6} {word}")


def words(line: bytes) -> list[str]:
    return re.findall(r"\w+", line.decode(errors="replace").lower())


def count(store: hw.Store, counts: hw.Table, reader: hw.Reader, found: Counter[str]) -> None:
    """Add to the table, and move the reader on, in one commit."""
    with store.transaction() as tx:
        for word, number in found.items():
            entry = counts.get(word)
            before = int(entry.value) if entry is not None else 0
            # The version makes sure that nobody else changed it in between.
            tx.put(counts.name, word, str(before + number).encode(), version=entry.version if entry is not None else hw.ABSENT)
        tx.commit_reader(reader)


if __name__ == "__main__":
    main()
