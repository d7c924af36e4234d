"""The block manager equals the plain-Python model after every operation, and the test is sharp enough to tell."""

import os
import sys
import types
from pathlib import Path

import jax
import pytest
from block_manager_machine import (
    BlockManagerMachine,
    CachingMachine,
    OnlyWindowsCachingMachine,
    TinyWindowsCachingMachine,
    TwoGroupsMachine,
    WindowsCachingMachine,
    WindowsMachine,
    jitted,
)
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

SOAK_EXAMPLES = int(os.environ.get("SOAK_EXAMPLES", "2000"))
SETTINGS = settings(max_examples=30, stateful_step_count=40)
#: For planted bugs: no shrinking, the first failure is enough.
HUNT = settings(max_examples=1000, stateful_step_count=40, phases=[Phase.generate])

#: A digest of 2 bits: everything collides.
WEAK_DIGEST = ("digest", "[place] * (before + sums)", "[place] * (before + sums) & jnp.array([[3, 0]], jnp.uint32)")


def _module(name: str, source: str) -> types.ModuleType:
    module = types.ModuleType(name)
    sys.modules[name] = module  # dataclasses look their module up
    exec(compile(source, name, "exec"), module.__dict__)
    return module


def planted(*changes: tuple[str, str, str]):
    """The block manager with changed lines, as modules of their own; the real modules stay as they are."""
    names = {
        "pool": "paged_jax.block_pool",
        "table": "paged_jax.block_table",
        "digest": "paged_jax.digest",
        "cache": "paged_jax.prefix_cache",
    }
    sources = {k: Path(sys.modules[n].__file__).read_text() for k, n in names.items()}
    for file, line, bug in changes:
        assert sources[file].count(line) == 1, f"the line to change occurs {sources[file].count(line)} times"
        sources[file] = sources[file].replace(line, bug)
    real = {n: sys.modules[n] for n in names.values()}
    try:
        modules = {k: _module(n, sources[k]) for k, n in names.items()}
        return [modules[k] for k in ("pool", "table", "cache")]
    finally:
        sys.modules.update(real)


class CollidingMachine(CachingMachine):
    is_exact = False
    manager = jitted(*planted(WEAK_DIGEST))


class PassesMachine(CachingMachine):
    """What a step fills is published in passes of two blocks: to the model, which goes block by block, all the same."""

    manager = jitted(*planted(("cache", "_CPU_ITEMS_PER_PASS = 32", "_CPU_ITEMS_PER_PASS = 2")))


class CollidingWindowsMachine(WindowsCachingMachine):
    is_exact = False
    manager = CollidingMachine.manager


class CollidingOnlyWindowsMachine(OnlyWindowsCachingMachine):
    is_exact = False
    manager = CollidingMachine.manager


MACHINES = [
    BlockManagerMachine,
    WindowsMachine,
    PassesMachine,
    CollidingMachine,
    WindowsCachingMachine,
    OnlyWindowsCachingMachine,
    TinyWindowsCachingMachine,
    CollidingWindowsMachine,
]
#: What these add is little.
MORE_MACHINES = [TwoGroupsMachine, CachingMachine, CollidingOnlyWindowsMachine]


@pytest.mark.parametrize("machine", MACHINES)
def test_block_manager_random_operations_equal_plain_model(machine):
    run_state_machine_as_test(machine, settings=SETTINGS)


@pytest.mark.soak
@pytest.mark.parametrize("machine", [*MACHINES, *MORE_MACHINES])
def test_block_manager_long_random_operations_equal_plain_model(machine):
    run_state_machine_as_test(machine, settings=settings(max_examples=SOAK_EXAMPLES, stateful_step_count=80))


