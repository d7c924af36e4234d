"""Workers: one process per variant, kept alive, told over its standard input to run a batch once.

One request per line, one answer per line, both JSON. Weights load and shapes compile once; only one worker computes
at a time, so that variants can be interleaved round-robin on one machine.

    -> {"prompts": [[int, ...], ...], "max_new_tokens": int, or [int, ...] one for each prompt}
    <- {"seconds": float, "tokens": [[int, ...], ...]}

The first line a worker writes is {"versions": {...}, "settings": {...}}. An empty line ends it. No dependency beyond
Python: workers run in environments of their own.
"""

import collections.abc
import json
import os
import pathlib
import subprocess
import sys
import time

Generate = collections.abc.Callable[[list[list[int]], int | list[int]], list[list[int]]]
RIVALS = pathlib.Path(__file__).resolve().parent / "rivals"


def claim_stdout() -> collections.abc.Callable[[dict[str, object]], None]:
    """Keeps stdout for answers and sends what libraries print there to stderr. Returns the function that answers."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return lambda answer: print(json.dumps(answer), file=answers, flush=True)


def serve(load: collections.abc.Callable[[], tuple[Generate, dict[str, str], dict[str, object]]]) -> None:
    """Runs a worker: `load` returns (generate, versions, settings); answers requests until an empty line or EOF."""
    answer = claim_stdout()
    generate, versions, settings = load()
    answer({"versions": versions, "settings": settings})
    for line in sys.stdin:
        if not line.strip():
            break
        request = json.loads(line)
        start = time.perf_counter()
        tokens = generate(request["prompts"], request["max_new_tokens"])
        answer({"seconds": time.perf_counter() - start, "tokens": tokens})


class Worker:
    """The driver's end of one worker process."""

    def __init__(self, name: str, python: str, script: str, arguments: list[str]):
        """Starts `rivals/<script>` and waits until its weights are loaded."""
        self.name = name
        path = os.pathsep.join(str(folder) for folder in (RIVALS.parent, RIVALS, RIVALS.parent.parent))
        quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "JAX_PLATFORMS": "cpu"}
        self.process = subprocess.Popen(
            [python, str(RIVALS / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **quiet, "PYTHONPATH": path},
        )
        self.about = self._read()

    def run(self, prompts: list[list[int]], max_new_tokens: int | list[int]) -> tuple[float, list[list[int]]]:
        """Runs one batch; returns its wall time in seconds, as the worker measured it, and the new tokens."""
        self.process.stdin.write(json.dumps({"prompts": prompts, "max_new_tokens": max_new_tokens}) + "\n")
        self.process.stdin.flush()
        answer = self._read()
        lengths = [len(row) for row in answer["tokens"]]
        expected = max_new_tokens if isinstance(max_new_tokens, list) else [max_new_tokens] * len(prompts)
        if lengths != expected:
            raise RuntimeError(f"{self.name} returned rows of {lengths} tokens instead of {expected}")
        return answer["seconds"], answer["tokens"]

    def close(self) -> None:
        """Ends the worker."""
        if self.process.poll() is None:
            self.process.stdin.write("\n")
            self.process.stdin.close()
            self.process.wait(timeout=60)

    def _read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"worker {self.name} ended with exit status {self.process.wait()}; see its messages above"
            )
        return json.loads(line)
