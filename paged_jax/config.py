"""Static configuration: frozen, hashable, validated on the host before anything is allocated."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, Self

import jax.numpy as jnp

#: Orders in which requests start, and ways to make room for others.
POLICIES = ("fcfs", "sjf", "priority")
PREEMPTION_MODES = ("auto", "recompute", "swap")
#: Storage formats of K and V: those that hold the numbers themselves, and 8-bit ones with a float32 scale per token and
#: kv head.
SCALED_CACHE_DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")
CACHE_DTYPES = ("float32", "bfloat16", "float16", *SCALED_CACHE_DTYPES)
_SCALE_BYTES = 4
_MAX_SLOTS = 2**31 - 1


def check_positive(owner: str, **values: object) -> None:
    """Raises ValueError unless each value is an integer >= 1 (a bool is not an integer)."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise ValueError(f"{owner}.{name} must be an integer >= 1, got {value!r}")


def cdiv(a, b):
    """Ceiling division for non-negative integers: cdiv(9, 4) == 3."""
    return (a + b - 1) // b


#: Share of a kind of layers' memory that equal groups may leave unused.
_MAX_PADDING = 0.1


def group_layers(
    layer_windows: Sequence[int | None],
) -> tuple[tuple[tuple[int, ...], ...], tuple[int | None, ...]]:
    """Cache groups for a model whose layer i sees a window of layer_windows[i] tokens (None: all tokens).

    Layers with one window are divided, in order, into groups of the same layer count; the last group of a window may be
    smaller, and then leaves memory of its blocks unused. The count is the largest that leaves at most _MAX_PADDING of
    any kind's memory unused: few groups, for each costs a block table. Gemma 3 270M, 15 windows and 3 full layers: five
    groups of three windows and one of three full layers. Gemma 3 4B, 29 and 5: six groups of windows, one of them with
    four layers, and one of five full layers.

    Returns:
        (layer_groups, sliding_windows) for CacheConfig; groups in the order of their first layers.

    Raises:
        ValueError: there are no layers, or a window is neither None nor an integer >= 1.
    """
    if not isinstance(layer_windows, Sequence) or not layer_windows:
        raise ValueError(f"group_layers(): layer_windows must list the window of each layer, got {layer_windows!r}")
    check_positive("group_layers()", **{f"layer_windows[{i}]": w for i, w in enumerate(layer_windows) if w is not None})
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(layer_windows):
        kinds.setdefault(window, []).append(layer)
    counts = [len(layers) for layers in kinds.values()]
    size = max(g for g in range(1, max(counts) + 1) if all(-n % g <= _MAX_PADDING * (n + -n % g) for n in counts))
    groups = sorted(
        (tuple(layers[i : i + size]), window) for window, layers in kinds.items() for i in range(0, len(layers), size)
    )
    return tuple(layers for layers, _ in groups), tuple(window for _, window in groups)


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Sizes of the paged K/V memory; everything that must be known before it is allocated.

    Attributes:
        num_blocks: physical blocks in the pool, the null block (id 0) included: num_blocks - 1 can be handed out.
        num_layers: layers that own K/V. Layers that share another layer's K/V do not count.
        num_kv_heads: K/V heads per layer.
        head_dim: elements per head.
        max_blocks_per_seq: logical blocks per row of a block table; max_blocks_per_seq * block_size is the longest
            sequence in tokens.
        block_size: tokens per block: what is allocated, shared and cached as one.
        kernel_block_size: tokens per block of the arrays, which attention loads as one; divides block_size. Default:
            the same as block_size. Nothing but speed depends on it.
        dtype: storage format, one of CACHE_DTYPES.
        max_num_seqs: rows of the block tables, i.e. sequences that can be held at once.
        layer_groups: layers per cache group, a partition of range(num_layers). Each group has a block table of its own
            over the one pool. Groups should be of equal layer count: in blocks of a smaller one, memory is unused.
            Default: one group with all layers.
        sliding_windows: per group, the window W of its layers: the token at position p sees positions p - W + 1 ... p,
            and blocks that no later token sees are given back. None: full attention, nothing is given back. Default:
            None for all groups. `group_layers` makes both from the windows of a model's layers.
    """

    num_blocks: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_blocks_per_seq: int
    block_size: int = 16
    kernel_block_size: int | None = None
    dtype: str = "float32"
    max_num_seqs: int = 16
    layer_groups: tuple[tuple[int, ...], ...] = field(default=())
    sliding_windows: tuple[int | None, ...] = field(default=())

    def __post_init__(self) -> None:
        owner = type(self).__name__
        check_positive(
            owner,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_blocks_per_seq=self.max_blocks_per_seq,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            num_blocks=self.num_blocks,
        )
        if self.num_blocks < 2:
            raise ValueError(f"{owner}.num_blocks must be >= 2 (block 0 is the null block), got {self.num_blocks}")
        if self.max_blocks_per_seq * self.block_size >= 2**31:
            raise ValueError(
                f"{owner}: max_blocks_per_seq * block_size does not fit int32 positions; lower one of them"
            )
        if self.num_blocks * self.block_size > _MAX_SLOTS:
            raise ValueError(
                f"{owner}: num_blocks * block_size = {self.num_blocks * self.block_size} does not fit int32 slots; "
                f"use at most {_MAX_SLOTS // self.block_size} blocks of {self.block_size} tokens"
            )
        if self.kernel_block_size is not None:
            check_positive(owner, kernel_block_size=self.kernel_block_size)
            if self.block_size % self.kernel_block_size:
                raise ValueError(
                    f"{owner}.kernel_block_size must divide block_size={self.block_size}, got "
                    f"{self.kernel_block_size}; make block_size a multiple of it"
                )
        try:
            object.__setattr__(self, "dtype", jnp.dtype(self.dtype).name)
        except TypeError as error:
            raise ValueError(f"{owner}.dtype must be one of {CACHE_DTYPES}, got {self.dtype!r}") from error
        if self.dtype not in CACHE_DTYPES:
            raise ValueError(f"{owner}.dtype must be one of {CACHE_DTYPES}, got {self.dtype!r}")
        try:
            groups = tuple(tuple(g) for g in self.layer_groups) or (tuple(range(self.num_layers)),)
            windows = tuple(self.sliding_windows) or (None,) * len(groups)
            is_partition = sorted(sum(groups, ())) == list(range(self.num_layers))
        except TypeError as error:
            raise ValueError(
                f"{owner}.layer_groups must be a tuple of tuples of layers, and sliding_windows a tuple with one entry "
                f"per group, got {self.layer_groups!r} and {self.sliding_windows!r}; group_layers makes both"
            ) from error
        if not is_partition or not all(groups):
            raise ValueError(
                f"{owner}.layer_groups must partition range({self.num_layers}) into groups, none of them empty, got "
                f"{groups}"
            )
        object.__setattr__(self, "layer_groups", groups)
        for name, window in ((f"sliding_windows[{g}]", w) for g, w in enumerate(windows) if w is not None):
            check_positive(owner, **{name: window})
            if window >= 2**31:
                raise ValueError(f"{owner}.{name}={window} does not fit int32 positions; None is full attention")
        if len(windows) != len(groups):
            raise ValueError(
                f"{owner}.sliding_windows has {len(windows)} entries for {len(groups)} groups of layers; give one per "
                "group, None for full attention"
            )
        object.__setattr__(self, "sliding_windows", windows)

    @property
    def num_groups(self) -> int:
        """Cache groups."""
        return len(self.layer_groups)

    @property
    def num_arrays(self) -> int:
        """K arrays (and V arrays): array j belongs to the j-th layer of every group that has so many."""
        return max(map(len, self.layer_groups))

    @property
    def layer_map(self) -> tuple[tuple[int, int], ...]:
        """(group, array) of each layer."""
        where = {layer: (g, j) for g, layers in enumerate(self.layer_groups) for j, layer in enumerate(layers)}
        return tuple(where[layer] for layer in range(self.num_layers))

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens that a row can hold."""
        return self.max_blocks_per_seq * self.block_size

    @property
    def kernel_blocks_per_block(self) -> int:
        """Blocks of the arrays that make up one block of the block manager."""
        return self.block_size // (self.kernel_block_size or self.block_size)

    @property
    def has_scales(self) -> bool:
        """Whether K and V are 8-bit numbers with scales."""
        return self.dtype in SCALED_CACHE_DTYPES

    @property
    def bytes_per_block(self) -> int:
        """Bytes of K and V in one block, over all arrays, scales included."""
        bytes_per_head = self.head_dim * jnp.dtype(self.dtype).itemsize + _SCALE_BYTES * self.has_scales
        return 2 * self.num_arrays * self.block_size * self.num_kv_heads * bytes_per_head

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token, over all layers, scales and what smaller groups leave unused included."""
        return self.num_groups * self.bytes_per_block // self.block_size

    @classmethod
    def with_memory(cls, num_bytes: int, **sizes: Any) -> Self:
        """The config whose K and V, null block included, take at most `num_bytes` bytes.

        Args:
            num_bytes: for K and V and their scales. More than int32 slots can name is left unused.
            sizes: all arguments but num_blocks.

        Raises:
            ValueError: the bytes hold no block beside the null block, or not one sequence of max_blocks_per_seq blocks.
        """
        check_positive(cls.__name__, num_bytes=num_bytes)
        smallest = cls(num_blocks=2, **sizes)
        num_blocks = num_bytes // smallest.bytes_per_block
        longest = smallest.max_blocks_for(smallest.max_model_len, 1)
        if num_blocks - 1 < longest:
            raise ValueError(
                f"{num_bytes} bytes of K/V memory hold {num_blocks} blocks of {smallest.block_size} tokens "
                f"({smallest.bytes_per_block} bytes each), the null block included; one sequence of "
                f"{smallest.max_model_len} tokens needs {longest} and the null block: give at least "
                f"{(longest + 1) * smallest.bytes_per_block} bytes, or lower max_blocks_per_seq (max_model_len), or "
                "choose a smaller dtype (kv_cache_dtype)"
            )
        return replace(smallest, num_blocks=min(num_blocks, _MAX_SLOTS // smallest.block_size))

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` stored tokens owns between steps, over all groups.

        Of a window W, cdiv(num_tokens, block_size) less the max(0, num_tokens - W + 1) // block_size blocks that the
        next token does not see.
        """
        gone = (0 if w is None else max(0, num_tokens - w + 1) // self.block_size for w in self.sliding_windows)
        return sum(cdiv(num_tokens, self.block_size) - n for n in gone)

    def max_blocks_for(self, num_tokens: int, max_new_tokens: int) -> int:
        """Blocks that a sequence owns at most until it has `num_tokens` tokens, over all groups.

        Each step brings up to max_new_tokens tokens, and while it runs the blocks that leave a window are still there.
        """
        return self.max_blocks_for_samples(num_tokens, [num_tokens], max_new_tokens)

    def max_blocks_for_samples(self, num_prompt_tokens: int, seq_lens: Sequence[int], max_new_tokens: int) -> int:
        """Blocks at most of sequences that fork one prompt and end with these lengths, over all groups.

        Full blocks of the prompt are shared, and all of it before it is left. Prompt 6, blocks of 4, three sequences of
        12 tokens: 3 blocks each, the first one shared: 1 + 3 * 2 = 7.
        """
        in_prompt = num_prompt_tokens // self.block_size
        total = 0
        for window in self.sliding_windows:
            held, grown = self._max_held(window, 1), self._max_held(window, max_new_tokens)
            blocks = [min(cdiv(n, self.block_size), grown) for n in seq_lens]
            prompt = min(cdiv(num_prompt_tokens, self.block_size), grown)
            own = [min(cdiv(n, self.block_size) - in_prompt, grown) for n in seq_lens]
            shared = min(in_prompt, held) + sum(own)
            total += prompt if max(seq_lens) == num_prompt_tokens else max(prompt, min(sum(blocks), shared))
        return total

    def max_blocks_gained(self, num_stored_tokens: int, num_tokens: int, max_new_tokens: int) -> int:
        """Blocks at most that a sequence with num_stored_tokens takes until it has num_tokens, over all groups, while
        others hold all that it has now: what leaves its windows is not given back."""
        gained = cdiv(num_tokens, self.block_size) - cdiv(num_stored_tokens, self.block_size)
        return sum(min(gained, self._max_held(window, max_new_tokens)) for window in self.sliding_windows)

    def _max_held(self, window: int | None, max_new_tokens: int) -> int:
        """Blocks that a window, and a step's new tokens, can touch when they lie as unluckily as they can."""
        if window is None:
            return self.max_blocks_per_seq
        return cdiv(window + self.block_size - 2 + max(1, max_new_tokens), self.block_size)

    def longest_sequence(self, max_new_tokens: int, num_blocks: int | None = None) -> int:
        """Tokens of the longest sequence that a row and num_blocks blocks hold, if it grows by at most max_new_tokens a
        step. Default: all blocks of the pool."""
        num_blocks = self.num_blocks - 1 if num_blocks is None else num_blocks
        low, high = 0, self.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.max_blocks_for(middle, max_new_tokens) <= num_blocks
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def max_concurrency(self, num_tokens: int, max_new_tokens: int) -> float:
        """Sequences of num_tokens tokens that the pool holds at once, growing by at most max_new_tokens a step."""
        return (self.num_blocks - 1) / self.max_blocks_for(num_tokens, max_new_tokens)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Who runs, and what happens when blocks run out.

    Attributes:
        policy: order in which requests start. "fcfs": of arrival; "priority": lowest value first, then of arrival;
            "sjf": shortest expected work first, where waiting makes a request shorter, so that none starves.
        preemption_mode: what becomes of the blocks of a request that must make room: "recompute" releases them, "swap"
            copies them to the host and back, "auto" does what takes less time. All give the same results.
        watermark: share of the pool, 0 ... 1, that admission leaves free for the growth of running requests. The first
            request of an idle engine starts regardless.
        priority_reserve: share of the pool, 0 ... 1, that only requests with a priority below 0 use.
        num_host_blocks: blocks that swapped requests may keep on the host together; beyond, they are computed again.
            Default: as many as the pool has.
    """

    policy: str = "fcfs"
    preemption_mode: str = "auto"
    watermark: float = 0.05
    priority_reserve: float = 0.0
    num_host_blocks: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("policy", POLICIES), ("preemption_mode", PREEMPTION_MODES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"scheduling {name} must be one of {allowed}, got {getattr(self, name)!r}")
        for name in ("watermark", "priority_reserve"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ValueError(f"{name} must be a share of the pool in [0, 1], got {value!r}")
        blocks = self.num_host_blocks
        if blocks is not None and (isinstance(blocks, bool) or not isinstance(blocks, Integral) or blocks < 0):
            raise ValueError(f"num_host_blocks must be an integer >= 0, or None, got {blocks!r}")
