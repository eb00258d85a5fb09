"""Rolling outputs back as part of a restore's one commit: a stream to a cut, a table by the changes that give its old entries again."""

from __future__ import annotations

from headwater import Cut, Store, Transaction, TruncatedError


def add_roll_back(tx: Transaction, store: Store, target: str, cut: Cut, keep_as: str) -> None:
    """Let a stream end at a cut again, at the commit of `tx`; what lies past it stays readable as `keep_as`."""
    if store.stream(target).kind == "table":
        _add_entries(tx, store, target, sum(cut.streams[target].segments.values()))
    elif store.stream(target).ranges(cut):
        tx.roll_back(target, cut, keep_as=keep_as)


def _add_entries(tx: Transaction, store: Store, name: str, version: int) -> None:
    """Put the entries as of a version again, and remove those that were missing. A table is known by its changes."""
    table = store.table(name)
    changed = {change.key: change.value for change in table.changes(after=version)}
    before: dict[str, bytes | None] = {}
    head = sum(store.stream(name).head().streams[name].segments.values())
    for change in table.changes(after=head):
        if change.version > version:
            break
        if change.key in changed:
            before[change.key] = change.value
    for key, value in changed.items():
        if key not in before and head > 0:
            raise TruncatedError(
                f"the table {name} can't be rolled back to version {version}: its changes before version {head} were truncated, "
                f"and {key!r} may be among them. Restore with outputs='append'",
                store.stream(name).head(),
            )
        old = before.get(key)
        if old is None:
            if value is not None:
                tx.remove(name, key)
        elif old != value:
            tx.put(name, key, old)
