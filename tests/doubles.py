"""Test doubles that the whole suite shares: TINY, DENSE, ORACLE, POISON, AUDIT, and a byte tokenizer.

* TINY: a random decoder; MIXED: the same with a window of WINDOW tokens in its second layer; DENSE: the same weights
  without any cache, the answer that they must give.
* ORACLE: a model that reads its own past back through the block table and emits token 0 at any slip.
* POISON: NaN in every slot that holds no live token, garbage in every dead table entry.
* AUDIT: the block manager's invariants, checked after each step.

The environment variable TEST_CACHE chooses the cache that they run on, for whole test files at once: "full" (float32,
one group), "windows" (a group with full attention and one with a window of WINDOW tokens) or "int8". Engines then have
as many blocks per group as a test asks for.
"""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.llama import LlamaConfig, LlamaForward, init_params
from paged_jax import LLM, CacheConfig, Status, group_layers
from paged_jax.invariants import check_invariants
from paged_jax.kv_cache import write_kv

VOCAB = 97
CACHE = os.environ.get("TEST_CACHE", "full")
assert CACHE in ("full", "windows", "int8"), CACHE
WINDOW = 6

# -- TINY and DENSE --------------------------------------------------------------------------------------------------


class MixedConfig(LlamaConfig):
    """The first layer sees everything, the second a window."""

    @property
    def layer_windows(self):
        return (None, WINDOW, None)[: self.num_layers]


TINY_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
MIXED = LlamaForward(MixedConfig(**TINY_SIZES))
TINY = MIXED if CACHE == "windows" else LlamaForward(LlamaConfig(**TINY_SIZES))
TINY_CONFIG = TINY.config


@functools.cache
def tiny_params():
    """Weights large enough that greedy text wanders through the vocabulary."""
    params = init_params(LlamaConfig(**TINY_SIZES), nnx.Rngs(0))
    return jax.tree.map(lambda x: 12.0 * x if x.ndim == 2 else x, params)


def _norm(x, weight):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + TINY_CONFIG.rms_norm_eps) * weight[None]


def _rotate(x):
    """x [T, heads, H] at positions 0 ... T-1."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[0])[:, None] / TINY_CONFIG.rope_theta ** (np.arange(half) / half)[None]
    cos, sin = (jnp.asarray(f(angle), jnp.float32)[:, None] for f in (np.cos, np.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _stored(x):
    """K or V [T, heads, H] as the cache gives them back."""
    if CACHE != "int8":
        return x
    highest = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    scale = jnp.where(highest > 0, highest / 127, 1)
    return jnp.clip(jnp.round(x / scale), -127, 127) * scale


@functools.partial(jax.jit, static_argnames="forward")
def _dense(params, token_ids, forward):
    c = forward.config
    x = params["embedding"][token_ids]
    distance = np.arange(len(token_ids))[:, None] - np.arange(len(token_ids))[None]
    for layer in range(c.num_layers):
        visible = ((distance >= 0) & (distance < (c.layer_windows[layer] or len(token_ids))))[None]
        p = params["layers"][layer]
        qkv = _norm(x, p["attention_norm"]["weight"]) @ p["attention"]["qkv"]["kernel"]
        q, k, v = jnp.split(qkv.reshape(len(token_ids), -1, c.head_dim), [c.num_heads, c.num_heads + c.num_kv_heads], 1)
        group = c.num_heads // c.num_kv_heads
        k, v = jnp.repeat(_stored(_rotate(k)), group, axis=1), jnp.repeat(_stored(v), group, axis=1)
        scores = jnp.einsum("qnh,knh->nqk", _rotate(q), k) / np.sqrt(c.head_dim)
        weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
        x = x + jnp.einsum("nqk,knh->qnh", weights, v).reshape(x.shape) @ p["attention"]["out"]["kernel"]
        gate, up = jnp.split(_norm(x, p["mlp_norm"]["weight"]) @ p["mlp"]["gate_up"]["kernel"], 2, axis=1)
        x = x + (jax.nn.silu(gate) * up) @ p["mlp"]["down"]["kernel"]
    return _norm(x, params["norm"]["weight"]) @ params["embedding"].T


def dense_logits(token_ids, params=None, forward=TINY) -> np.ndarray:
    """Logits [T, V] after each token, without any cache. Padded to a few lengths: causality makes padding harmless."""
    size = max(16, 1 << (len(token_ids) - 1).bit_length())
    padded = np.zeros(size, np.int32)
    padded[: len(token_ids)] = token_ids
    return np.asarray(_dense(tiny_params() if params is None else params, padded, forward))[: len(token_ids)]


@functools.cache
def _dense_tokens(prompt: tuple[int, ...], num_tokens: int, forward) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(np.argmax(dense_logits(tokens, forward=forward)[-1])))
    return tokens[len(prompt) :]


def dense_tokens(prompt, num_tokens: int, forward=TINY) -> list[int]:
    """The greedy continuation: what every run of TINY, or MIXED, must give."""
    return _dense_tokens(tuple(prompt), num_tokens, forward)


# -- ORACLE ----------------------------------------------------------------------------------------------------------


def oracle_next(token_ids) -> int:
    """The token that ORACLE emits after these: 1 + mix mod 95, never 0."""
    mix = 0
    for position, token in enumerate(token_ids):
        mix = (mix + (token + 1) * (2654435761 * (2 * position + 1))) % 2**32
    return 1 + mix % 95


def oracle_tokens(prompt, num_tokens: int) -> list[int]:
    """What ORACLE continues `prompt` with if every slot holds what it should."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(oracle_next(tokens))
    return tokens[len(prompt) :]


