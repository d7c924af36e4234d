"""Records beams.json: what transformers' beam search finds where the next token depends on the last one alone.

Run once, by hand, in an environment with torch and transformers: python tests/data/record_beams.py
The logits are not stored: `logits_table` makes them again from the legacy NumPy generator, whose stream is frozen.
"""

import itertools
import json
from pathlib import Path

import numpy as np

VOCAB, PROMPT, MAX_TOKENS = 40, [5, 17], 12
WIDTHS, LENGTH_PENALTIES, EOS_TOKEN_IDS = (2, 3, 5, 8), (1.0, 0.0, 2.0, -1.0), ((), (3,), (3, 9))
SEEDS = (0, 1)


def logits_table(seed: int) -> np.ndarray:
    """float32 [V, V]: logits after each token; the end-of-sequence tokens are likely."""
    table = 2 * np.random.RandomState(seed).standard_normal((VOCAB, VOCAB))
    table[:, list(EOS_TOKEN_IDS[-1])] += 2
    return table.astype(np.float32)


def record() -> list[dict]:
    """One search per combination."""
    import torch
    from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutput

    class Table(PreTrainedModel, GenerationMixin):
        config_class = PretrainedConfig
        main_input_name = "input_ids"
        _supports_cache_class = False

        def __init__(self, config, table):
            super().__init__(config)
            self.table = torch.nn.Parameter(torch.from_numpy(table), requires_grad=False)

        def forward(self, input_ids, **kwargs):
            return CausalLMOutput(logits=self.table[input_ids])

        def prepare_inputs_for_generation(self, input_ids, **kwargs):
            return {"input_ids": input_ids}

    cases = []
    for seed, width, penalty, eos in itertools.product(SEEDS, WIDTHS, LENGTH_PENALTIES, EOS_TOKEN_IDS):
        config = PretrainedConfig(vocab_size=VOCAB, is_encoder_decoder=False, pad_token_id=0, eos_token_id=None)
        found = Table(config, logits_table(seed)).generate(
            torch.tensor([PROMPT]),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            length_penalty=penalty,
            early_stopping=False,
            eos_token_id=list(eos) or None,
            pad_token_id=0,
            use_cache=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        sequences = []
        for tokens in found.sequences[:, len(PROMPT) :].tolist():
            ends = [i + 1 for i, token in enumerate(tokens) if token in eos]
            sequences.append(tokens[: ends[0]] if ends else tokens)
        scores = [float(f"{score:.6g}") for score in found.sequences_scores.tolist()]
        cases.append({"seed": seed, "length_penalty": penalty, "eos": eos, "sequences": sequences, "scores": scores})
    return cases


def main() -> None:
    """Writes the recording beside this script."""
    import torch
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
    recorded = {"versions": versions, "cases": record()}
    Path(__file__).with_name("beams.json").write_text(json.dumps(recorded, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
