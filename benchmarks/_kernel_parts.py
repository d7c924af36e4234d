"""The parts of kernels.py that run in JAX: each yields (name, function that measures)."""

import functools
import warnings
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import _timing
from benchmarks._parts import Part
from benchmarks._problems import Implementation, Problem, build, measure, mosaic, xla
from pallas_kernels import move_kv
from pallas_kernels.shapes import MODEL_SHAPES, AttentionShape

_DRY_SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=64)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all parts share."""

    is_dry: bool
    seed: int

    @property
    def shape(self) -> AttentionShape:
        return _DRY_SHAPE if self.is_dry else MODEL_SHAPES["llama3_8b"]

    @property
    def limits(self) -> _timing.Limits:
        return _timing.DRY if self.is_dry else _timing.Limits()

    def tokens(self, count: int) -> int:
        """A length, or in a dry run about the 512th part of it."""
        return max(17, count // 512) if self.is_dry else count

    def rows(self, count: int) -> int:
        return min(count, 2) if self.is_dry else count

    def uniform(self, batch: int, context: int, **fields) -> Problem:
        return Problem(shape=self.shape, seq_lens=(self.tokens(context),) * self.rows(batch), **fields)

    def width(self, context: int) -> int:
        """Columns of a block table for that many tokens."""
        return -(-self.tokens(context) // self.shape.block_size)

    def build(self, problem: Problem):
        return build(problem, self.seed, max_rotation=1 if self.is_dry else _timing.MAX_ROTATION)

    def measure(self, problem: Problem, inputs, implementation: Implementation | None = None, **options) -> dict:
        """Times an implementation, by default the Mosaic kernels with their default Configs."""
        implementation = implementation or self.mosaic(inputs)
        return measure(implementation, problem, inputs, self.limits, **options)

    def mosaic(self, inputs, **options) -> Implementation:
        return mosaic(self.shape, inputs, is_dry=self.is_dry, **options)


def bandwidth(b: Bench) -> Part:
    """What the chip reaches: copies (bytes read + written), and a matrix product in bfloat16."""
    num_words = 2**16 if b.is_dry else 2**30
    about = {"bytes": 2 * 4 * num_words}
    words = jax.random.bits(jax.random.key(b.seed), (num_words,), jnp.uint32)
    copies = 1 if b.is_dry else 8

    def by_driver() -> dict:
        # Not donated: each call must copy its argument, which XLA leaves to cudaMemcpyAsync.
        copy = jax.jit(jnp.copy).lower(words).compile()

        def chain(carry, *_):
            for _ in range(copies):
                carry = copy(carry)
            return carry

        return about | _timing.Timed(chain, (), copies, 0.0).run(words, b.limits)[0]

    def by_xla() -> dict:
        def flip(carry, *_):
            return carry ^ jnp.uint32(1)

        guess = about["bytes"] / 4e6
        timed = _timing.compiled(flip, jnp.copy(words), {}, {}, ((),), guess_us=guess, limits=b.limits)
        return about | timed.run(jnp.copy(words), b.limits)[0]

    def product() -> dict:
        n = 64 if b.is_dry else 8192
        left, right = (jax.random.normal(key, (n, n), jnp.bfloat16) for key in jax.random.split(jax.random.key(b.seed)))
        right = right * (n**-0.5)  # a product is as large as its left side

        def multiply(carry, large, *_):
            return carry @ large["right"]

        timed = _timing.compiled(multiply, left, {"right": right}, {}, ((),), guess_us=2 * n**3 / 7e8, limits=b.limits)
        return {"flop": 2 * n**3} | timed.run(left, b.limits)[0]

    yield "copy by the driver", by_driver
    yield "copy by XLA", by_xla
    yield "matrix product", product


def _decode_table(b: Bench, *, is_isolated: bool = True, is_interpreted: bool = False, **config) -> Part:
    batches, contexts = (
        ((1, 16) if is_interpreted else (64,), (8192,)) if b.is_dry else ((1, 16, 64, 256), (1024, 8192, 65536))
    )
    for batch, context in sorted(((s, c) for s in batches for c in contexts), key=lambda cell: cell[0] * cell[1]):
        problem = b.uniform(batch, context)
        inputs = b.build(problem)
        implementation = b.mosaic(inputs, decode=config, is_interpreted=is_interpreted and batch == 1)
        run = functools.partial(b.measure, problem, inputs, implementation, is_isolated=is_isolated)
        yield f"{batch} x {context},", run
        del inputs, implementation, run  # the next pools need the memory


def decode_wgmma(b: Bench) -> Part:
    """Batch by context, everything that a call launches counted."""
    return _decode_table(b, mma="wgmma", is_interpreted=b.is_dry)


def decode_mma(b: Bench) -> Part:
    return _decode_table(b, mma="mma")


def decode_in_model(b: Bench) -> Part:
    """As above, default Config, but with the work list computed once for all calls, as for the layers of a model."""
    return _decode_table(b, is_isolated=False)


def ragged(b: Bench) -> Part:
    """Lengths from 128 to 32k, log-uniform, against equal ones of the same sum."""
    num_rows = b.rows(64)
    drawn = np.exp(np.random.default_rng(b.seed).uniform(np.log(128), np.log(32768), num_rows)).astype(int)
    lens = [b.tokens(int(n)) for n in drawn]
    width = b.width(32768)
    for name, seq_lens in (("ragged", lens), ("equal", [sum(lens) // num_rows] * num_rows)):
        problem = Problem(shape=b.shape, seq_lens=tuple(seq_lens), width=width)
        inputs = b.build(problem)
        yield f"{name}, mosaic", functools.partial(b.measure, problem, inputs)
        del inputs


def wide_table(b: Bench) -> Part:
    """The same rows in a table for 64k tokens a row."""
    for batch, context in ((64, 8192),) if b.is_dry else ((64, 8192), (1, 4096)):
        for name, width in (("tight", None), ("wide", b.width(65536))):
            problem = b.uniform(batch, context, width=width)
            yield f"{batch} x {context}, {name}", functools.partial(b.measure, problem, b.build(problem))


def quantised(b: Bench) -> Part:
    """8-bit K/V against bfloat16."""
    for dtype in ("bfloat16", "int8", "float8_e4m3fn"):
        problem = b.uniform(64, 8192, cache_dtype=dtype)
        inputs = b.build(problem)
        for mma in ("wgmma",) if b.is_dry else ("wgmma", "mma"):
            yield (
                f"{dtype}, {mma}",
                functools.partial(b.measure, problem, inputs, b.mosaic(inputs, decode={"mma": mma})),
            )


def prefill(b: Bench) -> Part:
    """Whole prompts, and a chunk over a long past. The rival has its K/V in one piece."""
    length = b.tokens(8192)
    problem = Problem(shape=b.shape, seq_lens=(length,), counts=(length,))
    inputs = b.build(problem)
    yield "1 x 8192, mosaic", lambda: b.measure(problem, inputs, b.mosaic(inputs, is_interpreted=b.is_dry))

    def dense(implementation: str) -> dict:
        shape = (1, length, b.shape.num_kv_heads, b.shape.head_dim)
        large = {n: jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, n in enumerate(("key", "value"))}

        def op(query, large, *_):
            return jax.nn.dot_product_attention(query, **large, is_causal=True, implementation=implementation)

        arguments = inputs.query[None], large, {}, ((),)
        timed = _timing.compiled(op, *arguments, guess_us=problem.guess_us, limits=b.limits)
        numbers, _ = timed.run(inputs.query[None], b.limits)
        return {"ran": f"jax.nn.dot_product_attention, {implementation}", "flop": problem.flop} | numbers

    yield "1 x 8192, dense", functools.partial(dense, "xla" if b.is_dry else "cudnn")
    cases = (("2048 after 30720", (32768,), (2048,)), ("4 x 2048", (2048,) * 4, (2048,) * 4))
    for name, lens, counts in cases[:1] if b.is_dry else cases:
        problem_n = Problem(
            shape=b.shape,
            seq_lens=tuple(map(b.tokens, lens)),
            counts=tuple(min(17, n) if b.is_dry else n for n in counts),
        )
        yield f"{name}, mosaic", functools.partial(b.measure, problem_n, b.build(problem_n))


def mixed(b: Bench) -> Part:
    """One prompt's chunk of 4096 tokens beside 63 decode rows at 8192, and each of them alone."""
    chunk, context, num_decodes = b.tokens(4096), b.tokens(8192), b.rows(63)
    problems = {
        "together": ((chunk, *(context,) * num_decodes), (chunk, *(1,) * num_decodes)),
        "chunk alone": ((chunk,), (chunk,)),
        "decodes alone": ((context,) * num_decodes, None),
    }
    for name, (lens, counts) in problems.items():
        problem = Problem(shape=b.shape, seq_lens=lens, counts=counts)
        yield f"{name}, mosaic", functools.partial(b.measure, problem, b.build(problem))


