# Every target does its own set-up: a virtual environment with the pinned dependencies.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: compare test lint learning architectures fuzz clean

compare: .venv/ready
	$(BIN)/algos compare --run-dir runs/compare

test: .venv/ready
	$(BIN)/pytest -n 2 -q

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The learning claims of the README, all seeds, with their figures: about 15 minutes on 2 cores.
learning: .venv/ready
	$(BIN)/pytest -n 2 -q -m slow --timeout 3600 -rP

# Every family of decoders in `transformers`, tiny, against a plain pass of its own: 2 minutes. `make test` has a dozen.
architectures: .venv/ready
	$(BIN)/pytest -n 2 -q -m "slow or not slow" tests/test_architectures.py

# 100,000 inputs for each reader of outside data, with what became of them. `make test` gives them a few hundred.
fuzz: .venv/ready
	$(BIN)/python tests/fuzzing.py --inputs 100000

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python {v[0]}.{v[1]} is too old: set PYTHON to 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv runs
