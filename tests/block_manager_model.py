"""A plain-Python block manager, written row by row, that the arrays are compared with after every operation."""

from dataclasses import dataclass, field, replace


class Refused(Exception):
    """The operation must change nothing; the argument is the Status name."""


@dataclass
class PlainBlockManager:
    """Lists and loops. Mutates itself; callers take a copy() when an operation may be refused."""

    num_blocks: int
    block_size: int
    num_rows: int
    max_blocks_per_seq: int
    windows: tuple[int | None, ...] = (None,)  # [group]
    free: list[int] = field(default_factory=list)  # uncached, first to be reused
    cached: list[int] = field(default_factory=list)  # free and cached, reused when no other is left
    refs: dict[int, int] = field(default_factory=dict)
    blocks: list[list[list[int]]] = field(default_factory=list)  # [group][row] -> ids, 0 where one left the window
    tokens: list[list[int]] = field(default_factory=list)  # [row] -> the tokens it must read back
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source, destination) of the last append
    namespaces: list[int] = field(default_factory=list)  # [row]
    uids: dict[int, int] = field(default_factory=dict)  # block -> identity of its content
    groups: dict[int, int] = field(default_factory=dict)  # block -> the group that it was last used for
    records: dict[int, tuple] = field(
        default_factory=dict
    )  # block -> (namespace and tokens up to its end, parent's uid)
    next_uid: int = 1

    def __post_init__(self) -> None:
        if not self.blocks:
            self.free = list(range(1, self.num_blocks))
            self.refs = dict.fromkeys(range(self.num_blocks), 0)
            self.blocks = [[[] for _ in range(self.num_rows)] for _ in range(self.num_groups)]
            self.tokens = [[] for _ in range(self.num_rows)]
            self.namespaces = [0] * self.num_rows

    def copy(self) -> "PlainBlockManager":
        return replace(
            self,
            free=list(self.free),
            cached=list(self.cached),
            refs=dict(self.refs),
            blocks=[[list(ids) for ids in rows] for rows in self.blocks],
            tokens=[list(tokens) for tokens in self.tokens],
            copies=list(self.copies),
            namespaces=list(self.namespaces),
            uids=dict(self.uids),
            groups=dict(self.groups),
            records=dict(self.records),
        )

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @property
    def num_free(self) -> int:
        return len(self.free) + len(self.cached)

    def first_needed(self, group: int, length: int) -> int:
        """The first block of which the token behind `length` tokens sees one."""
        window = self.windows[group]
        return next(
            i
            for i in range(length + 1)
            if window is None or any(p > length - window for p in range(i * self.block_size, (i + 1) * self.block_size))
        )

    def leave(self) -> None:
        """Blocks that no later token sees go, row by row, group by group, the tail first."""
        for row, tokens in enumerate(self.tokens):
            for group, rows in enumerate(self.blocks):
                for i in reversed(range(min(self.first_needed(group, len(tokens)), len(rows[row])))):
                    if rows[row][i]:
                        self._drop(rows[row][i])
                        rows[row][i] = 0

    def append(self, new: list[list[int]], max_new: int, reserve: int = 0) -> None:
        if any(len(n) > max_new for n in new):
            raise Refused("BAD_LENGTH")
        if any(
            len(t) + len(n) > self.max_blocks_per_seq * self.block_size for t, n in zip(self.tokens, new, strict=True)
        ):
            raise Refused("TABLE_FULL")
        free_before = self.num_free
        self.copies = []
        for row, tokens in enumerate(new):
            for group in range(self.num_groups):
                self._append_row(group, self.blocks[group][row], len(self.tokens[row]), len(tokens))
            self.tokens[row] = self.tokens[row] + tokens
        taken = free_before - self.num_free
        if taken and self.num_free < reserve:
            raise Refused("OUT_OF_BLOCKS")

    def _append_row(self, group: int, ids: list[int], length: int, count: int) -> None:
        if count and length % self.block_size and self.refs[ids[-1]] > 1:
            source = ids.pop()
            self.refs[source] -= 1
            ids.append(self._take(group))
            self.copies.append((source, ids[-1]))
        elif count and length % self.block_size:
            self.uids.pop(ids[-1], None)  # it is going to hold something else
        while len(ids) * self.block_size < length + count:
            ids.append(self._take(group))

    def _take(self, group: int) -> int:
        if not self.num_free:
            raise Refused("OUT_OF_BLOCKS")
        block = (self.free or self.cached).pop(0)
        self.uids.pop(block, None)
        self.refs[block] = 1
        self.groups[block] = group
        return block

    def fork(self, parents: list[int]) -> None:
        children = [row for row, parent in enumerate(parents) if parent != row]
        if any(self.tokens[row] for row in children):
            raise Refused("ROW_IN_USE")
        if any(not 0 <= parents[row] < self.num_rows or not self.tokens[parents[row]] for row in children):
            raise Refused("ROW_EMPTY")
        for row in children:
            self.tokens[row] = list(self.tokens[parents[row]])
            self.namespaces[row] = self.namespaces[parents[row]]
            for group in self.blocks:
                group[row] = list(group[parents[row]])
                for block in filter(None, group[row]):
                    self.refs[block] += 1

    def reparent(self, parents: list[int]) -> None:
        """Every row takes its parent's blocks; then all old rows are released, one by one, tail first."""
        for row, parent in enumerate(parents):
            if parent != row and not (0 <= parent < self.num_rows and self.tokens[parent]) and parent != self.num_rows:
                raise Refused("ROW_EMPTY")
        old = [list(group) for group in self.blocks]
        held = [*self.tokens, []]
        self.tokens = [list(held[parent]) for parent in parents]
        self.namespaces = [[*self.namespaces, 0][parent] for parent in parents]
        for group, rows in zip(self.blocks, old, strict=True):
            group[:] = [[*[*rows, []][parent]] for parent in parents]
            for ids in group:
                for block in filter(None, ids):
                    self.refs[block] += 1
        for row in range(self.num_rows):
            for rows in old:
                for block in filter(None, reversed(rows[row])):
                    self._drop(block)

    def _drop(self, block: int) -> None:
        self.refs[block] -= 1
        if self.refs[block] == 0:
            (self.cached if block in self.uids else self.free).append(block)

    def truncate(self, lens: list[int]) -> None:
        if any(not 0 <= n <= len(t) for n, t in zip(lens, self.tokens, strict=True)):
            raise Refused("BAD_LENGTH")
        for row, length in enumerate(lens):
            for group, rows in enumerate(self.blocks):
                needed = rows[row][self.first_needed(group, length) : -(-length // self.block_size)]
                if not all(needed):
                    raise Refused("BAD_LENGTH")
        for row, length in enumerate(lens):
            self.tokens[row] = self.tokens[row][:length]
            for group in self.blocks:
                while (len(group[row]) - 1) * self.block_size >= length and group[row]:
                    block = group[row].pop()
                    if block:
                        self._drop(block)

    def release(self, rows: list[bool]) -> None:
        if any(chosen and not t for chosen, t in zip(rows, self.tokens, strict=True)):
            raise Refused("ROW_EMPTY")
        self.truncate([0 if chosen else len(t) for chosen, t in zip(rows, self.tokens, strict=True)])

    # -- the prefix cache ---------------------------------------------------------------------------------------------

    @property
    def chain(self) -> int:
        """The group whose blocks stay longest."""
        return self.windows.index(None if None in self.windows else max(self.windows))

    def publish(self, old_lens: list[int]) -> None:
        for row, old in enumerate(old_lens):
            tokens, ids = self.tokens[row], self.blocks[self.chain][row]
            for i in range(old // self.block_size, len(tokens) // self.block_size):
                parent = self.uids.get(ids[i - 1], 0) if i else self._root(self.namespaces[row])
                if parent:
                    chain = (self.namespaces[row], *tokens[: (i + 1) * self.block_size])
                    uid, of_uid = self._newest(chain)
                    if not uid or self.records[of_uid][1] != parent:
                        uid, self.next_uid = self.next_uid, self.next_uid + 1
                    for group in self.blocks:
                        self.uids[group[row][i]], self.records[group[row][i]] = uid, (chain, parent)

    def match(self, namespace: int, tokens: list[int]) -> list[list[int]]:
        """[group] -> blocks, all of one length."""
        hits, before = [], self._root(namespace)
        for i in range((len(tokens) - 1) // self.block_size):
            uid, block = self._newest((namespace, *tokens[: (i + 1) * self.block_size]))
            if not uid or self.records[block][1] != before:
                break
            hits.append([self._with_uid(group, uid) for group in range(self.num_groups)])
            before = uid
        for length in range(len(hits), 0, -1):
            first = [self.first_needed(group, length * self.block_size) for group in range(self.num_groups)]
            found = [[0] * f + [h[g] for h in hits[f:length]] for g, f in enumerate(first)]
            if all(all(found[g][f:]) for g, f in enumerate(first)):
                return found
        return [[] for _ in self.blocks]

    def acquire(self, row: int, tokens: list[int], hits: list[list[int]]) -> None:
        held = [b for ids in hits for b in ids if b]
        if held and self.tokens[row]:
            raise Refused("ROW_IN_USE")
        if any(not self.refs[b] and b not in self.uids for b in held):
            raise Refused("NOT_OWNED")
        for block in held:
            self.refs[block] += 1
            if block in self.cached:
                self.cached.remove(block)
        if held:
            self.tokens[row] = tokens[: len(hits[0]) * self.block_size]
            for group, ids in zip(self.blocks, hits, strict=True):
                group[row] = list(ids)

    def reset(self) -> None:
        if self.num_free < self.num_blocks - 1:
            raise Refused("BLOCKS_IN_USE")
        self.free, self.cached, self.uids, self.next_uid = self.free + self.cached, [], {}, 1

    def _newest(self, chain: tuple) -> tuple[int, int]:
        """(uid, block) of the newest content that is this chain; the highest block if several have it."""
        mine = ((u, b) for b, u in self.uids.items() if self.groups[b] == self.chain)
        return max(((u, b) for u, b in mine if self.records[b][0] == chain), default=(0, 0))

    def _with_uid(self, group: int, uid: int) -> int:
        return max((b for b, u in self.uids.items() if u == uid and self.groups[b] == group), default=0)

    @staticmethod
    def _root(namespace: int) -> int:
        return -1 - namespace