def _jax_paged(b: Bench, problem: Problem, inputs, num_splits: int) -> dict:
    """JAX's own kernel (Pallas Triton), whose pools are [K, B, block_size, H]; it applies no scale."""
    if b.is_dry:
        problem = replace(problem, width=16)
        inputs = b.build(problem)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

        large = {n: jnp.transpose(inputs.large[n + "_cache"], (2, 0, 1, 3)) for n in ("key", "value")}

        def op(query, large, small, table):
            return paged_attention(
                query,
                large["key"],
                large["value"],
                table,
                small["seq_lens"],
                k_splits=num_splits,
                pages_per_compute_block=1 if b.is_dry else 8,
                interpret=b.is_dry,
            )

        arguments = jnp.copy(inputs.query), large, inputs.small, inputs.rotated
        timed = _timing.compiled(op, *arguments, guess_us=2 * problem.guess_us, limits=b.limits)
        numbers, _ = timed.run(jnp.copy(inputs.query), b.limits)
    ran = "jax.experimental.pallas.ops.gpu.paged_attention" + (", interpreted" if b.is_dry else "")
    return {"ran": ran, "k_splits": num_splits, "bytes": problem.bytes} | numbers


def _dense_decode(b: Bench, problem: Problem, inputs, implementation: str) -> dict:
    """jax.nn.dot_product_attention over K and V in one piece per row."""
    rows, length = len(problem.seq_lens), problem.seq_lens[0]
    shape = (rows, length, b.shape.num_kv_heads, b.shape.head_dim)
    keys = jax.random.split(jax.random.key(b.seed), 2 * len(inputs.rotated))
    own = tuple(
        {"key": jax.random.normal(k, shape, jnp.bfloat16), "value": jax.random.normal(v, shape, jnp.bfloat16)}
        for k, v in zip(keys[::2], keys[1::2], strict=True)
    )

    def op(query, large, small, table):
        del large
        lens = {"key_value_seq_lengths": small["seq_lens"]}
        return jax.nn.dot_product_attention(query[:, None], **table, **lens, implementation=implementation)[:, 0]

    arguments = jnp.copy(inputs.query), {}, inputs.small, own
    timed = _timing.compiled(op, *arguments, guess_us=2 * problem.guess_us, limits=b.limits, is_isolated=False)
    numbers, _ = timed.run(jnp.copy(inputs.query), b.limits)
    return {"ran": f"jax.nn.dot_product_attention, {implementation}", "bytes": problem.bytes} | numbers


