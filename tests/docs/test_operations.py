"""docs/architecture.md lists the operations that the code declares."""

from __future__ import annotations

from tests.docs import operations


def test_the_list_of_operations_is_made_of_the_present_code() -> None:
    text = operations.PATH.read_text()
    assert operations.make_table() in text, "python -m tests.docs.operations --write"
    assert text == operations.make_page(text), "python -m tests.docs.operations --write"
