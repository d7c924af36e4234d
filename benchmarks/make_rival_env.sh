#!/usr/bin/env bash
# Makes a virtual environment with the rivals that paged_jax never depends on: torch (CPU) and transformers.
# Usage: benchmarks/make_rival_env.sh DIRECTORY [PYTHON]
set -euo pipefail
directory=${1:?usage: make_rival_env.sh DIRECTORY [PYTHON]}
"${2:-python3}" -m venv "$directory"
"$directory/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate gguf numpy
"$directory/bin/python" -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__)'
