"""The block manager equals the plain-Python model after every operation, and the test is sharp enough to tell."""

import os
import sys
import types
from pathlib import Path

import pytest
from block_manager_machine import BlockManagerMachine, TwoGroupsMachine, jitted
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

SOAK_EXAMPLES = int(os.environ.get("SOAK_EXAMPLES", "2000"))
SETTINGS = settings(max_examples=60, stateful_step_count=40)
#: For planted bugs: no shrinking, the first failure is enough.
HUNT = settings(max_examples=150, stateful_step_count=60, phases=[Phase.generate])


@pytest.mark.parametrize("machine", [BlockManagerMachine, TwoGroupsMachine])
def test_block_manager_random_operations_equal_plain_model(machine):
    run_state_machine_as_test(machine, settings=SETTINGS)


@pytest.mark.soak
@pytest.mark.parametrize("machine", [BlockManagerMachine, TwoGroupsMachine])
def test_block_manager_long_random_operations_equal_plain_model(machine):
    run_state_machine_as_test(machine, settings=settings(max_examples=SOAK_EXAMPLES, stateful_step_count=80))


#: (name, file, the line as it is, the line with the bug). Each bug changes one line.
PLANTED_BUGS = [
    (
        "free block handed out twice",
        "pool",
        "head=(pool.head + taken) % pool.num_blocks",
        "head=pool.head",
    ),
    (
        "count not reduced",
        "pool",
        "count=pool.count - taken",
        "count=pool.count",
    ),
    (
        "reserve ignored",
        "pool",
        "pool.count - jnp.maximum(reserve, 0)",
        "pool.count - 0 * reserve",
    ),
    (
        "last free block never given",
        "pool",
        "jnp.sum(num_blocks, dtype=jnp.int32) <= jnp.maximum(",
        "jnp.sum(num_blocks, dtype=jnp.int32) < jnp.maximum(",
    ),
    (
        "no reference for a new block",
        "pool",
        "ref_count=pool.ref_count.at[ids].add(wanted.astype(jnp.int32))",
        "ref_count=pool.ref_count",
    ),
    (
        "refused call takes blocks",
        "pool",
        "counts = num_blocks * (status == Status.OK)",
        "counts = jnp.minimum(num_blocks, pool.count)",
    ),
    (
        "ring does not wrap",
        "pool",
        "exclusive_cumsum(counts)[:, None] + column) % pool.num_blocks",
        "exclusive_cumsum(counts)[:, None] + column) % (pool.num_blocks - 1)",
    ),
    (
        "first occurrence decides the order",
        "pool",
        "order = jnp.arange(1, ids.shape[0] + 1, dtype=jnp.int32)",
        "order = jnp.arange(ids.shape[0], 0, -1, dtype=jnp.int32)",
    ),
    (
        "shared block freed by its first owner",
        "pool",
        "gone = dropped & (counts == 0)",
        "gone = dropped",
    ),
    (
        "block joins once per former owner",
        "pool",
        "joins = gone & (last == order)",
        "joins = gone",
    ),
    (
        "scratch left in the counts",
        "pool",
        'ref_count=scratch.at[target].set(0, mode="drop")',
        "ref_count=scratch",
    ),
    (
        "freed blocks jump the queue",
        "pool",
        "position = (pool.head + pool.count + exclusive",
        "position = (pool.head + pool.count - 1 + exclusive",
    ),
    (
        "blocks counted with floor",
        "table",
        "return (cdiv(table.seq_lens + num_new_tokens, table.block_size)",
        "return ((table.seq_lens + num_new_tokens) // table.block_size",
    ),
    (
        "no copy-on-write",
        "table",
        "held - earlier > 1",
        "held - earlier > 99",
    ),
    (
        "last holder copies too",
        "table",
        "held - earlier > 1",
        "held > 1",
    ),
    (
        "full shared block copied",
        "table",
        "writes = (num_new_tokens > 0) & (table.seq_lens % table.block_size != 0)",
        "writes = num_new_tokens > 0",
    ),
    (
        "copied-from block keeps the reference",
        "table",
        "ref_count=pool.ref_count.at[last].add(-copies)",
        "ref_count=pool.ref_count",
    ),
    (
        "copy lands behind the shared block",
        "table",
        "table.num_blocks[None] - copies, need * ok",
        "table.num_blocks[None], need * ok",
    ),
    (
        "full table overflows",
        "table",
        "fits = jnp.all(cdiv(new_lens, table.block_size) <= width)",
        "fits = jnp.array(True)",
    ),
    (
        "refused append advances the length",
        "table",
        "seq_lens=jnp.where(ok, new_lens, table.seq_lens)",
        "seq_lens=new_lens",
    ),
    (
        "one position too far",
        "table",
        "(table.seq_lens - num_new_tokens)[:, None] + offset, 0)",
        "(table.seq_lens - num_new_tokens)[:, None] + offset + 1, 0)",
    ),
    (
        "padding slot is not null",
        "table",
        "return jnp.where(real[None], slots_of(table, row, position), 0)",
        "return slots_of(table, row, position)",
    ),
    (
        "children add no references",
        "table",
        "ref_count=pool.ref_count.at[table.block_ids].add(added)",
        "ref_count=pool.ref_count",
    ),
    (
        "fork overwrites a live row",
        "table",
        "in_use = jnp.any((parents != row) & (table.seq_lens > 0))",
        "in_use = jnp.array(False)",
    ),
    (
        "child forgets the length",
        "table",
        'seq_lens=table.seq_lens.at[parents].get(mode="fill", fill_value=0)',
        "seq_lens=table.seq_lens",
    ),
    (
        "parent that moved keeps one reference too many",
        "table",
        "jnp.maximum(children - 1, 0)[None, :, None]",
        "jnp.where(children > 1, children, 0)[None, :, None]",
    ),
    (
        "row without children keeps its blocks",
        "table",
        "jnp.where(children > 0, table.seq_lens, 0)",
        "table.seq_lens",
    ),
    (
        "row that moved counts as one without children",
        "table",
        "jnp.where(children > 0, table.seq_lens, 0)",
        "jnp.where((children > 0) & (parents == row), table.seq_lens, 0)",
    ),
    (
        "empty parent accepted",
        "table",
        "(parents >= 0) & (parents <= num_rows) & (parent_lens > 0)",
        "(parents >= 0) & (parents <= num_rows)",
    ),
    (
        "head first on release",
        "table",
        "flat = [jnp.flip(x, -1).swapaxes(0, 1)",
        "flat = [x.swapaxes(0, 1)",
    ),
    (
        "released entries stay in the table",
        "table",
        'jnp.where(dropped, NULL_BLOCK, ids), mode="drop")',
        'ids, mode="drop")',
    ),
    (
        "truncate keeps one block too many",
        "table",
        "keep = cdiv(new_lens, table.block_size)",
        "keep = cdiv(new_lens + 1, table.block_size)",
    ),
    (
        "double free accepted",
        "table",
        "ok = ~jnp.any(rows & (table.seq_lens == 0))",
        "ok = jnp.array(True)",
    ),
    (
        "last pass of a release skipped",
        "table",
        "cdiv(jnp.sum(cut, dtype=jnp.int32), size)",
        "jnp.sum(cut, dtype=jnp.int32) // size",
    ),
]


