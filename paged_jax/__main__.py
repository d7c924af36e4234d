"""`python -m paged_jax generate --model smollm2 --prompt "..."`: text from the command line."""

import argparse
import json
import sys
import time
from collections.abc import Sequence

from paged_jax import LLM, RequestOutput, SamplingParams


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m paged_jax", description=__doc__)
    generate = parser.add_subparsers(dest="command", required=True).add_parser("generate", help="continue prompts")
    generate.add_argument("--model", required=True, help='Hugging Face directory, GGUF file, or "smollm2"')
    generate.add_argument("--prompt", action="append", required=True, help="repeat for several prompts")
    generate.add_argument("--max-tokens", type=int, default=64)
    generate.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")
    generate.add_argument("--top-p", type=float, default=1.0)
    generate.add_argument("--top-k", type=int, default=0)
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--max-model-len", type=int, default=None)
    generate.add_argument("--max-num-seqs", type=int, default=16)
    generate.add_argument("--block-size", type=int, default=16)
    generate.add_argument("--num-blocks", type=int, default=None)
    generate.add_argument("--json", action="store_true", help="one JSON object per prompt on standard output")
    return parser


def _record(prompt: str, output: RequestOutput) -> dict[str, object]:
    completion = output.outputs[0]
    record: dict[str, object] = {
        "prompt": prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "prompt_token_ids": output.prompt_token_ids,
        "finish_reason": completion.finish_reason,
    }
    return record if output.error is None else record | {"error": str(output.error)}


def _print_readable(prompts: Sequence[str], outputs: Sequence[RequestOutput]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        print(f"\n> {prompt}")
        if output.error is not None:
            print(f"[failed: {output.error}]")
        else:
            print(f"{completion.text}\n[{len(completion.token_ids)} tokens, {completion.finish_reason}]")


def _generate(args: argparse.Namespace) -> int:
    params = SamplingParams(
        temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, max_tokens=args.max_tokens, seed=None
    )
    llm = LLM.from_pretrained(
        args.model,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        block_size=args.block_size,
        num_blocks=args.num_blocks,
        seed=args.seed,
    )
    start = time.perf_counter()
    outputs = llm.generate(args.prompt, params, use_tqdm=not args.json)
    seconds = time.perf_counter() - start
    if args.json:
        for prompt, output in zip(args.prompt, outputs, strict=True):
            print(json.dumps(_record(prompt, output)))
    else:
        _print_readable(args.prompt, outputs)
        num_tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
        print(
            f"\n{num_tokens} tokens in {seconds:.1f} s, compilation included: {num_tokens / seconds:.1f} tokens/s; "
            f"at most {llm.peak_blocks} of {llm.cache_config.num_blocks - 1} blocks in use"
        )
    return int(any(o.error is not None for o in outputs))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, 1 if a prompt failed, 2 if the call is wrong."""
    args = _parser().parse_args(argv)
    try:
        return _generate(args)
    except ValueError as error:
        print(f"paged_jax: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
