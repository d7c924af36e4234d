"""Attention over a paged KV cache: arrays in, arrays out; imports nothing of paged_jax."""