def oracle_forward(params, batch, cache):
    """Stores (domain, position, token) per slot and reads what a row sees back through its block table, layer by layer.

    The domain is the row's first token: tests give every request another one. Any slot that does not hold the right
    domain and position, or any token that is written twice, changes what is emitted. Each number is a head of its own,
    so that formats with scales keep it exactly.
    """
    num_rows, block_size = batch.seq_lens.shape[0], cache.kernel_block_size
    token = jnp.arange(batch.token_ids.shape[0], dtype=jnp.int32)
    row = token
    if batch.query_start_loc is not None:
        row = jnp.minimum(jnp.sum(token[:, None] >= batch.query_start_loc[None, 1:], axis=1), num_rows - 1)

    def stored(layer, domain):
        record = jnp.stack([domain, batch.positions, batch.token_ids], axis=1).astype(jnp.float32)[..., None]
        return write_kv(layer, record, record, batch.slot_mapping[layer.group])

    def read(layer):
        blocks = batch.block_tables[layer.group][row]
        numbers = layer.k[blocks].astype(jnp.float32)  # [T, M, block_size, 3, 1]
        if layer.k_scale is not None:
            numbers = numbers * jnp.swapaxes(layer.k_scale[blocks], -1, -2)[..., None]
        return jnp.round(numbers.reshape(token.shape[0], -1, 3)).astype(jnp.int32)  # [T, M * block_size, 3]

    # Layer 0 sees everything: what a row's first token is, and what it emits.
    first_token = read(stored(cache.layer(0), jnp.zeros_like(token)))[:, 0, 2]
    is_right = True
    for i in reversed(range(cache.num_layers)):
        layer = stored(cache.layer(i), first_token)
        cache = cache.with_layer(i, layer)
        domain, position, tokens = jnp.moveaxis(read(layer), -1, 0)
        slot = jnp.arange(batch.block_tables.shape[-1] * block_size, dtype=jnp.int32)[None]
        seen = slot <= batch.positions[:, None]
        if layer.sliding_window is not None:
            seen &= slot > batch.positions[:, None] - layer.sliding_window
        is_right &= jnp.all(~seen | ((domain == first_token[:, None]) & (position == slot)), axis=1)
    factor = jnp.uint32(2654435761) * (2 * slot.astype(jnp.uint32) + 1)
    mix = jnp.sum(jnp.where(seen, (tokens.astype(jnp.uint32) + 1) * factor, 0), axis=1, dtype=jnp.uint32)
    emitted = jnp.where(is_right, 1 + (mix % 95).astype(jnp.int32), 0)
    return jax.nn.one_hot(emitted[batch.logits_indices], VOCAB), cache