def rivals(b: Bench) -> Part:
    """Others beside ours on the same rows."""
    for batch, context, is_wide in ((64, 8192, False), (1, 4096, True)):
        name = f"{batch} x {context}{' wide' if is_wide else ''}"
        problem = b.uniform(batch, context, width=b.width(65536) if is_wide else None)
        inputs = b.build(problem)
        yield f"{name}, mosaic", functools.partial(b.measure, problem, inputs)
        for splits in (2,) if b.is_dry else (16, 64):
            yield f"{name}, jax paged, {splits} splits", functools.partial(_jax_paged, b, problem, inputs, splits)
        if b.is_dry and is_wide:
            continue
        yield f"{name}, xla", functools.partial(b.measure, problem, inputs, xla(b.shape))
        for which in ("xla",) if b.is_dry else ("xla", "cudnn"):
            yield f"{name}, dense {which}", functools.partial(_dense_decode, b, problem, inputs, which)


def moves(b: Bench) -> Part:
    """K/V writes and block copies in place; bytes count what is read and what is written."""
    line = (b.shape.num_kv_heads, b.shape.head_dim)
    block_size, line_bytes = b.shape.block_size, 2 * int(np.prod(line))
    num_blocks, num_sets = (40, 1) if b.is_dry else (65536, 8)
    rng = np.random.default_rng(b.seed)

    def time_move(op, amount, large, rotated, num_bytes) -> dict:
        pools = tuple(jnp.zeros((num_blocks, block_size, *line), jnp.bfloat16) for _ in "kv")
        guess = max(8.0, num_bytes / 3e6)
        timed = _timing.compiled(op, pools, large, {}, rotated, guess_us=guess, limits=b.limits, is_isolated=False)
        return {"bytes": num_bytes, "amount": amount} | timed.run(pools, b.limits)[0]

    def write(pools, new, _, slots):
        return move_kv.write_kv(*pools, *new, slots, interpret=b.is_dry)

    def scatter(pools, new, _, slots):
        at = slots // block_size, slots % block_size
        return tuple(pool.at[at].set(values) for pool, values in zip(pools, new, strict=True))

    def copy(pools, _, __, pairs):
        return move_kv.copy_blocks(*pools, *pairs, interpret=b.is_dry)

    def gather(pools, _, __, pairs):
        return tuple(pool.at[pairs[1]].set(pool[pairs[0]]) for pool in pools)

    for count in (32768,) if b.is_dry else (256, 32768):
        amount = 17 if b.is_dry else count
        new = [jax.random.normal(jax.random.key(i), (amount, *line), jnp.bfloat16) for i in range(2)]
        sets = rng.permuted(np.tile(np.arange(block_size, num_blocks * block_size), (num_sets, 1)), axis=1)
        slots = tuple(jnp.asarray(s[:amount], jnp.int32) for s in sets)
        num_bytes = 2 * 2 * amount * line_bytes
        for name, op in (("mosaic", write), ("xla", scatter)):
            yield f"write {count}, {name}", functools.partial(time_move, op, amount, new, slots, num_bytes)
    for count in (8192,) if b.is_dry else (64, 8192):
        amount = 5 if b.is_dry else count
        sets = rng.permuted(np.tile(np.arange(1, num_blocks), (num_sets, 1)), axis=1)
        pairs = tuple((jnp.asarray(s[:amount], jnp.int32), jnp.asarray(s[-amount:], jnp.int32)) for s in sets)
        num_bytes = 2 * 2 * amount * block_size * line_bytes
        for name, op in (("mosaic", copy), ("xla", gather)):
            yield f"copy {count}, {name}", functools.partial(time_move, op, amount, {}, pairs, num_bytes)
