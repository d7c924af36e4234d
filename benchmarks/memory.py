"""Counts what paging and sharing save, by replaying requests through the real block manager.

    python benchmarks/memory.py

* Waste: slots that are allocated but hold no token, in % of the allocated ones, over all steps of a full batch; beside
  it, a contiguous reservation of the longest sequence for each row.
* Parallel sampling: n samples share their prompt (fork, then one token a step each). Saved are the blocks that n rows
  of their own would have needed beyond those in use, in % of the former, averaged over all steps.
* Beam search: the same for k beams. Their parents are recorded from searches of SmolLM2 and replayed (reparent).

Lengths are drawn from log-normal distributions with the mean lengths of Alpaca and ShareGPT; no data set is used.
"""

import argparse
import dataclasses
import functools
import pathlib

import _common
import jax
import jax.numpy as jnp
import numpy as np

from models.load import load_model
from paged_jax import BeamSearchParams, CacheConfig, Status
from paged_jax.beam_engine import BeamSearcher
from paged_jax.block_table import append_tokens, fork, init, release, reparent
from paged_jax.inputs import Namespaces
from paged_jax.invariants import check_invariants
from paged_jax.runner import ModelRunner

SIGMA = 0.8  # of the logarithm of the lengths
PROMPTS_PER_BATCH = 4
INSTRUCTIONS = (
    "Write a short story about a lighthouse keeper who finds a message in a bottle on the beach.",
    "Explain in simple words why the sky is blue during the day and red in the evening.",
    "Give me three tips for staying healthy when you work at a desk all day.",
    "What is the difference between a comet and an asteroid?",
    "Translate the following sentence into French: The weather is beautiful and we are going for a walk.",
    "List five books that everybody should read, with one sentence about each of them.",
    "How do I bake a simple loaf of bread at home without a machine?",
    "Describe the life cycle of a butterfly.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """A distribution of lengths and the prompts that stand for it in beam searches.

    Attributes:
        mean_input, mean_output: tokens.
        has_passage: whether prompts are an instruction alone, or with a passage of text.
    """

    name: str
    mean_input: int
    mean_output: int
    has_passage: bool

    def lengths(self, count: int, max_model_len: int, seed: int) -> np.ndarray:
        """Returns [count, 2] lengths of prompts and outputs; each at least 1, together at most max_model_len."""
        rng = np.random.default_rng((seed, self.mean_input, self.mean_output))
        mu = np.log([self.mean_input, self.mean_output]) - SIGMA**2 / 2
        return np.clip(np.rint(rng.lognormal(mu, SIGMA, (count, 2))), 1, max_model_len // 2).astype(np.int32)

    def prompts(self, count: int, tokenizer, seed: int) -> list[list[int]]:
        """Returns prompts as token ids. Passages are parts of the licence; such prompts have 0.5 - 1.5 mean_input."""
        text = tokenizer.encode((_common.ROOT / "LICENSE").read_text()).ids
        rng = np.random.default_rng((seed, self.mean_input))
        prompts = []
        for i in range(count):
            ids = tokenizer.encode(INSTRUCTIONS[i % len(INSTRUCTIONS)]).ids
            if self.has_passage:
                start, extra = rng.integers((len(text) // 2, self.mean_input))
                ids = [*ids, *text[start : start + self.mean_input // 2 + extra - len(ids)]]
            prompts.append(ids)
        return prompts


TRAFFIC = (
    Traffic(name="alpaca_lengths", mean_input=19, mean_output=58, has_passage=False),
    Traffic(name="sharegpt_lengths", mean_input=161, mean_output=338, has_passage=True),
)


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-sizes", nargs="*", type=int, default=[8, 16, 32])
    parser.add_argument("--num-requests", type=int, default=400)
    parser.add_argument("--num-rows", type=int, default=32, help="requests in flight at once when waste is measured")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--num-samples", nargs="*", type=int, default=[2, 4, 6])
    parser.add_argument("--beam-widths", nargs="*", type=int, default=[2, 4, 6])
    parser.add_argument("--beam-prompts", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=pathlib.Path, default=_common.ROOT / "benchmarks/results/memory.json")
    return parser.parse_args()


def manager(num_rows: int, block_size: int, max_model_len: int):
    """An empty block manager that can hold num_rows rows of the longest sequence, without any sharing."""
    width = -(-max_model_len // block_size)
    return init(
        CacheConfig(
            num_blocks=1 + num_rows * width,
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            block_size=block_size,
            max_num_seqs=num_rows,
            max_blocks_per_seq=width,
        )
    )


def num_used(pool) -> jax.Array:
    """Blocks that somebody owns."""
    return pool.num_blocks - 1 - pool.num_free


def check(status, pool, table) -> None:
    """Fails if an operation was refused or the state is inconsistent."""
    if int(status) != Status.OK:
        raise SystemExit(f"an operation was refused: {Status(int(status)).name}")
    check_invariants(pool, table)


# -- waste -----------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, donate_argnums=(0, 1), static_argnums=(4,))
def batch_step(pool, table, new, totals, max_new):
    """Rows whose request has ended (new < 0) are emptied first; then every row stores its new tokens.

    totals int32 [3]: tokens and blocks, summed over steps; the greatest status.
    """
    pool, table, released = release(pool, table, (new < 0) & (table.seq_lens > 0))
    pool, table, appended = append_tokens(pool, table, jnp.abs(new), max_new_tokens=max_new)
    tokens = jnp.sum(table.seq_lens, dtype=jnp.int32)
    status = jnp.maximum(released, appended.status)
    return pool, table, jnp.stack([totals[0] + tokens, totals[1] + num_used(pool), jnp.maximum(totals[2], status)])


def waste(lengths: np.ndarray, block_size: int, num_rows: int, max_model_len: int) -> dict[str, float]:
    """Runs all requests through a batch that is kept full while there are any; steps with idle rows do not count."""
    pool, table = manager(num_rows, block_size, max_model_len)
    left, queue, totals, num_steps = np.zeros(num_rows, int), list(lengths.tolist()), jnp.zeros(3, jnp.int32), 0
    while True:
        new = np.ones(num_rows, np.int32)
        for row in np.flatnonzero(left == 0):
            if not queue:
                check(totals[2], pool, table)
                tokens, blocks = int(totals[0]), int(totals[1])
                reserved = num_steps * num_rows * max_model_len
                return {
                    "paged": 100 * (1 - tokens / (blocks * block_size)),
                    "contiguous": 100 * (1 - tokens / reserved),
                    "steps": num_steps,
                }
            num_prompt_tokens, left[row] = queue.pop(0)
            new[row] = -num_prompt_tokens
        pool, table, totals = batch_step(pool, table, new, totals, max_model_len // 2)
        left -= 1
        num_steps += 1


# -- sharing ---------------------------------------------------------------------------------------------------------


def shared_step(pool, table, new, totals):
    """One step of rows that share blocks. totals int32 [3]: blocks in use, blocks of unshared rows, copied blocks."""
    pool, table, appended = append_tokens(pool, table, new, max_new_tokens=1)
    counts = (num_used(pool), jnp.sum(table.num_blocks), jnp.sum(appended.copy_dst != 0))
    return pool, table, totals + jnp.stack(counts).astype(jnp.int32), appended.status


def first_row(table, count) -> jax.Array:
    """int32 [S]: count for row 0, 0 for the others."""
    return jnp.zeros_like(table.seq_lens).at[0].set(count)


@functools.partial(jax.jit, static_argnums=(2,))
def sample_request(pool, table, max_prompt, num_prompt_tokens, num_steps):
    """One request: its prompt in row 0, which all rows fork, then num_steps tokens for each row."""
    pool, table, stored = append_tokens(pool, table, first_row(table, num_prompt_tokens), max_new_tokens=max_prompt)
    pool, table, forked = fork(pool, table, jnp.zeros_like(table.seq_lens))

    def step(_, carry):
        pool, table, totals, status = carry
        pool, table, totals, appended = shared_step(pool, table, jnp.ones_like(table.seq_lens), totals)
        return pool, table, totals, jnp.maximum(status, appended)

    start = (pool, table, jnp.zeros(3, jnp.int32), jnp.maximum(stored.status, forked))
    return jax.lax.fori_loop(0, num_steps, step, start)


@functools.partial(jax.jit, static_argnums=(2,))
def search_request(pool, table, max_prompt, num_prompt_tokens, parents):
    """One beam search as the engine runs it; parents int32 [n, k]. Blocks are counted from the second step on."""
    pool, table, stored = append_tokens(pool, table, first_row(table, num_prompt_tokens), max_new_tokens=max_prompt)
    pool, table, forked = reparent(pool, table, parents[0])

    def step(carry, parents):
        pool, table, totals, status = carry
        pool, table, totals, appended = shared_step(pool, table, jnp.ones_like(table.seq_lens), totals)
        pool, table, moved = reparent(pool, table, parents)
        return (pool, table, totals, jnp.maximum(status, jnp.maximum(appended, moved))), None

    start = (pool, table, jnp.zeros(3, jnp.int32), jnp.maximum(stored.status, forked))
    return jax.lax.scan(step, start, parents[1:])[0]


def saving(run, requests, num_rows: int, block_size: int, max_model_len: int) -> dict[str, float]:
    """Runs each request alone and returns the blocks saved over all steps in %, and the blocks copied per step."""
    pool, table = manager(num_rows, block_size, max_model_len)
    sums, num_steps = np.zeros(3, np.int64), 0
    for num_prompt_tokens, argument in requests:
        after_pool, after_table, totals, status = run(pool, table, max_model_len // 2, num_prompt_tokens, argument)
        check(status, after_pool, after_table)
        sums += np.asarray(totals)
        num_steps += int(argument) if np.ndim(argument) == 0 else len(argument) - 1
    return {"saved": 100 * (1 - float(sums[0] / sums[1])), "copied_blocks_per_step": float(sums[2] / num_steps)}


def record_beams(traffic: Traffic, model, widths: list[int], num_prompts: int, seed: int) -> dict[int, list]:
    """Searches with SmolLM2 and returns for each width [(prompt tokens, parents [n, k])], n the mean output length."""
    prompts = traffic.prompts(num_prompts, model.tokenizer, seed)
    length = max(map(len, prompts)) + traffic.mean_output
    rows = PROMPTS_PER_BATCH * max(widths)
    config = CacheConfig(
        num_blocks=1 + rows * -(-length // 16),
        num_layers=model.config.num_layers,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        max_blocks_per_seq=-(-length // 16),
        max_num_seqs=rows,
    )
    runner = ModelRunner(
        model.forward,
        model.params,
        config,
        vocab_size=model.config.vocab_size,
        max_num_batched_tokens=256,
        decode_steps=32,
        implementation=None,
        enable_prefix_caching=False,
        logprobs_mode="raw",
    )
    recorded = {}
    for width in widths:
        searcher = BeamSearcher(
            params=BeamSearchParams(beam_width=width, max_tokens=traffic.mean_output, ignore_eos=True),
            runner=runner,
            config=config,
            tokenizer=None,
            eos_token_ids=(),
            max_model_len=config.max_model_len,
            max_num_batched_tokens=256,
            namespaces=Namespaces(),
            watch=lambda output: None,
        )
        recorded[width] = []
        for start in range(0, num_prompts, PROMPTS_PER_BATCH):
            batch = [{"prompt_token_ids": ids} for ids in prompts[start : start + PROMPTS_PER_BATCH]]
            for search in searcher.run(batch):
                if search.error is not None:
                    raise SystemExit(f"a beam search failed: {search.error}")
                recorded[width].append((len(search.prompt_token_ids), np.concatenate(search.parents, axis=1).T))
        print(f"{traffic.name}: recorded {len(recorded[width])} searches of width {width}", flush=True)
    return recorded


# -- report ----------------------------------------------------------------------------------------------------------


def measure(traffic: Traffic, beams: dict[int, list], arguments: argparse.Namespace) -> dict[str, object]:
    """Returns all figures of one distribution of lengths."""
    lengths = traffic.lengths(arguments.num_requests, arguments.max_model_len, arguments.seed)
    samples = [(prompt, output - 1) for prompt, output in lengths.tolist()]
    report = {"mean_input": float(lengths[:, 0].mean()), "mean_output": float(lengths[:, 1].mean())}
    for width, searches in beams.items():
        report[f"beam_width_{width}"] = {
            "searches": len(searches),
            "mean_input": float(np.mean([n for n, _ in searches])),
            "mean_output": float(np.mean([len(parents) for _, parents in searches])),
        }
    report["by_block_size"] = {
        size: {
            "waste_percent": waste(lengths, size, arguments.num_rows, arguments.max_model_len),
            "parallel_sampling": {
                n: saving(sample_request, samples, n, size, arguments.max_model_len) for n in arguments.num_samples
            },
            "beam_search": {
                k: saving(search_request, searches, k, size, arguments.max_model_len) for k, searches in beams.items()
            },
        }
        for size in arguments.block_sizes
    }
    return report


def print_table(name: str, report: dict) -> None:
    """Prints one distribution's figures, a row per block size."""
    print(f"\n{name}: mean lengths {report['mean_input']:.0f} and {report['mean_output']:.0f}")
    by_size = report["by_block_size"]
    first = next(iter(by_size.values()))
    kinds = [(kind, n) for kind in ("parallel_sampling", "beam_search") for n in first[kind]]
    heads = [f"{'n' if kind == 'parallel_sampling' else 'k'} = {n}: saved" for kind, n in kinds]
    print("| block size | waste | waste, contiguous | " + " | ".join(heads) + " |")
    print("|---" * (3 + len(kinds)) + "|")
    for size, figures in by_size.items():
        cells = [figures["waste_percent"]["paged"], figures["waste_percent"]["contiguous"]]
        cells += [figures[kind][n]["saved"] for kind, n in kinds]
        print(f"| {size} | " + " | ".join(f"{cell:.1f} %" for cell in cells) + " |")


def main() -> None:
    """Measures, prints the tables and writes the report."""
    arguments = parse_arguments()
    settings = {k: v for k, v in vars(arguments).items() if k != "output"}
    report = {"environment": _common.environment(), "settings": settings, "sigma": SIGMA, "traffic": {}}
    model = load_model("smollm2", dtype="float32") if arguments.beam_widths else None
    for traffic in TRAFFIC:
        beams = {}
        if model is not None:
            beams = record_beams(traffic, model, arguments.beam_widths, arguments.beam_prompts, arguments.seed)
        report["traffic"][traffic.name] = measure(traffic, beams, arguments)
        print_table(traffic.name, report["traffic"][traffic.name])
    _common.write_report(arguments.output, report)


if __name__ == "__main__":
    main()
