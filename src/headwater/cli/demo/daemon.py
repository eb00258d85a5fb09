"""PySpark's daemon with headwater imported before it forks its workers, each of which would else import it again."""

from pyspark.daemon import manager

import headwater.spark  # noqa: F401

if __name__ == "__main__":
    manager()
