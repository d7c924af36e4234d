"""Records llama_tiny.json: what transformers computes for tiny random Llama models, layer by layer.

Run once, by hand, in an environment with torch and transformers: python tests/data/record_llama.py
The weights are not stored: `tiny_weights` makes them again from the legacy NumPy generator, whose stream is frozen.
"""

import json
import math
from pathlib import Path

import numpy as np

TOKEN_IDS = [3, 17, 5, 5, 39, 0, 22, 8, 31, 11]
BASE = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Original context 64, frequencies 1, 0.1, 0.01, 0.001: 10 turns are kept, 1.02 turns blended, the rest slowed down.
ROPE_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 0.5,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "plain": {},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "scaled_rope": {"rope_scaling": ROPE_SCALING},
}


def tiny_config(variant: str) -> dict:
    """config.json of a variant."""
    return {**BASE, **VARIANTS[variant]}


def tiny_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights as Hugging Face stores them."""
    d, f, h = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    n, k = config["num_attention_heads"] * h, config["num_key_value_heads"] * h
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], d)
    attention = {"q_proj": (n, d), "k_proj": (k, d), "v_proj": (k, d), "o_proj": (d, n)}
    mlp = {"gate_proj": (f, d), "up_proj": (f, d), "down_proj": (d, f)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{norm}_layernorm.weight": (d,) for norm in ("input", "post_attention")}
        for block, parts, bias in (("self_attn", attention, "attention_bias"), ("mlp", mlp, "mlp_bias")):
            shapes |= {f"{prefix}{block}.{part}.weight": shape for part, shape in parts.items()}
            if config[bias]:
                shapes |= {f"{prefix}{block}.{part}.bias": shape[:1] for part, shape in parts.items()}
    return shapes


def tiny_weights(config: dict) -> dict[str, np.ndarray]:
    """Random weights by name; norms near 1, so that a forgotten norm weight shows."""
    random = np.random.RandomState(7)
    weights = {}
    for name, shape in sorted(tiny_shapes(config).items()):
        values = random.standard_normal(shape)
        scale = 0.3 if len(shape) == 1 else 1 / math.sqrt(shape[1])
        weights[name] = (values * scale + (1.0 if "norm" in name else 0.0)).astype(np.float32)
    return weights


def record(variant: str) -> dict:
    """Outputs of one variant: hidden states after each sublayer of layer 0, after each layer, and the logits."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama import modeling_llama

    config = tiny_config(variant)
    model = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="eager")).eval()
    state = {name: torch.from_numpy(value) for name, value in tiny_weights(config).items()}
    if config["tie_word_embeddings"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    seen = {}

    def keep(name):
        def hook(module, args, kwargs, output):
            seen[name + ".in"] = args[0] if args else kwargs["hidden_states"]
            seen[name] = output[0] if isinstance(output, tuple) else output

        return hook

    layers = model.model.layers
    named = {"norm": layers[0].input_layernorm, "attention": layers[0].self_attn, "mlp": layers[0].mlp}
    named |= {f"layer{i}": layer for i, layer in enumerate(layers)}
    for name, module in named.items():
        module.register_forward_hook(keep(name), with_kwargs=True)
    with torch.no_grad():
        seen["logits"] = model(torch.tensor([TOKEN_IDS])).logits
        heads = torch.from_numpy(np.random.RandomState(8).standard_normal((1, 4, 10, 8)).astype(np.float32))
        cos, sin = model.model.rotary_emb(heads, torch.arange(10)[None] * 5)
        seen["rotate.in"] = heads.transpose(1, 2)
        seen["rotate"] = modeling_llama.apply_rotary_pos_emb(heads, heads, cos, sin)[0].transpose(1, 2)
    wanted = ["rotate.in", "rotate", "logits"]
    if variant == "biased":
        wanted += ["norm.in", "norm", "attention.in", "attention", "mlp.in", "mlp", "layer0", "layer1"]
    return {name: [[float(f"{x:.8g}") for x in row.ravel()] for row in seen[name].numpy()[0]] for name in wanted}


def main() -> None:
    """Writes the recording beside this script."""
    import torch
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
    recorded = {"versions": versions, "token_ids": TOKEN_IDS, "variants": {name: record(name) for name in VARIANTS}}
    path = Path(__file__).with_name("llama_tiny.json")
    path.write_text(json.dumps(recorded, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
