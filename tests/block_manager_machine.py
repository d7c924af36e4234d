"""The stateful property test of the block manager: every rule runs on the arrays and on the plain model.

Subclasses choose the implementation under test (`manager`) and the number of cache groups.
"""

import copy
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from block_manager_model import PlainBlockManager, Refused
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import paged_jax.block_pool
import paged_jax.block_table
from paged_jax import CacheConfig

BLOCK_SIZE, NUM_ROWS, WIDTH, MAX_NEW = 3, 5, 4, 7


def jitted(block_pool, block_table) -> SimpleNamespace:
    """The functions under test, compiled once per implementation."""
    return SimpleNamespace(
        Status=block_pool.Status,
        init=block_table.init,
        check_invariants=block_table.check_invariants,
        append=jax.jit(block_table.append_tokens, static_argnames="max_new_tokens"),
        fork=jax.jit(block_table.fork),
        reparent=jax.jit(block_table.reparent),
        truncate=jax.jit(block_table.truncate),
        release=jax.jit(block_table.release),
        slots_of=jax.jit(block_table.slots_of),
        needed=jax.jit(block_table.num_blocks_needed),
    )


REAL = jitted(paged_jax.block_pool, paged_jax.block_table)


def as_bytes(tree) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


class BlockManagerMachine(RuleBasedStateMachine):
    manager = REAL
    num_groups = 1
    num_blocks = 15

    @initialize()
    def start(self):
        config = CacheConfig(
            num_blocks=self.num_blocks,
            num_layers=self.num_groups,
            num_kv_heads=1,
            head_dim=1,
            block_size=BLOCK_SIZE,
            max_num_seqs=NUM_ROWS,
            max_blocks_per_seq=WIDTH,
            layer_groups=tuple((g,) for g in range(self.num_groups)),
        )
        self.pool, self.table = self.manager.init(config)
        self.plain = PlainBlockManager(self.num_blocks, BLOCK_SIZE, NUM_ROWS, WIDTH, self.num_groups)
        self.content = np.full(self.num_blocks * BLOCK_SIZE, -1)  # slot -> token
        self.next_token = 0

    # -- rules -------------------------------------------------------------------------------------------------------

    @rule(
        counts=st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 4, 7]), min_size=NUM_ROWS, max_size=NUM_ROWS),
        reserve=st.sampled_from([0, 0, 0, 1, 3]),
    )
    def append(self, counts, reserve):
        self._append(counts, reserve)

    @rule()
    def decode(self):
        self._append([int(bool(t)) for t in self.plain.tokens], 0)

    @rule(row=st.integers(0, NUM_ROWS - 1), count=st.sampled_from([-1, MAX_NEW + 1, 7]))
    def append_beyond_bounds(self, row, count):
        counts = [0] * NUM_ROWS
        counts[row] = count
        self._append(counts, 0)

    @rule(parents=st.permutations(range(NUM_ROWS)), children=st.sets(st.integers(0, NUM_ROWS - 1), max_size=2))
    def fork(self, parents, children):
        chosen = [p if row in children else row for row, p in enumerate(parents)]
        self._fork(chosen)

    @precondition(lambda self: any(self.plain.tokens) and not all(self.plain.tokens))
    @rule(data=st.data())
    def fork_into_empty(self, data):
        rows = range(NUM_ROWS)
        parent = data.draw(st.sampled_from([r for r in rows if self.plain.tokens[r]]))
        empty = [r for r in rows if not self.plain.tokens[r]]
        children = data.draw(st.sets(st.sampled_from(empty), min_size=1, max_size=2))
        self._fork([parent if row in children else row for row in rows])

    @rule(data=st.data(), any_row=st.booleans())
    def beam_step(self, data, any_row):
        """Mostly children of live rows, in any multiplicity; sometimes emptied rows and parents that cannot be."""
        live = [r for r in range(NUM_ROWS) if self.plain.tokens[r]]
        choices = st.sampled_from([*live, *live, NUM_ROWS] if live and not any_row else range(-1, NUM_ROWS + 2))
        self._reparent([data.draw(choices | st.just(row)) for row in range(NUM_ROWS)])

    @rule(cuts=st.lists(st.integers(-1, 5), min_size=NUM_ROWS, max_size=NUM_ROWS))
    def truncate(self, cuts):
        lens = [len(t) - c for t, c in zip(self.plain.tokens, cuts, strict=True)]
        self._truncate(lens)

    @rule(row=st.integers(0, NUM_ROWS - 1), cut=st.integers(0, 6))
    def truncate_one(self, row, cut):
        lens = [len(t) for t in self.plain.tokens]
        lens[row] = max(lens[row] - cut, 0)
        self._truncate(lens)

    @rule(rows=st.lists(st.booleans(), min_size=NUM_ROWS, max_size=NUM_ROWS), only_live=st.booleans())
    def release(self, rows, only_live):
        chosen = [r and (bool(t) or not only_live) for r, t in zip(rows, self.plain.tokens, strict=True)]
        self._run(
            lambda p: p.release(chosen), lambda: self.manager.release(self.pool, self.table, jnp.array(chosen, bool))
        )

    # -- one operation on both sides ---------------------------------------------------------------------------------

    def _fork(self, parents):
        self._run(
            lambda p: p.fork(parents), lambda: self.manager.fork(self.pool, self.table, jnp.array(parents, jnp.int32))
        )

    def _reparent(self, parents):
        self._run(
            lambda p: p.reparent(parents),
            lambda: self.manager.reparent(self.pool, self.table, jnp.array(parents, jnp.int32)),
        )

    def _truncate(self, lens):
        self._run(
            lambda p: p.truncate(lens), lambda: self.manager.truncate(self.pool, self.table, jnp.array(lens, jnp.int32))
        )

    def _append(self, counts, reserve):
        counted = jnp.array(counts, jnp.int32)
        needed = int(np.sum(self.manager.needed(self.pool, self.table, counted)))
        new = [[self.next_token + 100 * row + i for i in range(max(c, 0))] for row, c in enumerate(counts)]
        self.next_token += 1000

        def plain(p: PlainBlockManager) -> None:
            if min(counts) < 0:
                raise Refused("BAD_LENGTH")
            p.append(new, MAX_NEW, reserve)

        free_before = len(self.plain.free)
        self._run(
            plain,
            lambda: self.manager.append(
                self.pool, self.table, counted, max_new_tokens=MAX_NEW, reserve=jnp.int32(reserve)
            ),
            written=new,
        )
        if self.status == "OK":
            assert free_before - len(self.plain.free) == needed  # what num_blocks_needed predicts is what is taken

    def _run(self, plain_operation, array_operation, written=None):
        after, expected = copy.deepcopy(self.plain), "OK"
        try:
            plain_operation(after)
        except Refused as refusal:
            after, expected = self.plain, str(refusal)
        before = as_bytes((self.pool, self.table))
        self.pool, self.table, result = array_operation()
        status = result if written is None else result.status
        self.status = self.manager.Status(int(status)).name
        assert self.status == expected
        self.plain = after
        if expected != "OK":
            assert as_bytes((self.pool, self.table)) == before  # invariant 5
        if written is not None:
            self._write(result, written if expected == "OK" else [[] for _ in written])
        self._check()

    def _write(self, appended, new):
        """Does what append_tokens says must be done: first all copies at once, then the writes."""
        source, target = (np.asarray(x).ravel() for x in (appended.copy_src, appended.copy_dst))
        pairs = [(int(s), int(t)) for s, t in zip(source, target, strict=True) if t]
        expected = self.plain.copies if any(new) else []
        assert sorted(pairs) == sorted(expected)
        assert not {s for s, _ in pairs} & {t for _, t in pairs}  # no copy reads what another one writes
        blocks = self.content.reshape(-1, BLOCK_SIZE)
        blocks[[t for _, t in pairs]] = blocks[[s for s, _ in pairs]]
        slots = np.asarray(appended.slot_mapping)
        refs = np.asarray(self.pool.ref_count)
        seen = set()
        for row, tokens in enumerate(new):
            assert not slots[:, row, len(tokens) :].any()  # padding goes to the null block
            for group in range(self.num_groups):
                for token, slot in zip(tokens, slots[group, row], strict=False):
                    assert refs[slot // BLOCK_SIZE] == 1  # invariant 6: written blocks have one owner
                    assert slot not in seen
                    seen.add(slot)
                    self.content[slot] = token

    def _check(self):
        self.manager.check_invariants(self.pool, self.table)
        pool, plain = self.pool, self.plain
        queue = np.asarray(pool.free_queue)[(int(pool.head) + np.arange(int(pool.count))) % self.num_blocks]
        assert queue.tolist() == plain.free  # order included: invariant 7
        assert np.asarray(pool.ref_count).tolist() == [plain.refs[b] for b in range(self.num_blocks)]
        ids, lens = np.asarray(self.table.block_ids), np.asarray(self.table.seq_lens)
        for row, tokens in enumerate(plain.tokens):
            assert lens[row] == len(tokens)
            for group in range(self.num_groups):
                mine = plain.blocks[group][row]
                assert ids[group, row].tolist() == mine + [0] * (WIDTH - len(mine))
                position = np.arange(len(tokens))
                slots = ids[group, row][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                assert self.content[slots].tolist() == tokens  # every row reads back what it stored


class TwoGroupsMachine(BlockManagerMachine):
    num_groups = 2
    num_blocks = 25
