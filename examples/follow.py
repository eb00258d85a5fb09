"""Count the events of each key as they come: python follow.py STORE STREAM

Reads the whole past first, then waits at the tail, and ends when the stream is sealed. Run any number of them beside any writers.
"""

import sys
from collections import Counter

import headwater as hw


def main() -> None:
    url, name = sys.argv[1:]
    counts: Counter[str] = Counter()
    with hw.open(url, create=False) as store:
        for event in store.stream(name).read(follow=True):
            counts[event.key.decode() if event.key is not None else "(none)"] += 1
            if counts.total() % 10_000 == 0:
                print(f"{counts.total()} so far", flush=True)
    for key, count in sorted(counts.items()):
        print(f"{key}: {count}")


if __name__ == "__main__":
    main()
