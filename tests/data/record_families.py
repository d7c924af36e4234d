"""Records families_tiny.json: logits of transformers for tiny random models of each family, prompts beyond the window.

Run once, by hand, in an environment with torch and transformers: python tests/data/record_families.py
The weights are not stored: `tiny_weights` makes them again from the legacy NumPy generator, whose stream is frozen.
"""

import json
import math
from pathlib import Path

import numpy as np

WINDOW = 8
TOKEN_IDS = [3, 17, 5, 5, 39, 0, 22, 8, 31, 11, 4, 4, 28, 9, 36, 13, 2, 25, 7, 19, 30, 6, 38, 12, 21, 33, 16, 1]
BASE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA3 = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 5,
    "num_key_value_heads": 1,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 24,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 3,
    "rope_theta": 1e6,
    "rope_local_base_freq": 100.0,
}
QWEN2_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
VARIANTS = {
    "mistral": {"model_type": "mistral", "hidden_act": "silu", "sliding_window": WINDOW},
    "qwen2": {"model_type": "qwen2", "hidden_act": "silu", "use_sliding_window": False},
    "qwen2_window": {"model_type": "qwen2", "hidden_act": "silu", "tie_word_embeddings": True, **QWEN2_WINDOW},
    "qwen3": {"model_type": "qwen3", "hidden_act": "silu", "tie_word_embeddings": True, "attention_bias": False},
    "qwen3_biased": {"model_type": "qwen3", "hidden_act": "silu", "attention_bias": True},
    "gemma3": GEMMA3,
    "gemma3_scaled": {**GEMMA3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
}


def tiny_config(variant: str) -> dict:
    """config.json of a variant, in the fields of the published models."""
    return {**BASE, **VARIANTS[variant]}


def tiny_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights as Hugging Face stores them."""
    family = config["model_type"]
    d, f, h = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    n, k = config["num_attention_heads"] * h, config["num_key_value_heads"] * h
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], d)
    matrices = {f"self_attn.{p}_proj": s for p, s in (("q", (n, d)), ("k", (k, d)), ("v", (k, d)), ("o", (d, n)))}
    matrices |= {"mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f)}
    biased = {"qwen2": "qkv", "qwen3": "qkvo" if config.get("attention_bias") else ""}.get(family, "")
    vectors = {"input_layernorm": d, "post_attention_layernorm": d}
    if family == "gemma3_text":
        vectors |= {"pre_feedforward_layernorm": d, "post_feedforward_layernorm": d}
    if family in ("gemma3_text", "qwen3"):
        vectors |= {"self_attn.q_norm": h, "self_attn.k_norm": h}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"{prefix}{name}.weight": (size,) for name, size in vectors.items()}
        shapes |= {f"{prefix}self_attn.{p}_proj.bias": matrices[f"self_attn.{p}_proj"][:1] for p in biased}
    return shapes


def tiny_weights(config: dict) -> dict[str, np.ndarray]:
    """Random weights by name; norms near 1 (Gemma's, which multiply by 1 + weight, near 0.5)."""
    random = np.random.RandomState(7)
    center = 0.5 if config["model_type"] == "gemma3_text" else 1.0
    weights = {}
    for name, shape in sorted(tiny_shapes(config).items()):
        values = random.standard_normal(shape)
        scale = 0.3 if len(shape) == 1 else 1 / math.sqrt(shape[1])
        weights[name] = (values * scale + (center if "norm" in name else 0.0)).astype(np.float32)
    return weights


def record(variant: str) -> dict:
    """Logits of every token of the prompt, and config.json as transformers 5 writes it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = tiny_config(variant)
    fields = {name: value for name, value in config.items() if name != "model_type"}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config["model_type"], **fields), attn_implementation="eager"
    ).eval()
    state = {name: torch.from_numpy(value) for name, value in tiny_weights(config).items()}
    if config["tie_word_embeddings"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    with torch.no_grad():
        logits = model(torch.tensor([TOKEN_IDS])).logits[0].numpy()
    saved = {name: value for name, value in model.config.to_diff_dict().items() if name != "transformers_version"}
    return {"config": saved, "logits": [[float(f"{x:.7g}") for x in row] for row in logits]}


def main() -> None:
    """Writes the recording beside this script."""
    import torch
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
    recorded = {"versions": versions, "token_ids": TOKEN_IDS, "variants": {name: record(name) for name in VARIANTS}}
    path = Path(__file__).with_name("families_tiny.json")
    path.write_text(json.dumps(recorded, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
