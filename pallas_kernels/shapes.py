"""Named problem shapes, shared by tests and benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The sizes of one attention layer, and how it masks.

    Attributes:
        num_heads, num_kv_heads, head_dim: N, K and H.
        block_size: tokens per block.
        sliding_window: tokens that a query sees, itself included; None = all.
        logits_soft_cap: cap on the scores; None = none.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    sliding_window: int | None = None
    logits_soft_cap: float | None = None


# For tests: one shape for each thing that has gone wrong somewhere (groups, head sizes, block sizes).
TINY_SHAPES = {
    "mha_h8_bs1": AttentionShape(num_heads=2, num_kv_heads=2, head_dim=8, block_size=1),
    "gqa3_h64_bs16": AttentionShape(num_heads=9, num_kv_heads=3, head_dim=64),
    "gqa4_h24_bs4": AttentionShape(num_heads=4, num_kv_heads=1, head_dim=24, block_size=4),
    "gqa3_h80_bs64": AttentionShape(num_heads=6, num_kv_heads=2, head_dim=80, block_size=64),
    "many_kv_heads_h8_bs4": AttentionShape(num_heads=18, num_kv_heads=9, head_dim=8, block_size=4),
    "h128_bs16": AttentionShape(num_heads=2, num_kv_heads=1, head_dim=128),
    "odd_13x46": AttentionShape(num_heads=13, num_kv_heads=13, head_dim=46, block_size=4),
}

# For the kernel suite: each head size, group and kind of block size that the Mosaic kernels take.
KERNEL_SHAPES = {
    "g3_h64": AttentionShape(num_heads=6, num_kv_heads=2, head_dim=64),
    "g4_h128": AttentionShape(num_heads=4, num_kv_heads=1, head_dim=128),
    "g1_h80_bs64": AttentionShape(num_heads=2, num_kv_heads=2, head_dim=80, block_size=64),
    "g5_h96_bs24": AttentionShape(num_heads=5, num_kv_heads=1, head_dim=96, block_size=24),
    "g8_h256_bs8": AttentionShape(num_heads=8, num_kv_heads=1, head_dim=256, block_size=8),
    "g16_h128_bs128": AttentionShape(num_heads=16, num_kv_heads=1, head_dim=128, block_size=128),
    "g7_h64_bs32": AttentionShape(num_heads=7, num_kv_heads=1, head_dim=64, block_size=32),
}

# For benchmarks: attention layers of published models.
MODEL_SHAPES = {
    "smollm2_135m": AttentionShape(num_heads=9, num_kv_heads=3, head_dim=64),
    "llama3_8b": AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128),
    "qwen2_5_0_5b": AttentionShape(num_heads=14, num_kv_heads=2, head_dim=64),
    "gemma2_2b_local": AttentionShape(
        num_heads=8, num_kv_heads=4, head_dim=256, sliding_window=4096, logits_soft_cap=50.0
    ),
    "gemma3_1b_local": AttentionShape(num_heads=4, num_kv_heads=1, head_dim=256, sliding_window=512),
    "gemma3_1b_global": AttentionShape(num_heads=4, num_kv_heads=1, head_dim=256),
}
