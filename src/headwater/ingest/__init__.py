"""Ingestion: files become events of a stream, each row once, however often the ingester is killed or started twice.

What is stored of a file and the events themselves are in one commit; `record.py` says how, and who may write it.
"""

from headwater.ingest.ingester import Progress, Report, ingest

__all__ = ["Progress", "Report", "ingest"]
