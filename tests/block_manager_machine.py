"""The stateful property test of the block manager: every rule runs on the arrays and on the plain model.

Subclasses choose the implementation under test (`manager`), the windows of the cache groups, and whether there is a
prefix cache.
"""

from types import SimpleNamespace

import jax
import numpy as np
from block_manager_model import PlainBlockManager, Refused
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

import paged_jax.block_pool
import paged_jax.block_table
import paged_jax.prefix_cache
from paged_jax import CacheConfig
from paged_jax.invariants import check_invariants

BLOCK_SIZE, NUM_ROWS, WIDTH, MAX_NEW = 3, 5, 4, 7
CAPACITY = WIDTH * BLOCK_SIZE


def jitted(block_pool, block_table, prefix_cache) -> SimpleNamespace:
    """The functions under test, compiled once per implementation."""

    def admit(cache, pool, table, row, tokens, num_tokens, namespace):
        hits = prefix_cache.match_prefix(cache, pool, tokens, num_tokens, namespace)
        return *block_table.acquire(pool, table, row, hits), hits

    def store(cache, pool, table, appended, tokens, old_lens, namespaces, publishes):
        """What a step does after it appended: copies, writes, and publication before anything else happens."""
        cache = prefix_cache.copy_tokens(cache, appended.copy_src.reshape(-1), appended.copy_dst.reshape(-1))
        slots = appended.slot_mapping[cache.chain_group]
        cache = prefix_cache.write_tokens(cache, tokens.reshape(-1), slots.reshape(-1))
        published = prefix_cache.publish(cache, pool, table, old_lens, namespaces, max_new_tokens=tokens.size)
        return jax.lax.cond(publishes, lambda: published, lambda: (cache, pool))

    return SimpleNamespace(
        Status=block_pool.Status,
        init=block_table.init,
        init_cache=prefix_cache.init_prefix_cache,
        append=jax.jit(block_table.append_tokens, static_argnames="max_new_tokens"),
        fork=jax.jit(block_table.fork),
        reparent=jax.jit(block_table.reparent),
        truncate=jax.jit(block_table.truncate),
        leave=jax.jit(block_table.release_out_of_window, static_argnames="max_new_tokens"),
        release=jax.jit(block_table.release),
        needed=jax.jit(block_table.num_blocks_needed),
        admit=jax.jit(admit),
        store=jax.jit(store),
        reset=jax.jit(prefix_cache.reset),
    )


REAL = jitted(paged_jax.block_pool, paged_jax.block_table, paged_jax.prefix_cache)


def as_bytes(tree) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


