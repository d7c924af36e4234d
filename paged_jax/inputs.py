"""From what the user gives to a Request: tokenising, limits, seeds. Every check of a prompt is here."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from paged_jax.config import CacheConfig
from paged_jax.sampling_params import BeamSearchParams, SamplingParams
from paged_jax.scheduler import Request

#: A text, {"prompt": text}, or {"prompt_token_ids": [int, ...]}; the dicts may have a "cache_salt".
Prompt = str | dict[str, Any]

#: Stop tokens per request, end-of-sequence tokens included: the static width of an array on the device.
MAX_STOP_TOKEN_IDS = 16
#: Characters of a cache_salt.
MAX_CACHE_SALT = 1024
#: Namespaces that are remembered; the least recently used one is forgotten first, and its cached blocks with it.
MAX_NAMESPACES = 1 << 16


def tokenize(prompt: Prompt, tokenizer: Any, vocab_size: int) -> tuple[str | None, tuple[int, ...]]:
    """The prompt's text, if it has one, and its token ids.

    Raises:
        ValueError: no tokenizer for a text, no token at all, or an id that is no integer or not in the vocabulary.
        TypeError: the prompt is neither text nor a dict with "prompt_token_ids".
    """
    if isinstance(prompt, str):
        text, token_ids = prompt, _encode(prompt, tokenizer)
    elif isinstance(prompt, dict) and "prompt_token_ids" in prompt:
        text, token_ids = prompt.get("prompt"), prompt["prompt_token_ids"]
    elif isinstance(prompt, dict) and isinstance(prompt.get("prompt"), str):
        return tokenize(prompt["prompt"], tokenizer, vocab_size)
    else:
        got = f"a dict with {sorted(map(str, prompt))}" if isinstance(prompt, dict) else type(prompt).__name__
        raise TypeError(f'a prompt is a str or a dict with "prompt_token_ids" or "prompt", got {got}')
    ids = np.asarray(token_ids)
    if ids.size == 0:
        raise ValueError("the prompt is empty: it must have at least one token")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"prompt_token_ids must be a flat list of integers, got {ids.dtype}{list(ids.shape)}")
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise ValueError(f"prompt token id {wrong} is outside the vocabulary 0 ... {vocab_size - 1}")
    return text, tuple(ids.tolist())


def _encode(text: str, tokenizer: Any) -> Sequence[int]:
    if tokenizer is None:
        raise ValueError('a text prompt needs a tokenizer; give LLM(tokenizer=...) or {"prompt_token_ids": [...]}')
    try:
        encoded = tokenizer.encode(text)
    except Exception as error:  # foreign code: its failure must not touch other requests
        raise ValueError(f"the tokenizer cannot encode the prompt: {error!r}") from error
    return getattr(encoded, "ids", encoded)


def encode_chat(text: str, tokenizer: Any) -> Prompt | ValueError:
    """The prompt of a rendered conversation, which has its special tokens already; or why there is none.

    Raises:
        ValueError: there is no tokenizer.
    """
    if tokenizer is None:
        raise ValueError("chat() needs a tokenizer; give LLM(tokenizer=...)")
    try:
        encoded = tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # foreign code: its failure must not touch other requests
        return ValueError(f"the tokenizer cannot encode the conversation: {error!r}")
    return {"prompt": text, "prompt_token_ids": getattr(encoded, "ids", encoded)}


def check_stop_strings(params: SamplingParams, tokenizer: Any) -> None:
    """Raises ValueError if there are stop strings and no text to find them in."""
    if params.stop and tokenizer is None:
        raise ValueError("stop strings are looked for in the text: give LLM(tokenizer=...), or stop_token_ids instead")


def cache_salt_of(prompt: Prompt) -> str | None:
    """The prompt's cache_salt: only requests with the same one share cached blocks. None: there is none.

    Raises:
        TypeError: it is no str. ValueError: it is empty, or longer than MAX_CACHE_SALT characters.
    """
    salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
    if salt is None:
        return None
    if not isinstance(salt, str):
        raise TypeError(f"cache_salt must be a str, got {type(salt).__name__}")
    if not 1 <= len(salt) <= MAX_CACHE_SALT:
        raise ValueError(f"cache_salt must have 1 ... {MAX_CACHE_SALT} characters, got {len(salt)}; hash a longer one")
    return salt


class Namespaces:
    """Numbers for requests that must not share cached blocks; no number is ever given twice."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[str | None, int] = OrderedDict()
        self._next = 0

    def number_of(self, cache_salt: str | None) -> int:
        """The namespace of requests with this salt and the present weights."""
        if cache_salt not in self._numbers:
            self._numbers[cache_salt] = self._next
            self._next += 1
            if len(self._numbers) > MAX_NAMESPACES:
                self._numbers.popitem(last=False)
        self._numbers.move_to_end(cache_salt)
        return self._numbers[cache_salt]

    def forget(self) -> None:
        """The weights have changed: nothing that was cached may be found again."""
        self._numbers.clear()


