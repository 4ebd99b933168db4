# make demo    three trained twins and their controls answer questions, watched; the report is demo/report.html
# make test    lint, types and tests; the page tests need Debian's chromium and are skipped without it
# make bench   the benchmarks behind docs/benchmarks.md
# make claims  test the published claims on the twins again and write docs/claims.md
# Each sets up .venv on a machine that has Python 3.11 and pip.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test lint bench claims clean

demo: $(READY)
	$(BIN)/floatscope demo --out demo

test: $(READY) lint
	$(BIN)/pytest -n 2 --dist loadfile

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
