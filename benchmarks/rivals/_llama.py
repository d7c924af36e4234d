"""SmolLM2 in a few lines of plain JAX, float32: what the paged and the dense loop share.

Weights are laid out as a careful author of such a loop would: fused QKV and gate-up matrices `[in, out]` used as
`x @ w`, an untied copy `[D, V]` of the head, one leaf per layer and matrix, layers unrolled.
"""

import dataclasses

import gguf
import gguf.quants
import jax
import jax.numpy as jnp
import numpy as np

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN = 30, 9, 3, 64, 576
ROPE_THETA, NORM_EPS = 100000.0, 1e-5
MIN_BUCKET = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer: qkv `[D, (N + 2K) * H]`, out `[N * H, D]`, gate_up `[D, 2F]`, down `[F, D]`, two norms `[D]`."""

    attn_norm: jax.Array
    qkv: jax.Array
    out: jax.Array
    ffn_norm: jax.Array
    gate_up: jax.Array
    down: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Params:
    """The model: embedding `[V, D]`, its transposed copy head `[D, V]`, final norm `[D]`, layers."""

    embedding: jax.Array
    head: jax.Array
    norm: jax.Array
    layers: list[Layer]


def load_params(path: str) -> Params:
    """Reads the GGUF file and dequantises it to float32."""
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}

    def read(name: str) -> np.ndarray:
        tensor = tensors[f"{name}.weight"]
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)

    embedding = read("token_embd")
    return Params(
        embedding=jnp.asarray(embedding),
        head=jnp.asarray(np.ascontiguousarray(embedding.T)),
        norm=jnp.asarray(read("output_norm")),
        layers=[_load_layer(read, f"blk.{i}") for i in range(NUM_LAYERS)],
    )


def _load_layer(read, prefix: str) -> Layer:
    query = _half_split_rows(read(f"{prefix}.attn_q"), NUM_HEADS)
    key = _half_split_rows(read(f"{prefix}.attn_k"), NUM_KV_HEADS)
    qkv = np.concatenate([query, key, read(f"{prefix}.attn_v")])
    gate_up = np.concatenate([read(f"{prefix}.ffn_gate"), read(f"{prefix}.ffn_up")])
    return Layer(
        attn_norm=jnp.asarray(read(f"{prefix}.attn_norm")),
        qkv=jnp.asarray(np.ascontiguousarray(qkv.T)),
        out=jnp.asarray(np.ascontiguousarray(read(f"{prefix}.attn_output").T)),
        ffn_norm=jnp.asarray(read(f"{prefix}.ffn_norm")),
        gate_up=jnp.asarray(np.ascontiguousarray(gate_up.T)),
        down=jnp.asarray(np.ascontiguousarray(read(f"{prefix}.ffn_down").T)),
    )


def _half_split_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes GGUF's row order of Q and K, which is for interleaved rotation; ours rotates halves."""
    return weight.reshape(heads, HEAD_DIM // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Normalises `x [T, D]` by its root mean square."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + NORM_EPS) * weight


def rotation(positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns cos and sin `[T, 1, H/2]` of the rotary angles."""
    inverse = ROPE_THETA ** (-np.arange(0, HEAD_DIM, 2, dtype=np.float32) / HEAD_DIM)
    angles = positions[:, None, None].astype(jnp.float32) * inverse
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the two halves of `x [T, heads, H]`."""
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def apply_layer(layer: Layer, x: jax.Array, cos: jax.Array, sin: jax.Array, attend) -> jax.Array:
    """Applies one layer to `x [T, D]`; `attend(q [T, N, H], k, v [T, K, H])` writes the cache and attends."""
    projected = (rms_norm(x, layer.attn_norm) @ layer.qkv).reshape(len(x), -1, HEAD_DIM)
    query, key, value = jnp.split(projected, [NUM_HEADS, NUM_HEADS + NUM_KV_HEADS], axis=1)
    attended = attend(rotate(query, cos, sin), rotate(key, cos, sin), value)
    x = x + attended.reshape(len(x), -1) @ layer.out
    gate, up = jnp.split(rms_norm(x, layer.ffn_norm) @ layer.gate_up, 2, axis=-1)
    return x + (jax.nn.silu(gate) * up) @ layer.down


def next_tokens(params: Params, x: jax.Array) -> jax.Array:
    """Greedy tokens `[T]` from the last hidden states `[T, D]`."""
    return jnp.argmax(rms_norm(x, params.norm) @ params.head, axis=-1).astype(jnp.int32)


def attend_masked(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array) -> jax.Array:
    """Grouped-query attention of `[S, Q, N, H]` over `[S, C, K, H]` where `mask [S, Q, C]`."""
    rows, num_queries = query.shape[:2]
    grouped = query.reshape(rows, num_queries, NUM_KV_HEADS, -1, HEAD_DIM)
    scores = jnp.einsum("sqkgh,sckh->skgqc", grouped, key) * HEAD_DIM**-0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -1e30), axis=-1)
    return jnp.einsum("skgqc,sckh->sqkgh", weights, value).reshape(query.shape)


def prefill(params: Params, token_ids: jax.Array, length: jax.Array) -> tuple[jax.Array, list]:
    """Runs one padded prompt `[P]`; returns its first new token and each layer's (k, v) `[P, K, H]`."""
    positions = jnp.arange(len(token_ids))
    causal = (positions[:, None] >= positions[None])[None]
    cos, sin = rotation(positions)
    stored = []

    def attend(query, key, value):
        stored.append((key, value))
        return attend_masked(query[None], key[None], value[None], causal)[0]

    x = params.embedding[token_ids]
    for layer in params.layers:
        x = apply_layer(layer, x, cos, sin, attend)
    return next_tokens(params, jax.lax.dynamic_slice_in_dim(x, length - 1, 1))[0], stored


def bucket(length: int) -> int:
    """Returns the power of two that holds `length`: few shapes, few compiles."""
    return max(MIN_BUCKET, 1 << (length - 1).bit_length())


def padded(prompt: list[int]) -> np.ndarray:
    """Returns the prompt as int32, padded with zeros to its bucket."""
    row = np.zeros(bucket(len(prompt)), np.int32)
    row[: len(prompt)] = prompt
    return row
