"""The Mosaic GPU kernels in Mosaic's interpreter: numbers, races, and controls that must fail.

Each case runs in a process of its own under a timeout: a wrong barrier hangs, and a race leaves the interpreter
unusable. NPROC gives XLA's CPU pool more threads than a kernel has warpgroups; with fewer it hangs at random.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import kernel_cases
import kernel_faults
import numpy as np
import pytest

from paged_jax.dispatch import MIN_JAX_FOR_MOSAIC
from pallas_kernels.reference import paged_attention_reference
from pallas_kernels.work_list import FIRST_ITEM, HIGH, LOW, NUM_CHUNKS, ROW, ROW_CHUNKS, decode_work, prefill_work
from pallas_kernels.xla import paged_attention_xla

ROOT = Path(__file__).parents[1]
needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < MIN_JAX_FOR_MOSAIC,
    reason=f"the Mosaic GPU kernels need JAX >= {MIN_JAX_FOR_MOSAIC}, this is {jax.__version__}",
)


def run_interpreted(*command: str, root: Path = ROOT, timeout: float = 400) -> subprocess.CompletedProcess:
    """python -m command, with the kernels of the project at root."""
    path = os.pathsep.join(str(p) for p in (root, ROOT, ROOT / "tests"))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "NPROC": "16", "PYTHONPATH": path}
    command = (sys.executable, "-m", *command)
    return subprocess.run(
        command, cwd=root, env=environment, timeout=timeout, capture_output=True, text=True, check=False
    )


@needs_mosaic
@pytest.mark.parametrize("name", kernel_cases.CASES)
def test_mosaic_kernel_in_the_interpreter_equals_the_oracle_without_races(name):
    result = run_interpreted("kernel_cases", name)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize("name", kernel_cases.CASES)
def test_xla_passes_the_kernel_suite(name):
    kernel_cases.check(kernel_cases.CASES[name], paged_attention_xla)


def test_reference_passes_the_kernel_suite_in_the_dtype_of_the_queries():
    kernel_cases.check(kernel_cases.CASES["mixed_g4_h128_edges"], paged_attention_reference)


@needs_mosaic
@pytest.mark.parametrize("name", kernel_faults.FAULTS)
def test_fault_of_other_kernels_in_the_interpreter(name):
    result = run_interpreted("kernel_faults", name)
    assert result.returncode == 0, result.stderr[-3000:]


@needs_mosaic
def test_mosaic_moves_kv_and_decodes_a_model_in_the_interpreter():
    result = run_interpreted("interpreted_model")
    assert result.returncode == 0, result.stderr[-3000:]


# (what is broken, file, source, what replaces it, the module and case that must notice)
CONTROLS = [
    (
        "decode does not wait for K and V",
        "paged_decode.py",
        "        plgpu.barrier_wait(refs.barriers[which].at[lax.rem(step, p.config.num_stages)])",
        "        pass",
        ("kernel_cases", "decode_g3_h64"),
    ),
    (
        "decode fills a place that is still read",
        "paged_decode.py",
        "    later = step + p.config.num_stages - 1\n",
        "    later = step + p.config.num_stages\n",
        ("kernel_cases", "decode_one_chunk_three_stages"),
    ),
    (
        "decode without a tail mask",
        "paged_decode.py",
        "    live = position < item.seq_len\n",
        "    live = position < item.seq_len + 1\n",
        ("kernel_cases", "decode_g3_h64"),
    ),
    (
        "decode leaves dead V as it is",
        "paged_decode.py",
        "    pl.when(is_edge)(lambda",
        "    pl.when(is_edge & False)(lambda",
        ("kernel_cases", "decode_g3_h64"),
    ),
    (
        "partial results combined without their weights",
        "combine.py",
        "weight = jnp.exp2(lse(chunk) - highest)",
        "weight = jnp.float32(1)",
        ("kernel_cases", "decode_g3_h64"),
    ),
    (
        "prefill does not wait until the ring is free",
        "paged_prefill.py",
        "    pl.when(step >= p.config.num_stages)(",
        "    pl.when(step < 0)(",
        ("kernel_cases", "mixed_g3_h64"),
    ),
    (
        "prefill stores before the output is committed",
        "paged_prefill.py",
        "            plgpu.commit_smem()\n            _store_tile(",
        "            _store_tile(",
        ("kernel_cases", "mixed_g3_h64"),
    ),
    (
        "prefill sees one token of the future",
        "paged_prefill.py",
        "    live = column <= rows_to(shape, last)\n",
        "    live = column <= rows_to(shape, last + 1)\n",
        ("kernel_cases", "mixed_g3_h64"),
    ),
    (
        "prefill leaves dead V as it is",
        "paged_prefill.py",
        "    return jnp.where(live, values, jnp.zeros_like(values))",
        "    return values",
        ("kernel_cases", "mixed_g3_h64"),
    ),
    (
        "prefill stores a line of its neighbour",
        "paged_prefill.py",
        "jnp.minimum(end, piece + p.query_piece)",
        "jnp.minimum(end + 1, piece + p.query_piece)",
        ("kernel_cases", "mixed_g3_h64"),
    ),
    (
        "block ids from dead entries of the table",
        "mosaic.py",
        "tables[row, jnp.minimum(column, last_column)]",
        "tables[row, column]",
        ("kernel_faults", "block_ids_past_the_last_block_repeat_it"),
    ),
]


@needs_mosaic
@pytest.mark.parametrize(("file", "line", "bug", "case"), [c[1:] for c in CONTROLS], ids=[c[0] for c in CONTROLS])
def test_control_broken_kernel_fails_the_suite(file, line, bug, case, tmp_path):
    package = tmp_path / "pallas_kernels"
    shutil.copytree(ROOT / "pallas_kernels", package, ignore=shutil.ignore_patterns("__pycache__"))
    source = (package / file).read_text()
    assert source.count(line) == 1, f"the line to break occurs {source.count(line)} times"
    (package / file).write_text(source.replace(line, bug))
    try:
        result = run_interpreted(*case, root=tmp_path, timeout=120)
    except subprocess.TimeoutExpired:
        return  # a hang is noticed too
    assert result.returncode != 0, "the broken kernel passed"
    assert any(word in result.stderr for word in ("AssertionError", "RACE", "Barrier", "barrier")), result.stderr[
        -2000:
    ]


def test_decode_work_covers_every_tile_once_in_even_chunks():
    low, high = jnp.array([0, 0, 3, 0, 5]), jnp.array([9, 0, 7, 100, 5])
    is_in = jnp.array([True, True, True, True, False])
    work = decode_work(low, high, jnp.arange(5, dtype=jnp.int32), is_in, target=10)
    items, rows = np.asarray(work.items), np.asarray(work.rows)
    seen = [(int(r), t) for r, lo, hi in items[items[:, NUM_CHUNKS] > 0][:, [ROW, LOW, HIGH]] for t in range(lo, hi)]
    assert sorted(seen) == [(0, t) for t in range(9)] + [(2, t) for t in range(3, 7)] + [(3, t) for t in range(100)]
    np.testing.assert_array_equal(rows[:, ROW_CHUNKS], [1, 1, 1, 9, 0])  # an empty row has one empty chunk
    assert rows[3, FIRST_ITEM] == 3
    sizes = (items[:, HIGH] - items[:, LOW])[3:12]
    assert sizes.sum() == 100
    assert sizes.max() == 12
    assert len(items) == 10 + 5  # whatever the width of the table


@pytest.mark.parametrize("tile", [8, 32, 128])
def test_prefill_work_covers_every_query_of_longer_rows_and_the_padding_once(tile):
    rng = np.random.default_rng(tile)
    for _ in range(20):
        counts = rng.choice([0, 1, 2, 7, 8, 40], size=6)
        start = np.concatenate([[0], np.cumsum(counts)])
        lens = counts + rng.integers(0, 50, 6)
        num_tokens = int(start[-1] + rng.integers(0, 20))
        if num_tokens == 0:
            continue
        work = np.asarray(prefill_work(jnp.asarray(start), jnp.asarray(lens), num_tokens=num_tokens, tile=tile))
        seen = {}
        for row, token, first, end, position in work:
            assert token % 8 == 0
            assert first >= token
            assert end <= token + tile
            for t in range(first, end):
                assert t not in seen
                seen[t] = (row, position + t - token)
        for row, count in enumerate(counts):
            for i in range(count if count > 1 else 0):
                assert seen.pop(start[row] + i) == (row, lens[row] - count + i)
        assert sorted(seen) == list(range(start[-1], num_tokens))
        assert all(position < 0 for _, position in seen.values())
