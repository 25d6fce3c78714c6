# Everything runs in .venv, built from constraints.txt, so that it is the same next year.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test test-fast test-versions check bench lock clean

demo: $(READY)  ## the main job, end to end, on the real engine
	$(BIN)/sglang-capture demo

test: $(READY)  ## all tests, those on the real engine included
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

test-fast: $(READY)  ## the tests that need no engine
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not engine"

test-versions: $(READY)  ## the tests of rows on older releases of SGLang; RELEASES="0.5.20 0.5.22" for some of them
	$(BIN)/python tests/engine/run_versions.py $(RELEASES)

check: $(READY)  ## style, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)  ## every rival beside ours, as ratios
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.run_all

$(READY): pyproject.toml constraints.txt
	@echo "building .venv: the first time this takes 5 to 10 minutes, and 11 GB with SGLang's CUDA libraries"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade --constraint constraints.txt pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[sglang,transformers,data,export,dev]'
	touch $(READY)

lock: $(READY)  ## write constraints.txt anew from what is installed
	$(BIN)/python -m pip freeze --all --exclude-editable --exclude sglang-capture \
		| sed 's/ @ file:.*//' | sort --ignore-case > constraints.txt

clean:
	rm -rf .venv demo-out
