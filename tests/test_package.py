"""The package as a newcomer meets it: import, public names, command line, examples."""

import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

import paged_jax

ROOT = Path(__file__).parent.parent


def run(*args: str, timeout: float = 900) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # as in conftest.py
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


def test_public_names_exist_and_are_documented():
    for name in paged_jax.__all__:
        assert getattr(paged_jax, name).__doc__, name


def test_version_is_that_of_the_project():
    assert f'version = "{paged_jax.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_import_costs_less_than_one_and_a_half_times_jax_and_flax():
    """CPU time of the import, interleaved; the minimum of several, for other load only adds."""

    def cpu_seconds(modules: str) -> float:
        code = f"import time; t = time.process_time(); import {modules}; print(time.process_time() - t)"
        return float(run("-c", code).stdout)

    pairs = [(cpu_seconds("jax, flax"), cpu_seconds("paged_jax")) for _ in range(3)]
    base, ours = (min(p[i] for p in pairs) for i in (0, 1))
    assert ours < 1.5 * base, (ours, base, statistics.median(p[1] / p[0] for p in pairs))


def test_import_loads_no_optional_package():
    optional = {"models", "tokenizers", "gguf", "tqdm", "torch", "jinja2", "matplotlib", "prometheus_client"}
    assert run("-c", f"import sys, paged_jax; print({optional} & set(sys.modules))").stdout.strip() == "set()"


def test_paged_jax_imports_no_model_and_kernels_import_nothing_of_ours():
    for folder, banned in (
        ("paged_jax", r"^(from|import) models"),
        ("pallas_kernels", r"^(from|import) (paged_jax|models)"),
    ):
        for path in (ROOT / folder).glob("*.py"):
            assert not re.search(f"^(from|import) {banned}", path.read_text(), re.MULTILINE), path


def test_example_own_model_runs_in_plain_jax_and_flax():
    result = run("-m", "examples.own_model")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["plain JAX"] * 2 + ["Flax"] * 2
    assert all(len(json.loads(line.split("-> ")[1])) == 12 for line in lines)


def test_example_decode_loop_runs_to_the_end():
    result = run("-m", "examples.decode_loop")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [len(json.loads(line.split("-> ")[1])) for line in lines[:2]] == [24, 24]
    assert lines[2] == "63 blocks free"


def test_example_beam_search_prints_the_beams_best_first():
    result = run("-m", "examples.beam_search")
    assert result.returncode == 0, result.stderr
    *beams, occupancy = result.stdout.splitlines()
    scores = [float(line.split("score ")[1]) for line in beams]
    assert scores == [*sorted(scores[:4], reverse=True), *sorted(scores[4:], reverse=True)]
    assert len(scores) == 8
    used, unshared = map(int, re.findall(r"\d+", occupancy))
    assert used < unshared


def test_memory_benchmark_without_beams_counts_what_paging_saves(tmp_path):
    output = tmp_path / "memory.json"
    arguments = "--beam-widths --num-samples 2 --block-sizes 8 32 --num-requests 12 --num-rows 4 --max-model-len 512"
    result = run("benchmarks/memory.py", *arguments.split(), "--output", str(output))
    assert result.returncode == 0, result.stderr
    for traffic in json.loads(output.read_text())["traffic"].values():
        small, large = (traffic["by_block_size"][size] for size in ("8", "32"))
        assert 0 < small["waste_percent"]["paged"] < large["waste_percent"]["paged"]
        assert large["waste_percent"]["paged"] < large["waste_percent"]["contiguous"]
        assert 50 > small["parallel_sampling"]["2"]["saved"] > large["parallel_sampling"]["2"]["saved"] > 0


def test_engine_works_with_64_bit_types_enabled_and_without_a_compilation_cache():
    code = (
        "import jax; jax.config.update('jax_enable_x64', True)\n"
        "from tests.doubles import *; from paged_jax import SamplingParams\n"
        "llm = tiny_llm(40); prompts = [prompt(n, n) for n in (1, 5, 8, 13)]\n"
        "outputs = llm.generate(ids(prompts), SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)\n"
        "print(tokens_of(outputs) == [dense_tokens(p, 6) for p in prompts], llm.is_whole)\n"
    )
    result = run("-c", code)
    assert result.stdout.split() == ["True", "True"], result.stderr


@pytest.mark.smollm2
def test_command_line_json_gives_one_object_per_prompt():
    command = [
        "-m",
        "paged_jax",
        "generate",
        "--model",
        "smollm2",
        "--max-tokens",
        "6",
        "--json",
        "--max-model-len",
        "256",
    ]
    result = run(*command, "--prompt", "The capital of France is", "--prompt", "")
    assert result.returncode == 1  # the empty prompt failed, alone
    first, second = map(json.loads, result.stdout.splitlines())
    assert first["prompt"] == "The capital of France is"
    assert first["token_ids"] == [7042, 30, 198, 198, 504, 2988]
    assert first["prompt_token_ids"] == [504, 3575, 282, 4649, 314]
    assert (first["text"], first["finish_reason"]) == (" Paris.\n\nThe answer", "length")
    assert "empty" in second["error"]


def test_command_line_wrong_model_is_an_error_without_traceback():
    result = run("-m", "paged_jax", "generate", "--model", "/no/such/model", "--prompt", "x")
    assert result.returncode == 2
    assert "no such file" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("option", [["--max-tokens", "0"], ["--temperature", "-1"], ["--top-p", "nan"]])
def test_command_line_bad_parameter_is_an_error_before_anything_is_loaded(option):
    start = time.monotonic()
    result = run("-m", "paged_jax", "generate", "--model", "/no/such/model", "--prompt", "x", *option)
    assert result.returncode == 2
    assert option[0].strip("-").replace("-", "_") in result.stderr
    assert time.monotonic() - start < 60
