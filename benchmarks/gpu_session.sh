#!/usr/bin/env bash
# What a GPU machine is borrowed for, in 8 minutes: tests/gpu, then the kernels' benchmark, which writes
# benchmarks/results/kernels_<chip>.json, or DIRECTORY/kernels.json if a directory is given.
#
#     benchmarks/gpu_session.sh [DIRECTORY]
#
# Needs Python >= 3.12 with jax[cuda13] >= 0.11.2, flax, jaxtyping and pytest (PYTHON names it); torch and flashinfer are
# compared with where they are installed. Nothing is fetched. Both parts run whatever becomes of the other.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
export PYTHONUNBUFFERED=1 TF_CPP_MIN_LOG_LEVEL=2
status=0
GPU_TESTS_SECONDS=80 timeout 150 "$python" -m pytest tests/gpu -q -m gpu --junitxml="${1:-build}/gpu_tests.xml" || status=$?
timeout 325 "$python" -m benchmarks.kernels --seconds 280 ${1:+--output "$1/kernels.json"} || status=$?
exit "$status"