class BlockManagerMachine(RuleBasedStateMachine):
    manager = REAL
    windows = (None,)
    num_blocks = 15
    has_cache = False
    #: Whether the digest tells all contents apart, so that the model can say what is found.
    is_exact = True

    @initialize()
    def start(self):
        config = CacheConfig(
            num_blocks=self.num_blocks,
            num_layers=len(self.windows),
            num_kv_heads=1,
            head_dim=1,
            block_size=BLOCK_SIZE,
            max_num_seqs=NUM_ROWS,
            max_blocks_per_seq=WIDTH,
            layer_groups=tuple((g,) for g in range(len(self.windows))),
            sliding_windows=self.windows,
        )
        self.pool, self.table = self.manager.init(config)
        self.cache = self.manager.init_cache(config) if self.has_cache else None
        self.plain = PlainBlockManager(self.num_blocks, BLOCK_SIZE, NUM_ROWS, WIDTH, self.windows)
        # What K and V of a slot would depend on: the namespace and all tokens up to this one.
        self.content = np.full(self.num_blocks * BLOCK_SIZE, None, object)
        self.next_token = 0

    # -- rules -------------------------------------------------------------------------------------------------------

    @rule(
        counts=st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 4, 7]), min_size=NUM_ROWS, max_size=NUM_ROWS),
        reserve=st.sampled_from([0, 0, 0, 1, 3]),
    )
    def append(self, counts, reserve):
        self._append(counts, reserve)

    @rule(
        counts=st.lists(st.sampled_from([0, 1, 2, 4, 7]), min_size=NUM_ROWS, max_size=NUM_ROWS),
        kept=st.integers(0, 3),
    )
    def append_and_cut(self, counts, kept):
        """Speculation: what was appended is cut again, before anything leaves a window."""
        old_lens = [len(t) for t in self.plain.tokens]
        appended = self._grow(counts, 0)
        if self.status == "OK":
            self._store(appended, old_lens, True)
            self._truncate([n + min(c, kept) for n, c in zip(old_lens, counts, strict=True)])
            assert self.status == "OK"
        self._leave(old_lens)

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
        self._release(chosen)

    # -- one operation on both sides ---------------------------------------------------------------------------------

    def _fork(self, parents):
        self._run(
            lambda p: p.fork(parents), lambda: self.manager.fork(self.pool, self.table, np.array(parents, np.int32))
        )

    def _reparent(self, parents):
        self._run(
            lambda p: p.reparent(parents),
            lambda: self.manager.reparent(self.pool, self.table, np.array(parents, np.int32)),
        )

    def _truncate(self, lens):
        self._run(
            lambda p: p.truncate(lens), lambda: self.manager.truncate(self.pool, self.table, np.array(lens, np.int32))
        )

    def _release(self, chosen):
        self._run(
            lambda p: p.release(chosen), lambda: self.manager.release(self.pool, self.table, np.array(chosen, bool))
        )

    def _append(self, counts, reserve, new=None, publishes=True):
        """A step: room, copies and writes, publication, and last what has left a window goes."""
        old_lens = [len(t) for t in self.plain.tokens]
        appended = self._grow(counts, reserve, new)
        if self.status == "OK":
            self._store(appended, old_lens, publishes)
        self._leave(old_lens)

    def _store(self, appended, old_lens, publishes):
        """For the prefix cache."""

    def _leave(self, old_lens):
        """The end of a step: blocks that left a window go. Lengths may have been cut since the step began."""
        old = np.minimum(old_lens, [len(t) for t in self.plain.tokens]).astype(np.int32)
        self.pool, self.table = self.manager.leave(self.pool, self.table, old, max_new_tokens=MAX_NEW)
        self.plain.leave()
        self._check()

    def _grow(self, counts, reserve, new=None):
        counted = np.array(counts, np.int32)
        needed = int(np.sum(self.manager.needed(self.pool, self.table, counted)))
        new = new or [[self.next_token + 100 * row + i for i in range(max(c, 0))] for row, c in enumerate(counts)]
        self.next_token += 1000

        def plain(p: PlainBlockManager) -> None:
            if min(counts) < 0:
                raise Refused("BAD_LENGTH")
            p.append(new, MAX_NEW, reserve)

        free_before = self.plain.num_free
        appended = self._run(
            plain,
            lambda: self.manager.append(
                self.pool, self.table, counted, max_new_tokens=MAX_NEW, reserve=np.int32(reserve)
            ),
            written=new,
        )
        if self.status == "OK":
            assert free_before - self.plain.num_free == needed  # what num_blocks_needed predicts is what is taken
        return appended

    def _run(self, plain_operation, array_operation, written=None):
        after, expected = self.plain.copy(), "OK"
        try:
            plain_operation(after)
        except Refused as refusal:
            after, expected = self.plain, str(refusal)
        before = self.pool, self.table
        self.pool, self.table, result = array_operation()
        status = result if written is None else result.status
        self.status = self.manager.Status(int(status)).name
        assert self.status == expected
        self.plain = after
        if expected != "OK":
            assert as_bytes((self.pool, self.table)) == as_bytes(before)  # invariant 5
        if written is not None:
            self._write(result, written if expected == "OK" else [[] for _ in written])
        self._check()
        return result

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
        uids = np.asarray(self.pool.content_uid)
        seen = set()
        for row, tokens in enumerate(new):
            assert not slots[:, row, len(tokens) :].any()  # padding goes to the null block
            for group in range(len(self.windows)):
                contents = self._contents(group, row)[len(self.plain.tokens[row]) - len(tokens) :]
                for content, slot in zip(contents, slots[group, row], strict=False):
                    # Invariant 6: written blocks have one owner and no identity.
                    assert refs[slot // BLOCK_SIZE] == 1
                    assert uids[slot // BLOCK_SIZE] == 0
                    assert slot not in seen
                    seen.add(slot)
                    self.content[slot] = content

    def _contents(self, group, row):
        """What K and V of the row's slots must depend on."""
        tokens = self.plain.tokens[row]
        return [(group, self.plain.namespaces[row], *tokens[: i + 1]) for i in range(len(tokens))]

    def _check(self):
        pool, table, cache = jax.device_get((self.pool, self.table, self.cache))
        check_invariants(pool, table, cache)
        plain = self.plain
        for queue, expected in enumerate((plain.free, plain.cached)):  # order included: invariant 7
            entries = (pool.head[queue] + np.arange(pool.count[queue])) % self.num_blocks
            assert pool.free_queue[queue, entries].tolist() == expected
        assert pool.ref_count.tolist() == [plain.refs[b] for b in range(self.num_blocks)]
        assert pool.content_uid.tolist() == [plain.uids.get(b, 0) for b in range(self.num_blocks)]
        ids, lens = table.block_ids, table.seq_lens
        for row, tokens in enumerate(plain.tokens):
            assert lens[row] == len(tokens)
            for group in range(len(self.windows)):
                mine = plain.blocks[group][row]
                assert ids[group, row].tolist() == mine + [0] * (WIDTH - len(mine))
                seen = plain.first_needed(group, len(tokens)) * BLOCK_SIZE
                position = np.arange(seen, len(tokens))
                slots = ids[group, row][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                # Every row reads back what it stored, or what was stored for it: invariant 8.
                assert self.content[slots].tolist() == self._contents(group, row)[seen:]


class TwoGroupsMachine(BlockManagerMachine):
    windows = (None, None)
    num_blocks = 25


class WindowsMachine(BlockManagerMachine):
    """Three groups: one keeps everything, the others two blocks or so, and next to nothing."""

    windows = (5, None, 2)
    num_blocks = 31


class CachingMachine(BlockManagerMachine):
    """With a prefix cache, and texts of few tokens that meet again and again."""

    has_cache = True

    @initialize()
    def start_texts(self):
        self.texts = [[i % 2 for i in range(CAPACITY)], [0] * CAPACITY]

    @rule(
        data=st.data(),
        rows=st.lists(st.integers(0, NUM_ROWS - 1), min_size=1, max_size=2, unique=True),
        length=st.integers(1, CAPACITY),
        namespace=st.sampled_from([0, 0, 0, 1]),
        publishes=st.sampled_from([True] * 7 + [False]),
    )
    def admit(self, data, rows, length, namespace, publishes):
        """Rows look their prompts up, and then store what was not found, all in one step."""
        new = [[] for _ in range(NUM_ROWS)]
        for row in rows:
            prompt = data.draw(st.sampled_from(self.texts))[:length]
            if self.plain.tokens[row]:
                continue
            self.plain.namespaces[row] = namespace
            self._admit(row, prompt, namespace)
            new[row] = prompt[len(self.plain.tokens[row]) :][:MAX_NEW]
        self._step(new, publishes)

    admit_again = admit  # chosen as often as three of the rules without a prompt: most bugs of the cache need hits
    and_again = admit

    @rule(
        counts=st.lists(st.sampled_from([0, 1, 1, 2, 3, 4]), min_size=NUM_ROWS, max_size=NUM_ROWS),
        token=st.integers(0, 1),
        publishes=st.sampled_from([True] * 7 + [False]),
    )
    def continue_rows(self, counts, token, publishes):
        self._step([[token] * (c if t else 0) for c, t in zip(counts, self.plain.tokens, strict=True)], publishes)

    @precondition(lambda self: any(self.plain.tokens))
    @rule(data=st.data(), cut=st.integers(1, 4), token=st.integers(0, 1))
    def truncate_and_rewrite(self, data, cut, token):
        row = data.draw(st.sampled_from([r for r in range(NUM_ROWS) if self.plain.tokens[r]]))
        lens = [len(t) for t in self.plain.tokens]
        cut = min(cut, lens[row] - 1)
        lens[row] -= cut
        self._truncate(lens)
        self._step([[token] * (cut + 1 if r == row and cut else 0) for r in range(NUM_ROWS)], True)

    @rule(only_if_idle=st.booleans())
    def reset(self, only_if_idle):
        if only_if_idle and any(self.plain.tokens):
            self._release([bool(t) for t in self.plain.tokens])

        def array_reset():
            self.cache, pool, status = self.manager.reset(self.cache, self.pool)
            return pool, self.table, status

        before = self.cache
        self._run(lambda p: p.reset(), array_reset)
        assert self.status == "OK" or as_bytes(self.cache) == as_bytes(before)

    def _admit(self, row, prompt, namespace):
        tokens = np.array(prompt + [1] * (CAPACITY - len(prompt)), np.int32)
        arguments = (np.int32(row), tokens, np.int32(len(prompt)), np.int32(namespace))
        *state, hits = self.manager.admit(self.cache, self.pool, self.table, *arguments)
        length = int(np.max(np.nonzero(hits)[1], initial=-1)) + 1
        hits = np.asarray(hits)[:, :length].tolist()
        predicted = self.plain.match(namespace, prompt)
        assert hits == predicted if self.is_exact else length <= len(predicted[0])
        # Whether the blocks hold this prompt in this namespace is seen when the row is read back.
        self._run(lambda p: p.acquire(row, prompt, hits), lambda: state)

    def _step(self, new, publishes):
        self._append([len(n) for n in new], 0, new, publishes)

    def _store(self, appended, old_lens, publishes):
        tokens = np.zeros((NUM_ROWS, MAX_NEW), np.int32)
        for row, (mine, old) in enumerate(zip(self.plain.tokens, old_lens, strict=True)):
            tokens[row, : len(mine) - old] = mine[old:]
        self.cache, self.pool = self.manager.store(
            self.cache,
            self.pool,
            self.table,
            appended,
            tokens,
            np.array(old_lens, np.int32),
            np.array(self.plain.namespaces, np.int32),
            publishes,
        )
        if publishes:
            before = dict(self.plain.uids)
            self.plain.publish(old_lens)
            if not self.is_exact:
                self._believe_what_was_published(before)
        self._remember()
        self._check()
        known = np.asarray(self.cache.token_ids)
        for ids, mine in zip(self.plain.blocks[self.plain.chain], self.plain.tokens, strict=True):
            for i, block in enumerate(ids):
                part = mine[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]
                assert not block or known[block, : len(part)].tolist() == part

    def _believe_what_was_published(self, before):
        """A collision may keep a block unknown or part equal contents, never more; uids are not predicted."""
        found = {b: int(u) for b, u in enumerate(np.asarray(self.pool.content_uid)) if u}
        assert set(before.items()) <= set(found.items())
        assert set(found) <= set(self.plain.uids)
        self.plain.uids, self.plain.next_uid = found, int(self.cache.next_uid)
        for block in set(found) - set(before):
            chain, _ = self.plain.records[block]
            self.plain.records[block] = (chain, int(self.cache.records[block, paged_jax.prefix_cache.PARENT]))

    def _remember(self):
        for tokens in self.plain.tokens:
            text = tokens + [1] * (CAPACITY - len(tokens))
            if tokens and max(tokens) <= 1 and text not in self.texts:
                self.texts = [*self.texts[-7:], text]


class WindowsCachingMachine(CachingMachine):
    windows = (5, None, 2)
    num_blocks = 31


class OnlyWindowsCachingMachine(CachingMachine):
    """No group keeps everything: chains are followed in the larger window."""

    windows = (4, 7)
    num_blocks = 25


class TinyWindowsCachingMachine(CachingMachine):
    """A block may leave its window before the next one is full: then that one's chain is unknown."""

    windows = (3, 2)
    num_blocks = 25
