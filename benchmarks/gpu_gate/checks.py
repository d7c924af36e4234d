"""What the gate demands of the facts about a compiled case; pure functions."""

from dataclasses import dataclass, field

from benchmarks.gpu_gate import parse
from benchmarks.gpu_gate.cases import Case, ControlCase, KernelCase, ProgramCase
from benchmarks.gpu_gate.targets import CHIPS
from pallas_kernels.shapes import MODEL_SHAPES

NUM_STEPS = 16
#: Mosaic launches of one call; a ragged one attends its decode rows by paged_decode.
MAX_LAUNCHES = {"paged_decode": 2, "paged_prefill": 3, "write_kv": 1, "copy_blocks": 1}
#: Of a layer of Llama: qkv, out, gate_up, down.
MATMULS_PER_LAYER = 4
#: Two norms, silu * gate, rotated queries, K write, V write, attention, combine. 4 would need the writes, the rotation
#: and the combine inside of the attention kernel.
EXTRA_LAUNCHES_PER_LAYER = 8
MIN_DECODE_CTAS = 2


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a compiled case.

    Attributes:
        sizes: of facts.json: seconds, alias_bytes, temp_bytes, cache_bytes, pool_shapes; for programs also state_bytes,
            layer_bytes and num_layers.
        kernels: the Mosaic kernels of a kernel case.
        thunks: the thunk sequence.
        hlo: the optimised HLO.
    """

    sizes: dict
    kernels: tuple[parse.Kernel, ...]
    thunks: list[parse.Thunk] = field(repr=False)
    hlo: str = field(repr=False)


def ctas_per_sm(kernel: parse.Kernel, chip: str) -> int:
    """CTAs of the kernel that fit one SM of the chip."""
    return CHIPS[chip].ctas_per_sm(registers=kernel.registers, threads=kernel.threads, smem=kernel.smem_bytes)


def rewrites(facts: Facts) -> list[str]:
    """Instructions that move a whole pool."""
    return [line for shape in facts.sizes["pool_shapes"] for line in parse.rewrites(facts.hlo, shape)]


def step_launches(case: Case, facts: Facts) -> list[parse.Thunk]:
    """Launches of one step of a decode loop, of one call elsewhere."""
    is_loop = isinstance(case, ProgramCase) and case.program == "decode_many"
    return parse.launches(parse.loops(facts.thunks)[0].inside("body") if is_loop else facts.thunks)


def failures(case: Case, facts: Facts) -> list[str]:
    """What is wrong with the case, in words; empty = all is well."""
    found = [f for kernel in facts.kernels for f in _kernel_failures(kernel)]
    found += [f"pool-shaped array rewritten: {line}" for line in rewrites(facts)]
    alias = facts.sizes["alias_bytes"]
    if alias < facts.sizes["cache_bytes"]:
        found.append(f"only {alias} of {facts.sizes['cache_bytes']} cache bytes are updated in place (alias bytes)")
    if isinstance(case, KernelCase):
        return found + _call_failures(case, facts)
    if isinstance(case, ProgramCase):
        found += _program_failures(facts)
        # The XLA attention loops up to the longest row: that loop is a node of the graph only with the flag.
        if case.program == "decode_many" and (case.implementation == "mosaic_gpu" or case.flags):
            found += _loop_failures(facts, is_whole=case.flags == "while_node")
        return found
    return found + _control_failures(case, facts)


def _kernel_failures(kernel: parse.Kernel) -> list[str]:
    found = []
    if kernel.spill_bytes:
        found.append(f"{kernel.name} spills {kernel.spill_bytes} bytes of registers ({kernel.registers} registers)")
    found += [f"{kernel.name}: ptxas warns: {warning}" for warning in kernel.warnings]
    if kernel.unfenced_wgmma:
        found.append(
            f"{kernel.name}: {kernel.unfenced_wgmma} wgmma instructions follow stores to shared memory without a "
            "fence.proxy.async (plgpu.commit_smem) in between"
        )
    return found


def _occupancy_failures(facts: Facts, chip: str) -> list[str]:
    return [
        f"{k.name}: {ctas_per_sm(k, chip)} CTAs per SM, {MIN_DECODE_CTAS} are intended "
        f"({k.registers} registers x {k.threads} threads, {k.smem_bytes} bytes of SMEM)"
        for k in facts.kernels
        if ctas_per_sm(k, chip) < MIN_DECODE_CTAS
    ]


def _call_failures(case: KernelCase, facts: Facts) -> list[str]:
    kernel = case.kernel.removesuffix("_int8").removesuffix("_fp8")
    calls = [t for t in parse.walk(facts.thunks) if t.kind == "kCustomCall"]
    found = []
    if not 1 <= len(calls) <= MAX_LAUNCHES[kernel]:
        found.append(f"{len(calls)} Mosaic launches a call, at most {MAX_LAUNCHES[kernel]} are intended")
    shape = MODEL_SHAPES[case.shape]
    if case.chip == "h200" and case.kernel == "paged_decode" and (shape.head_dim, shape.block_size) == (128, 16):
        found += _occupancy_failures(facts, case.chip)
    return found


def _program_failures(facts: Facts) -> list[str]:
    sizes, found = facts.sizes, []
    if sizes["alias_bytes"] > sizes["state_bytes"]:
        found.append(f"{sizes['alias_bytes']} alias bytes, more than the state's {sizes['state_bytes']}")
    if sizes["temp_bytes"] >= sizes["layer_bytes"]:
        found.append(f"{sizes['temp_bytes']} temp bytes, one layer's K/V has {sizes['layer_bytes']}")
    found += [f"talks to the host: {name}" for name in parse.host_transfers(facts.thunks, facts.hlo)]
    return found


def _loop_failures(facts: Facts, *, is_whole: bool) -> list[str]:
    """Of a decode loop: the body one command buffer or, with `is_whole`, all of the program."""
    found = []
    outer = parse.loops(facts.thunks)
    if len(outer) != 1:
        return [f"{len(outer)} loops at the top, the decode loop should be the only one"]
    if NUM_STEPS not in parse.trip_counts(facts.hlo):
        found.append(f"no loop with the static trip count {NUM_STEPS}: the host reads a predicate at each step")
    body = outer[0].inside("body")
    if is_whole:
        if not parse.loop_in_command_buffer(facts.thunks):
            found.append("the loop lies outside the command buffers")
        rest = parse.outside_command_buffers(facts.thunks)
    else:
        rest = parse.outside_command_buffers(body)
        if not parse.is_one_command_buffer(body):
            found.append("the loop's body is not one command buffer")
    found += [f"outside the command buffer: {t.kind} {t.name}" for t in rest[:8]]
    return found


def _control_failures(case: ControlCase, facts: Facts) -> list[str]:
    found = [f"talks to the host: {name}" for name in parse.host_transfers(facts.thunks, facts.hlo)]
    if parse.loops(facts.thunks):
        found += _loop_failures(facts, is_whole=False)
    return found + _occupancy_failures(facts, case.chip)


def depth_failures(deep: list[str], shallow: list[str], num_layers: int) -> tuple[float, list[str]]:
    """Launches per layer, and what is wrong with their number.

    Args:
        deep, shallow: the launches of one step of a deeper and of a shallower model, in order.
        num_layers: the difference in depth.
    """
    per_layer = (len(deep) - len(shallow)) / num_layers
    limit = MATMULS_PER_LAYER + EXTRA_LAUNCHES_PER_LAYER
    if per_layer <= limit:
        return per_layer, []
    # The first layers have work of the whole step between theirs: show a later one.
    first = next((i for i, name in enumerate(deep) if name.startswith("kCustomCall")), 0)
    start = first + 2 * round(per_layer)
    return per_layer, [
        f"{per_layer:g} launches per layer, at most {limit} are intended: {MATMULS_PER_LAYER} matmuls and "
        f"{EXTRA_LAUNCHES_PER_LAYER} others. From the first attention on: "
        + ", ".join(deep[start:][: round(per_layer)])
    ]