def stop_token_ids(params: SamplingParams, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """All tokens that end the request.

    Raises:
        ValueError: more than MAX_STOP_TOKEN_IDS.
    """
    stop = tuple(dict.fromkeys((*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids))))
    if len(stop) > MAX_STOP_TOKEN_IDS:
        raise ValueError(
            f"stop_token_ids: {len(stop)} stop tokens, the end-of-sequence tokens included; the limit is "
            f"{MAX_STOP_TOKEN_IDS}"
        )
    return stop


def max_new_tokens(params: SamplingParams | BeamSearchParams, num_prompt_tokens: int, max_model_len: int) -> int:
    """Tokens that the request may generate: max_tokens, or less where the model's length ends before.

    Raises:
        ValueError: the prompt leaves no room for a token.
    """
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise ValueError(
            f"the prompt has {num_prompt_tokens} tokens, and max_model_len={max_model_len} leaves no room to generate; "
            "shorten the prompt or raise max_model_len"
        )
    return room if params.max_tokens is None else min(params.max_tokens, room)


def check_can_ever_fit(request: Request, config: CacheConfig, max_num_batched_tokens: int) -> None:
    """Raises ValueError, with the need and the capacity, if the idle engine could not hold the request."""
    num_samples, num_rows = request.params.n, config.max_num_seqs
    if num_samples > num_rows:
        raise ValueError(f"n={num_samples} samples need as many rows, max_num_seqs={num_rows}; lower n or raise it")
    need = request.num_blocks_needed(config, max_num_batched_tokens)
    capacity = config.num_blocks - 1 - request.reserve
    if need > capacity:
        held_back = f" beside the {request.reserve} blocks reserved for priorities below 0" if request.reserve else ""
        longest = config.longest_sequence(max_num_batched_tokens, capacity)
        raise ValueError(
            f"the request needs {need} blocks of {config.block_size} tokens (a prompt of "
            f"{len(request.prompt_token_ids)} tokens, n={num_samples}, max_tokens={request.max_tokens}), but the pool "
            f"has only {capacity}, one sequence of {longest} tokens{held_back}; raise num_blocks, or lower max_tokens, "
            "n or the prompt's length"
        )


def check_priority(priority: object) -> int:
    """Raises ValueError unless priority is an integer of 32 bits."""
    if isinstance(priority, bool) or not isinstance(priority, int | np.integer) or not -(2**31) <= priority < 2**31:
        raise ValueError(f"priority must be an integer in [-2**31, 2**31), got {priority!r}")
    return int(priority)


def check_seed(seed: object) -> int:
    """Raises ValueError unless seed is an integer in [0, 2**64)."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**64:
        raise ValueError(f"seed must be an integer in [0, 2**64), got {seed!r}")
    return int(seed)


def check_eos_token_ids(ids: Iterable[int] | int | None) -> tuple[int, ...]:
    """A tuple of ids from what model configurations hold: one id, several, or None.

    Raises:
        ValueError: an id that is no non-negative int32, or more than MAX_STOP_TOKEN_IDS.
    """
    listed = () if ids is None else (ids,) if isinstance(ids, int | np.integer) else tuple(ids)
    wrong = [i for i in listed if isinstance(i, bool) or not isinstance(i, int | np.integer) or not 0 <= i < 2**31]
    if wrong or len(listed) > MAX_STOP_TOKEN_IDS:
        raise ValueError(f"eos_token_ids must be at most {MAX_STOP_TOKEN_IDS} ids in [0, 2**31), got {ids!r}")
    return tuple(int(i) for i in listed)


def derived_seed(seed: int, number: int) -> int:
    """The seed of request `number` of an engine with `seed`, for requests that bring none: all draw differently."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0])


def sample_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of a request with `seed`; the first sample draws like the request with n = 1."""
    if index == 0:
        return seed
    # Longer than what derived_seed hashes: a sample and a request never share a seed by construction.
    return int(np.random.SeedSequence([seed, index, 1]).generate_state(1, np.uint64)[0])