# -- POISON and AUDIT ------------------------------------------------------------------------------------------------


def poison(state, value=np.nan):
    """The state with `value` in every slot of K and V that holds no live or cached token, the null block included."""
    table = state.table
    live = np.tile(np.asarray(state.pool.content_uid)[:, None] > 0, (1, table.block_size))
    for group in np.asarray(table.block_ids):
        for ids, length in zip(group, np.asarray(table.seq_lens), strict=True):
            position = np.arange(length)
            live[ids[position // table.block_size], position % table.block_size] = True

    live = live.reshape(-1, state.cache.kernel_block_size)

    def poisoned(array):
        host = np.array(array)
        dead = ~live if host.ndim == 4 else np.broadcast_to(~live[:, None], host.shape)
        # Bits of NaN in every format that has one; numbers of int8 are as bad as they get.
        host[dead] = value if host.dtype.kind == "f" else np.iinfo(host.dtype).max
        return jnp.asarray(host)

    return dataclasses.replace(state, cache=state.cache.with_arrays(list(map(poisoned, state.cache.arrays))))


def with_garbage_tables(forward):
    """The model with every dead table entry pointing at a block of some other row."""

    def garbage(params, batch, cache):
        width = batch.block_tables.shape[-1]
        used = jnp.arange(width, dtype=jnp.int32)[None] * cache.kernel_block_size < batch.seq_lens[:, None]
        others = jnp.roll(batch.block_tables[:, :, :1], 1, axis=1)
        tables = jnp.where(used[None], batch.block_tables, others)
        return forward(params, dataclasses.replace(batch, block_tables=tables), cache)

    return garbage


def audit(state) -> None:
    """Raises unless the block manager is consistent."""
    check_invariants(state.pool, state.table, state.prefix_cache)


class AuditedLLM(LLM):
    """An LLM that is audited after every step, and poisoned before it if `poison_value` is set.

    It has programs for the largest batch only (but see with_several_sizes): each takes seconds to compile.

    Attributes:
        num_steps: dispatches so far.
        before_step: called before each dispatch.
        states: what `watch` returned after each step.
    """

    poison_value: float | None = None
    watch = None
    before_step = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._runner.token_buckets = self._runner.token_buckets[-1:]
        self._runner.row_buckets = self._runner.row_buckets[-1:]
        self.num_steps = 0
        real_step = self.core.step

        def step():
            self.num_steps += 1
            if self.before_step is not None:
                self.before_step()
            if self.poison_value is not None:
                self._runner._state = poison(self._runner._state, self.poison_value)
            changed = real_step()
            audit(self._runner._state)
            if self.watch is not None:
                self.watch(self._runner._state)
            return changed

        self.core.step = step

    @property
    def is_whole(self) -> bool:
        """Whether every block is free again."""
        return int(self._runner._state.pool.num_free) == self.cache_config.num_blocks - 1


class Disturbance:
    """Before every step, with a probability each: preempts a random request by a random kind, aborts one."""

    def __init__(self, llm, seed, preempt=0.5, abort=0.0, modes=("recompute", "swap")):
        self.llm, self.rng, self.aborted = llm, np.random.default_rng(seed), set()
        self.preempt, self.abort, self.modes = preempt, abort, modes

    def __call__(self):
        core, rng = self.llm.core, self.rng
        if core.running and rng.random() < self.preempt:
            core.preempt(core.running[rng.integers(len(core.running))], self.modes[rng.integers(len(self.modes))])
        if core.requests and rng.random() < self.abort:
            name = list(core.requests)[rng.integers(len(core.requests))]
            assert self.llm.abort(name)
            assert not self.llm.abort(name)
            self.aborted.add(name)
        audit(self.llm._runner._state)


def cache_config(num_usable_blocks: int, block_size: int = 4, *, forward=TINY, **sizes) -> CacheConfig:
    """pool(N, B) of the trials, for TINY: N blocks that can really be handed out, for each group."""
    layer_groups, sliding_windows = group_layers(getattr(forward, "config", TINY_CONFIG).layer_windows)
    defaults = {
        "max_num_seqs": 8,
        "max_blocks_per_seq": num_usable_blocks,
        "dtype": "int8" if CACHE == "int8" else "float32",
        "num_layers": TINY_CONFIG.num_layers,
        "num_kv_heads": TINY_CONFIG.num_kv_heads,
        "head_dim": TINY_CONFIG.head_dim,
        "layer_groups": layer_groups,
        "sliding_windows": sliding_windows,
    }
    sizes = defaults | sizes
    return CacheConfig(
        num_blocks=num_usable_blocks * len(sizes["layer_groups"] or (0,)) + 1, block_size=block_size, **sizes
    )


def _split(options: dict) -> tuple[dict, dict]:
    """(those of CacheConfig, those of LLM)."""
    names = ("max_num_seqs", "max_blocks_per_seq", "dtype", "kernel_block_size")
    sizes = {k: v for k, v in options.items() if k in names}
    return sizes, {"max_num_batched_tokens": 32, "decode_steps": 4} | {k: options[k] for k in options.keys() - sizes}


def tiny_llm(num_usable_blocks: int, block_size: int = 4, *, forward=TINY, **options) -> AuditedLLM:
    """TINY in an audited engine; options of CacheConfig or LLM."""
    sizes, options = _split(options)
    config = cache_config(num_usable_blocks, block_size, forward=forward, **sizes)
    return AuditedLLM(forward, tiny_params(), config, **options)


def with_several_sizes(llm: AuditedLLM) -> AuditedLLM:
    """The engine, but with programs for two sizes of a batch."""
    llm._runner.token_buckets, llm._runner.row_buckets = (16, llm.max_num_batched_tokens), (2, 8)
    return llm


def oracle_config(num_usable_blocks: int, block_size: int = 4, *, cache: str = CACHE, **sizes) -> CacheConfig:
    """Like cache_config, for ORACLE, on the cache of TEST_CACHE or another one."""
    windows = (None, WINDOW) if cache == "windows" else (None,)
    layer_groups, sliding_windows = group_layers(windows)
    defaults = {"num_layers": len(windows), "num_kv_heads": 3, "head_dim": 1}
    defaults |= {"layer_groups": layer_groups, "sliding_windows": sliding_windows}
    defaults |= {"dtype": "int8" if cache == "int8" else "float32"}
    return cache_config(num_usable_blocks, block_size, **(defaults | sizes))


def oracle_llm(num_usable_blocks: int, block_size: int = 4, *, cache: str = CACHE, **options) -> AuditedLLM:
    """ORACLE in an audited engine; options of CacheConfig or LLM."""
    sizes, options = _split(options)
    config = oracle_config(num_usable_blocks, block_size, cache=cache, **sizes)
    return AuditedLLM(oracle_forward, {}, config, vocab_size=VOCAB, **options)


def prompt(length: int, first: int = 1) -> list[int]:
    """A prompt of `length` tokens in 1 ... 95, `first` the first of them: its domain."""
    return [first, *(int(t) for t in np.random.default_rng([length, first]).integers(1, 96, length - 1))]


def ids(prompts) -> list[dict]:
    """Token-id prompts in the form that generate() takes."""
    return [{"prompt_token_ids": list(p)} for p in prompts]


def tokens_of(outputs) -> list[list[int]]:
    """The generated tokens of the first continuation of each output."""
    return [o.outputs[0].token_ids for o in outputs]


class ByteTokenizer:
    """Token = byte; special tokens from 256 on decode to nothing when skipped."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if i < 256]
        return bytes(kept).decode(errors="replace")


OK = int(Status.OK)