def _module(name: str, source: str) -> types.ModuleType:
    module = types.ModuleType(name)
    sys.modules[name] = module  # dataclasses look their module up
    exec(compile(source, name, "exec"), module.__dict__)
    return module


def planted(file: str, line: str, bug: str):
    """The block manager with one line changed, as modules of their own; the real modules stay as they are."""
    names = {"pool": "paged_jax.block_pool", "table": "paged_jax.block_table"}
    sources = {k: Path(sys.modules[n].__file__).read_text() for k, n in names.items()}
    assert sources[file].count(line) == 1, f"the line to change occurs {sources[file].count(line)} times"
    sources[file] = sources[file].replace(line, bug)
    real = {n: sys.modules[n] for n in names.values()}
    try:
        return [_module(names[k], sources[k]) for k in ("pool", "table")]
    finally:
        sys.modules.update(real)


@pytest.mark.parametrize(("file", "line", "bug"), [b[1:] for b in PLANTED_BUGS], ids=[b[0] for b in PLANTED_BUGS])
def test_state_machine_planted_bug_is_caught(file, line, bug):
    class Mutant(TwoGroupsMachine if "group" in bug else BlockManagerMachine):
        manager = jitted(*planted(file, line, bug))

    with pytest.raises(Exception) as caught:
        run_state_machine_as_test(Mutant, settings=HUNT)
    assert not isinstance(caught.value, SyntaxError | NameError | TypeError)
