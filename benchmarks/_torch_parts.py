"""The part of kernels.py that runs in PyTorch: its attention, and FlashInfer's paged one, on the same problems.

Times are those of CUDA graphs with several calls each, by events; every call has K and V of its own.
"""

import importlib.util
import statistics

from benchmarks._parts import Part

_BYTES = 150_000_000  # of K/V in the calls of one graph, at least: twice the L2


def torch(*, is_dry: bool, seed: int) -> Part:
    """Nothing where PyTorch is not installed."""
    if importlib.util.find_spec("torch") is None:
        yield "import torch", lambda: {"missing": "PyTorch is not installed"}
        return
    import torch

    device = "cpu" if is_dry else "cuda"
    torch.manual_seed(seed)
    heads, kv_heads, dim = (4, 2, 64) if is_dry else (32, 8, 128)

    def random(*shape: int):
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    def sdpa(rows: int, length: int, num_queries: int, is_causal: bool) -> dict:
        num_bytes = 2 * 2 * rows * length * kv_heads * dim
        copies = 1 if is_dry else max(1, min(36, -(-_BYTES // num_bytes)))
        query = random(rows, heads, num_queries, dim)
        cached = [(random(rows, kv_heads, length, dim), random(rows, kv_heads, length, dim)) for _ in range(copies)]
        options = {"is_causal": is_causal, "enable_gqa": heads != kv_heads}

        def call() -> None:
            for key, value in cached:
                torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)

        visible = num_queries * (2 * length - num_queries + 1) // 2
        about = {"ran": f"torch.nn.functional.scaled_dot_product_attention {torch.__version__}", "bytes": num_bytes}
        return about | {"flop": 4 * rows * heads * dim * visible} | _time(torch, call, copies, is_dry)

    def flashinfer(rows: int, length: int) -> dict:
        if importlib.util.find_spec("flashinfer") is None:
            return {"missing": "FlashInfer is not installed"}
        if is_dry:
            return {"missing": "FlashInfer runs on GPUs only"}
        import flashinfer

        page, pages = 16, length // 16
        pool = random(rows * pages, 2, page, kv_heads, dim)
        index = torch.randperm(rows * pages, device=device, dtype=torch.int32)
        start = torch.arange(rows + 1, device=device, dtype=torch.int32) * pages
        last = torch.full((rows,), page, device=device, dtype=torch.int32)
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(start, index, last, heads, kv_heads, dim, page, data_type=torch.bfloat16)
        query, num_bytes = random(rows, heads, dim), 2 * 2 * rows * length * kv_heads * dim
        about = {"ran": f"flashinfer {flashinfer.__version__}", "bytes": num_bytes}
        return about | _time(torch, lambda: wrapper.run(query, pool), 1, is_dry)

    rows, context = (2, 32) if is_dry else (64, 8192)
    yield "64 x 8192, sdpa dense", lambda: sdpa(rows, context, 1, False)
    yield "1 x 4096, sdpa dense", lambda: sdpa(1, context // 2, 1, False)
    yield "prefill 1 x 8192, sdpa dense", lambda: sdpa(1, context, context, True)
    yield "64 x 8192, flashinfer", lambda: flashinfer(rows, context)


def _time(torch, call, calls: int, is_dry: bool) -> dict:
    """Microseconds per call. call() makes `calls` of them."""
    if is_dry:
        call()
        return {"us": {"median": 0.0, "min": 0.0, "max": 0.0}, "samples": 0}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
    samples, replays = [], 8
    for _ in range(11):
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) * 1e3 / (replays * calls))
    numbers = {"median": statistics.median(samples), "min": min(samples), "max": max(samples)}
    return {"us": numbers, "samples": len(samples), "calls_per_sample": replays * calls}
