# make demo    install, then fine-tune a real model inside a memory limit (ARGS="--max_steps 5")
# make test    install, then format check, lint, types, tests with coverage (JOBS=4: by four)
# make format  rewrite the sources in the project's format
# make clean   remove the environment and everything that was built

PYTHON ?= python3
ARGS ?=
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed.stamp
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test format clean

demo: $(STAMP)
	$(BIN)/python examples/make_demo_model.py
	$(BIN)/python examples/make_demo_data.py
	$(BIN)/tightfit train examples/demo.yaml --overwrite_output_dir $(ARGS)

test: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -m "not slow" -n $(JOBS) --dist loadfile --cov --cov-report=term:skip-covered $(ARGS)

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build runs examples/.cache .coverage
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "tightfit needs Python 3.11 or newer; '$(PYTHON)' is `$(PYTHON) --version 2>&1`." \
	       "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c requirements.lock torch==2.13.0
	$(PIP) install -q --no-deps -r requirements.lock
	$(PIP) install -q --no-deps --no-build-isolation -e .
	touch $(STAMP)