#: (name, file, the line as it is, the line with the bug). Each bug changes one line.
PLANTED_BUGS = [
    (
        "free block handed out twice",
        "pool",
        "head=(pool.head + taken_each) % pool.num_blocks",
        "head=pool.head",
    ),
    (
        "count not reduced",
        "pool",
        "count=pool.count - taken_each",
        "count=pool.count",
    ),
    (
        "reserve ignored",
        "pool",
        "pool.num_free - jnp.maximum(reserve, 0)",
        "pool.num_free - 0 * reserve",
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
        "counts = jnp.minimum(num_blocks, pool.num_free)",
    ),
    (
        "ring does not wrap",
        "pool",
        "rank - queue * pool.count[UNCACHED]) % pool.num_blocks",
        "rank - queue * pool.count[UNCACHED]) % (pool.num_blocks - 1)",
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
        "position = (pool.head[queue] + pool.count[queue] + rank)",
        "position = (pool.head[queue] + pool.count[queue] - 1 + rank)",
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
        "ref_count=pool.ref_count.at[last].add(-copies),",
        "ref_count=pool.ref_count,",
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


#: Bugs of the prefix cache that the model sees at once, for it says which blocks must be hit.
PLANTED_CACHE_BUGS = [
    (
        "reused block keeps its identity",
        "pool",
        "content_uid=forget(pool.content_uid, ids)",
        "content_uid=pool.content_uid",
    ),
    ("cached blocks are reused first", "pool", "UNCACHED, CACHED = 0, 1", "UNCACHED, CACHED = 1, 0"),
    ("hit stays in the queue", "pool", "jnp.any(leaves), _leave", "jnp.any(leaves) & False, _leave"),
    (
        "hit takes its neighbour along",
        "pool",
        "pool.count[CACHED]) & ~gone[queue]",
        "pool.count[CACHED] - 1) & ~gone[queue]",
    ),
    (
        "hit gets no reference",
        "pool",
        "pool.ref_count.at[ids].add((listed & ok)",
        "pool.ref_count.at[ids].add((listed & is_free & ok)",
    ),
    (
        "released cached block is uncached",
        "pool",
        "queue = (pool.content_uid[ids] > 0).astype",
        "queue = (pool.content_uid[ids] < 0).astype",
    ),
    ("reset keeps identities", "pool", "content_uid=jnp.zeros_like(pool.content_uid)", "content_uid=pool.content_uid"),
    (
        "block rewritten in place stays cached",
        "table",
        "content_uid=forget(pool.content_uid, in_place)",
        "content_uid=pool.content_uid",
    ),
    ("copied-from block loses its identity", "table", "jnp.where((copies == 0) & ok, last,", "jnp.where(ok, last,"),
    ("whole prompt is hit", "cache", "< (num_tokens - 1) // block_size", "< num_tokens // block_size"),
]

#: Bugs that a good digest hides. They are hunted with the weak one.
PLANTED_COLLISION_BUGS = [
    ("tokens not compared", "cache", "return (uid > 0) & has_tokens & (", "return (uid > 0) & ("),
    ("parent not compared", "cache", "(cache.records[found, PARENT] == parent)", "(cache.records[found, PARENT] != 0)"),
    ("equal digests of a call share a uid", "cache", "is_same = (same == item) | (", "is_same = (same <= item) | ("),
    (
        "entry of a dead block is live",
        "cache",
        "jnp.where(is_live, pool.content_uid[block], 0)",
        "jnp.where(block > 0, cache.records[block, 2] + 9, 0)",
    ),
    ("two items take one entry", "cache", "axis=1) == rank[:, None])", "axis=1) == 0)"),
    ("namespace ignored", "cache", "return -1 - namespace", "return -1 - 0 * namespace"),
    (
        "publishes behind an unknown block",
        "cache",
        "items.is_item & (origin != 0) & is_same",
        "items.is_item & is_same",
    ),
    (
        "uid used twice",
        "cache",
        "next_uid=cache.next_uid + jnp.sum(is_new, dtype=jnp.int32)",
        "next_uid=cache.next_uid + 1",
    ),
    ("copy forgets the tokens", "cache", "cache.token_ids.at[dst].set(cache.token_ids[src])", "cache.token_ids"),
    ("reset while blocks are in use", "cache", "pool.num_free == pool.num_blocks - 1", "pool.num_free >= 0"),
]


#: Bugs of groups with windows.
PLANTED_WINDOW_BUGS = [
    ("block leaves one token too early", "table", "lens - (w - 1), 0)", "lens - (w - 2), 0)"),
    ("block leaves one token too late", "table", "lens - (w - 1), 0)", "lens - w, 0)"),
    (
        "block that leaves keeps its reference",
        "table",
        "ref_count=pool.ref_count.at[ids].add(-dropped.astype(jnp.int32)))\n        return",
        "ref_count=pool.ref_count)\n        return",
    ),
    (
        "block that leaves stays in the table",
        "table",
        "jnp.where(dropped, column, width)].set(NULL_BLOCK",
        "jnp.where(dropped, width, width)].set(NULL_BLOCK",
    ),
    (
        "only one block leaves in a step",
        "table",
        "width, num_columns = block_ids.shape[-1], cdiv(max_new_tokens, table.block_size)",
        "width, num_columns = block_ids.shape[-1], 1",
    ),
    ("blocks leave head first", "table", "column = end[..., None] - 1 - jnp", "column = first[..., None] + jnp"),
    (
        "blocks leave group by group",
        "table",
        "(x.swapaxes(0, 1).reshape(-1) for x in (jnp.where(dropped",
        "(x.reshape(-1) for x in (jnp.where(dropped",
    ),
    ("rows are cut into what is gone", "table", "jnp.all(has_first | (", "jnp.all((first >= 0) | ("),
]
PLANTED_WINDOW_CACHE_BUGS = [
    (
        "prefix ends where a window lacks blocks",
        "cache",
        "length = jnp.max(jnp.where(is_hit & ends_well,",
        "length = jnp.max(jnp.where(is_hit,",
    ),
    (
        "whole prefix needed in a window",
        "cache",
        "missing <= first_needed_blocks(",
        "missing <= 0 * first_needed_blocks(",
    ),
    ("window gets blocks that it does not need", "cache", "& (number[None] > needed[:, None])", "& (number[None] > 0)"),
    ("chains followed in the smallest window", "cache", "return max(range(len(self", "return min(range(len(self"),
    ("blocks of another group are found", "cache", "== slot) & (cache.records[block, GROUP] ==", "== slot) & (0 <="),
    (
        "other groups' entries overwritten",
        "cache",
        "(pool.content_uid[block] == 0)\n",
        "(pool.content_uid[block] >= 0)\n",
    ),
]


#: A bug that only shows where a block may leave its window before the next one is full.
PLANTED_TINY_WINDOW_BUGS = [
    ("unknown block taken for the root", "cache", "is_root=column == 0,", "is_root=parent_block == NULL_BLOCK,")
]

#: The machine that must catch each of them.
CAUGHT_BY = [
    (BlockManagerMachine, PLANTED_BUGS),
    (CachingMachine, PLANTED_CACHE_BUGS),
    (CollidingMachine, PLANTED_COLLISION_BUGS),
    (WindowsMachine, PLANTED_WINDOW_BUGS),
    (WindowsCachingMachine, PLANTED_WINDOW_CACHE_BUGS),
    (TinyWindowsCachingMachine, PLANTED_TINY_WINDOW_BUGS),
]


ALL_BUGS = [pytest.param(machine, bug[1:], id=bug[0]) for machine, bugs in CAUGHT_BY for bug in bugs]


@pytest.mark.parametrize(("machine", "change"), ALL_BUGS[::2])
def test_state_machine_planted_bug_is_caught(machine, change):
    assert_caught(machine, change)


@pytest.mark.soak
@pytest.mark.parametrize(("machine", "change"), ALL_BUGS[1::2][: SOAK_EXAMPLES // 50])
def test_state_machine_planted_bug_of_the_other_half_is_caught(machine, change):
    assert_caught(machine, change)


def assert_caught(machine, change):
    weakened = [] if machine.is_exact else [WEAK_DIGEST]

    class Mutant(machine):
        manager = jitted(*planted(*weakened, change))

    with pytest.raises(Exception) as caught:
        run_state_machine_as_test(Mutant, settings=HUNT)
    jax.clear_caches()  # of the mutant: see conftest.py
    assert not isinstance(caught.value, SyntaxError | NameError | TypeError | AttributeError)
