# edkm: `make demo` and `make test` set up everything they need on a machine with Python 3.11+ and the package registry.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := edkm_cli examples tests scripts
# Four workers, each with one thread: fewer leave a third of two cores idle, since many tests wait for processes of their own. A worker
# takes a file at a time, so its fixtures are made once.
PYTEST := $(BIN)/python -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder

# A module is compiled when it is first imported, once: pip would compile all 17,000 of them, which takes a minute, and a process that
# may not write what it compiled takes seconds longer to start. (0: that is how pip is told.)
export PIP_NO_COMPILE := 0
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv demo test lint check fix bench fuzz faults families clean model

help:  ## what the targets do
	@awk -F ':.*## *' '/^[a-z]+:.*##/ { printf "%-10s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP)  ## .venv with the project and everything its tests need

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "edkm needs Python 3.11 or newer, got " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	PYTHON=$(BIN)/python scripts/install.sh -e ".[dev]"
	@touch $@

model: venv  ## SmolLM2-135M into the cache
	@PYTHON=$(BIN)/python scripts/get_smollm2.sh

demo: venv model  ## compress SmolLM2-135M to 3 bits, trained a little, exported, reloaded, evaluated
	@PATH="$(CURDIR)/$(BIN):$$PATH" scripts/demo.sh

test: venv model  ## all tests
	@$(BIN)/python -m pytest -q --collect-only >/dev/null || true  # compiles what is imported once, not in each worker
	$(PYTEST)

lint: venv  ## lint, format, types, import contract
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	PYTHONPATH=. $(BIN)/lint-imports

check: lint  ## lint and fast tests
	$(PYTEST) -m "not slow and not real_model"

fix: venv  ## repair lint and format
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

fuzz: venv  ## 20,000 mutated checkpoints (make test draws 700), as many times more of all other files, 400 runs of drawn settings
	EDKM_FUZZ=20000 $(BIN)/python -m pytest -q -s tests/test_fuzzing.py tests/test_fuzzing_inputs.py tests/test_fuzzing_settings.py

faults: venv  ## 100 faults in the middle of a run and 40 kills (make test: 10 and 6), with a table in out/faults.json
	@mkdir -p out
	EDKM_FAULTS=100 EDKM_FAULTS_JSON=out/faults.json $(BIN)/python -m pytest -q -s tests/faults tests/test_compress_killed.py

families: venv  ## all families of models, in both number formats (make test: a part of them)
	EDKM_FAMILIES=all $(BIN)/python -m pytest -q tests/test_families.py

bench: venv  ## the clustering engine on this machine, JSON into out/
	@mkdir -p out
	$(BIN)/edkm bench clustering --json out/bench_clustering.json

clean:  ## remove the environment and all outputs
	rm -rf $(VENV) out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
