"""docs/spark.md calls nothing a savepoint that is none, and names what has them."""

from __future__ import annotations

import re

from tests.docs.test_examples import ROOT


def test_the_page_on_spark_points_to_pipelines_for_savepoints() -> None:
    text = " ".join((ROOT / "docs" / "spark.md").read_text().split())
    assert not re.search(r"checkpoint is a savepoint", text)
    (section,) = re.findall(r"\]\(pipelines\.md#([\w-]+)\)", text)
    headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / "pipelines.md").read_text(), re.MULTILINE)
    assert section in [heading.lower().replace(" ", "-") for heading in headings]
