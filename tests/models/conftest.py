"""Shared by the model tests: recorded tiny models, and caches and batches built by hand."""

import importlib.util
import json
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from models import load_model
from models.checkpoint import Checkpoint, LoadError, StoredTensor, read_params
from models.config import ModelConfig
from models.llama import FAMILY, LlamaConfig, LlamaForward, RopeScaling
from paged_jax.batch import StepBatch
from paged_jax.config import CacheConfig
from paged_jax.kv_cache import init_cache

DATA = Path(__file__).parents[1] / "data"


def _load_recorder(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DATA / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cache_config(config: ModelConfig, num_blocks: int, block_size: int, dtype: str) -> CacheConfig:
    """The cache of a model, whatever its family."""
    return CacheConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        max_blocks_per_seq=num_blocks,
    )


class Paged:
    """One cache and one block table of shuffled blocks, for batches built by hand."""

    block_size = 4

    def __init__(self, config: ModelConfig, num_rows: int = 1, max_len: int = 16, dtype: Any = jnp.float32) -> None:
        width = -(-max_len // self.block_size)
        blocks = np.random.RandomState(0).permutation(num_rows * width) + 1
        self.table = blocks.reshape(num_rows, width).astype(np.int32)
        name = jnp.dtype(dtype).name
        self.cache = init_cache(cache_config(config, num_rows * width + 1, self.block_size, name))

    def slots(self, row: int, positions: np.ndarray) -> np.ndarray:
        """Slot of each position of a row."""
        return self.table[row, positions // self.block_size] * self.block_size + positions % self.block_size

    def ragged(self, chunks: list[list[int]], starts: list[int], logits_indices: list[int] | None = None) -> StepBatch:
        """Row r stores chunks[r] from position starts[r] on."""
        lengths = [len(chunk) for chunk in chunks]
        ends = np.cumsum([0, *lengths])
        positions = [start + np.arange(n) for start, n in zip(starts, lengths, strict=True)]
        slots = np.concatenate([self.slots(row, p) for row, p in enumerate(positions)])
        wanted = ends[1:] - 1 if logits_indices is None else logits_indices
        return StepBatch(
            token_ids=_int32([token for chunk in chunks for token in chunk]),
            positions=_int32(np.concatenate(positions)),
            seq_lens=_int32(np.add(starts, lengths)),
            query_start_loc=_int32(ends),
            block_tables=_int32(self.table[None]),
            slot_mapping=_int32(slots[None]),
            logits_indices=_int32(wanted),
        )

    def decode(self, tokens: list[int], position: int) -> StepBatch:
        """Every row stores one token at the same position."""
        rows = range(len(tokens))
        slots = [self.slots(row, np.array([position]))[0] for row in rows]
        return StepBatch(
            token_ids=_int32(tokens),
            positions=_int32([position for _ in rows]),
            seq_lens=_int32([position + 1 for _ in rows]),
            query_start_loc=None,
            block_tables=_int32(self.table[None]),
            slot_mapping=_int32([slots]),
            logits_indices=_int32(list(rows)),
        )


def _int32(values: Any) -> Any:
    return jnp.asarray(np.asarray(values, np.int32))


class Tiny:
    """A recorded tiny model: config, weights as stored, expected values."""

    def __init__(self, recorder: ModuleType, recorded: dict[str, Any], variant: str) -> None:
        self.config_json = recorder.tiny_config(variant)
        self.weights: dict[str, np.ndarray] = recorder.tiny_weights(self.config_json)
        self.token_ids: list[int] = recorded["token_ids"]
        self.expected = {name: np.array(rows, np.float32) for name, rows in recorded["variants"][variant].items()}
        self.config = _config(self.config_json)
        self.forward = LlamaForward(self.config)

    def params(self, dtype: Any = jnp.float32) -> Any:
        """The weights as the params of `forward`."""
        tensors = {
            name: StoredTensor(shape=value.shape, dtype="F32", read=lambda value=value: value)
            for name, value in self.weights.items()
        }
        checkpoint = Checkpoint(
            path=Path("memory"),
            family=FAMILY,
            naming="hf",
            config=self.config,
            tensors=tensors,
            tokenizer=None,
            chat_template=None,
            bos_token=None,
            eos_token=None,
        )
        return read_params(checkpoint, dtype)


def _config(c: dict[str, Any]) -> LlamaConfig:
    scaling = c.get("rope_scaling")
    return LlamaConfig(
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        intermediate_size=c["intermediate_size"],
        num_layers=c["num_hidden_layers"],
        num_heads=c["num_attention_heads"],
        num_kv_heads=c["num_key_value_heads"],
        head_dim=c["head_dim"],
        rms_norm_eps=c["rms_norm_eps"],
        rope_theta=c["rope_theta"],
        rope_scaling=scaling
        and RopeScaling(
            factor=scaling["factor"],
            low_freq_factor=scaling["low_freq_factor"],
            high_freq_factor=scaling["high_freq_factor"],
            original_max_position=scaling["original_max_position_embeddings"],
        ),
        tie_word_embeddings=c["tie_word_embeddings"],
        attention_bias=c["attention_bias"],
        mlp_bias=c["mlp_bias"],
        max_position_embeddings=c["max_position_embeddings"],
        eos_token_ids=(c["eos_token_id"],),
        bos_token_id=c["bos_token_id"],
    )


@pytest.fixture(scope="session")
def tiny() -> Any:
    """tiny(variant) -> Tiny."""
    recorder, recorded = _load_recorder("record_llama"), json.loads((DATA / "llama_tiny.json").read_text())
    return lambda variant: Tiny(recorder, recorded, variant)


class TinyFamily:
    """A recorded tiny model of another family: what its folder holds, and what transformers computes."""

    def __init__(self, recorder: ModuleType, recorded: dict[str, Any], variant: str) -> None:
        self.config_json: dict[str, Any] = recorder.tiny_config(variant)
        self.saved_config_json: dict[str, Any] = recorded["variants"][variant]["config"]
        self.weights: dict[str, np.ndarray] = recorder.tiny_weights(self.config_json)
        self.token_ids: list[int] = recorded["token_ids"]
        self.logits = np.array(recorded["variants"][variant]["logits"], np.float32)

    def save(self, folder: Path) -> Path:
        """Writes config.json and model.safetensors."""
        (folder / "config.json").write_text(json.dumps(self.config_json))
        save_file(self.weights, folder / "model.safetensors")
        return folder


@pytest.fixture(scope="session")
def tiny_family() -> Any:
    """tiny_family(variant) -> TinyFamily."""
    recorder, recorded = _load_recorder("record_families"), json.loads((DATA / "families_tiny.json").read_text())
    return lambda variant: TinyFamily(recorder, recorded, variant)


@pytest.fixture(scope="session")
def paged() -> type[Paged]:
    """The class Paged."""
    return Paged


@pytest.fixture(scope="session")
def smollm2_reference() -> dict[str, Any]:
    """The recorded greedy runs of SmolLM2, by the prompt's name."""
    recorded = json.loads((DATA / "smollm2_reference.json").read_text())
    return {prompt["name"]: prompt for prompt in recorded["prompts"]}


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """SmolLM2 in float32, loaded once; skips where the wheel is not installed."""
    from models.load import find_wheel

    try:
        find_wheel("smollm2")
    except ValueError as error:
        pytest.skip(str(error))
    return load_model("smollm2", dtype="float32")


@contextmanager
def _refused(match: str) -> Iterator[None]:
    tracemalloc.start()
    start = time.perf_counter()
    try:
        with pytest.raises(LoadError, match=match):
            yield
        assert time.perf_counter() - start < 10.0  # far above what it takes: the machine may be busy
        assert tracemalloc.get_traced_memory()[1] < 32 * 2**20
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="session")
def refused() -> Any:
    """refused(match): a context that expects a LoadError, soon and without large allocations."""
    return _refused


def _load_error(path: Path) -> str:
    try:
        load_model(path)
    except LoadError as error:
        return str(error)
    return ""


@pytest.fixture(scope="session")
def load_error() -> Any:
    """load_error(path): what load_model says of it, "" if it loads; any other error than a LoadError is raised."""
    return _load_error


@pytest.fixture(scope="session")
def save_tokenizer() -> Any:
    """save_tokenizer(path, num_tokens): tokenizer.json of single characters, the first three tokens special."""
    from tokenizers import AddedToken, Tokenizer, models

    def save(path: Path, num_tokens: int) -> None:
        names = ["<unk>", "<s>", "</s>", *(chr(97 + i) for i in range(num_tokens - 3))]
        tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
        tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in names[:3]])
        tokenizer.save(str(path))

    return save


@pytest.fixture
def folder(tiny: Any, save_tokenizer: Any, tmp_path: Path) -> Path:
    """A complete tiny model in Hugging Face's layout, weights in one file."""
    model = tiny("plain")
    tokenizer_config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ bos_token }}!"}
    files = {
        "config.json": model.config_json,
        "generation_config.json": {"eos_token_id": [2, 7]},
        "tokenizer_config.json": tokenizer_config,
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    save_file(model.weights, tmp_path / "model.safetensors")
    save_tokenizer(tmp_path / "tokenizer.json", 20)
    return tmp_path
