"""Broken kernels must fail the kernel suite: one planted fault at a time."""

import shutil
import subprocess

import pytest
from test_kernels import ROOT, needs_mosaic, run_interpreted

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
