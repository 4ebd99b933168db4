# make demo    three trained twins and their controls answer questions, watched; the report is demo/report.html
# make test    lint, types and tests; the page tests need Debian's chromium and are skipped without it
# make test-slow  the tests that take seconds (training, kills, documents), and hypothesis with all its examples
# make test-versions  the tests of models, capture, sampling and pipelines on the oldest and the newest tested transformers
# make bench   the benchmarks behind docs/benchmarks.md
# make claims  test the published claims on the twins again and write docs/claims.md
# Each sets up .venv on a machine that has Python 3.11 and pip.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# Without compiled files every worker and every command that a test starts would compile all modules again.
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n 2 --dist worksteal

.PHONY: demo test test-slow test-versions lint bench claims clean

demo: $(READY)
	$(BIN)/floatscope demo --out demo

test: $(READY) lint
	$(PYTEST) -m "not slow"

test-slow: $(READY)
	$(PYTEST) -m "slow or hypothesis" --hypothesis-profile=all

VERSIONS := 5.17.0 5.23.0

test-versions: $(VERSIONS:%=.venv-%/.ready)
	for v in $(VERSIONS); do \
	  .venv-$$v/bin/pytest -n 2 --dist loadfile tests/models tests/capture tests/sampling tests/pipelines || exit 1; done

.venv-%/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-$*
	grep -vE '^(transformers|huggingface_hub)==' constraints.txt > .venv-$*/constraints.txt
	.venv-$*/bin/pip install --quiet --disable-pip-version-check --constraint .venv-$*/constraints.txt \
	  transformers==$* --editable ".[dev]"
	touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/watch_cost.py
	$(BIN)/python benchmarks/decode_speed.py
	$(BIN)/python benchmarks/accuracy.py
	$(BIN)/python benchmarks/analysis_speed.py
	$(BIN)/python benchmarks/twin_speed.py
	$(BIN)/python benchmarks/page_speed.py
	$(BIN)/python benchmarks/index_speed.py
	$(BIN)/python benchmarks/eval_speed.py
	$(BIN)/python benchmarks/edit_cost.py
	$(BIN)/python benchmarks/adapt_speed.py
	$(BIN)/python benchmarks/robustness.py

claims: $(READY)
	$(BIN)/python studies/claims/run.py twins
	$(BIN)/python studies/claims/page.py

$(VENV)/.bench: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[bench]"
	touch $@

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
