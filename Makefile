# Everything runs in .venv, built from constraints.txt, so that it is the same next year.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# A binding that transformers loads complains when Python ends, behind pytest's closing line.
PYTEST := OMP_NUM_THREADS=1 PYTHONWARNINGS="ignore:builtin type:DeprecationWarning" $(BIN)/python -m pytest

# The trainers' own environments, for `make test-trainers`: about 2 GB each, and Python 3.11 or later.
TRAINERS ?= specforge speculators modelopt angelslim eagle automodel
# Where the trainers that are no packages are cloned from: a directory with Tencent/AngelSlim and so on does as well.
export TRAINER_SOURCES ?= https://github.com
SOURCE_modelopt := NVIDIA/Model-Optimizer@a2fbac7bad8ab446d3f8783dadb0c3366eb0ad73
SOURCE_angelslim := Tencent/AngelSlim@67394ce55f6b6cfae702575fbc3c7a05c13fdd74
SOURCE_eagle := SafeAILab/EAGLE@cb7e0841fe0c206c6ed74a197ad5e2a1f13f5a2b \
	lightseekorg/TorchSpec@6f21829cd0e333c3b54d9d2706a0b0c8dc10de9d
REQUIREMENTS := tests/trainers/requirements

.PHONY: demo test test-fast test-versions test-trainers example-eagle3 example-dflash check bench lock clean

demo: $(READY)  ## the main job, end to end, on the real engine
	$(BIN)/sglang-capture demo

test: $(READY)  ## all tests, those on the real engine included
	$(PYTEST)

test-fast: $(READY)  ## the tests that need no engine
	$(PYTEST) -m "not engine"

test-versions: $(READY)  ## the tests of rows on older releases of SGLang; RELEASES="0.5.20 0.5.22" for some of them
	$(BIN)/python tests/engine/run_versions.py $(RELEASES)

test-trainers: $(READY) $(TRAINERS:%=.trainers/%/.ready)  ## exports, read and trained on by the trainers themselves
	TRAINERS="$(TRAINERS)" $(PYTEST) -m trainers --durations=0 -raP

example-eagle3: $(READY) .trainers/specforge/.ready  ## an EAGLE-3 draft, from capture to a server that drafts with it
	OMP_NUM_THREADS=1 $(BIN)/python -m examples.eagle3_cpu.run

example-dflash: $(READY) .trainers/specforge/.ready  ## a DFlash draft, from capture to the tokens it gets accepted
	OMP_NUM_THREADS=1 $(BIN)/python -m examples.dflash_cpu.run

check: $(READY)  ## style, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)  ## every rival beside ours, as ratios: filling dumps, packing, reading, the catalog
	for part in fill pack read catalog; do OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.$$part || exit 1; done

$(READY): pyproject.toml constraints.txt
	@echo "building .venv: the first time this takes 5 to 10 minutes, and 11 GiB with SGLang's CUDA libraries"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade --constraint constraints.txt pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[sglang,transformers,data,export,dev]'
	touch $(READY)

.SECONDEXPANSION:
.trainers/%/.ready: $(REQUIREMENTS)/%.txt $$(wildcard $(REQUIREMENTS)/$$*.no-deps.txt)
	rm -rf .trainers/$*
	$(PYTHON) -m venv .trainers/$*
	.trainers/$*/bin/python -m pip install --quiet --no-compile --requirement $<
	$(if $(word 2,$^),.trainers/$*/bin/python -m pip install --quiet --no-compile --no-deps --requirement $(word 2,$^))
	tests/trainers/clone.sh .trainers/$*/sources $(SOURCE_$*)
	touch $@

lock: $(READY)  ## write constraints.txt anew from what is installed
	$(BIN)/python -m pip freeze --all --exclude-editable --exclude sglang-capture \
		| sed 's/ @ file:.*//' | sort --ignore-case > constraints.txt

clean:
	rm -rf .venv .trainers demo-out example-out
