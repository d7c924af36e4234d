"""The readers and checks of the GPU gate, on what the compilers really wrote; the gate itself is `make gpu-gate`."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from benchmarks.gpu_gate import checks, parse
from benchmarks.gpu_gate.__main__ import verdict
from benchmarks.gpu_gate.cases import (
    CONTROLS,
    ControlCase,
    KernelCase,
    ProgramCase,
    all_cases,
    bounded_cases,
    case_named,
)
from benchmarks.gpu_gate.targets import CHIPS
from paged_jax.sampling import init_sampling_state, sample

# Dumps of JAX 0.12 for an H200, shortened. XLA prints "condition:" at the margin whatever its depth.
LOOP = """\
000: kCommandBuffer [source       | next=011 (1)]
    001: kCustomKernel [source       | next=002 (1)] input_reduce_fusion grid: [1, 1, 1] threads: [32, 1, 1]
    002: kCopy         [prev=001 (1) | sink        ] kCopy
011: kWhile         [prev=000 (1) | next=352 (1)]
condition:
    012: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    000: kCommandBuffer [source | sink]
        013: kCustomKernel [source        | next=014 (1)] input_scatter_fusion grid: [1, 1, 1] threads: [32, 1, 1]
        351: kConditional  [prev=013 (1)  | next=352 (1)]
          false_branch:
            034: kCublasLtMatmul [prev=033 (1)  | next=040 (1) ] kCublasLtMatmul
            040: kConditional  [prev=034 (1)  | next=041 (1) ]
              false_branch:
                035: kCustomKernel [source       | sink        ] loop_gather_fusion grid: [2, 1, 1] threads: [128, 1, 1]
              true_branch:
                No thunks.
            045: kCustomCall   [prev=040 (1)  | next=046 (1) ] kCustomCall
          true_branch:
            348: kCopy [source | sink] kCopy
        352: kCustomKernel [prev=351 (1)  | sink        ] loop_add_fusion_11 grid: [1, 1, 1] threads: [1, 1, 1]
353: kCopy          [prev=011 (1) | sink        ] kCopy
"""

# The whole loop is a node of the graph.
WHILE_NODE = """\
000: kCommandBuffer [source | sink]
    001: kCopy         [source       | next=010 (1)] kCopy
    010: kWhile        [prev=009 (1) | next=350 (1)]
condition:
        011: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]
      body:
        012: kCustomCall   [source        | sink         ] kCustomCall
    350: kCopy         [prev=010 (1) | sink        ] kCopy
"""

# A loop inside the step keeps the conditional out of the command buffer.
BROKEN = """\
010: kWhile         [source       | sink        ]
condition:
    011: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    000: kCommandBuffer [source       | next=348 (1)]
        012: kCopy         [source        | sink         ] kCopy
    348: kConditional   [prev=000 (1) | next=349 (1)]
      false_branch:
        000: kCommandBuffer [source       | next=054 (1)]
            030: kCustomKernel [source       | sink        ] gemm_fusion_dot grid: [1, 1, 2] threads: [32, 1, 1]
        054: kWhile         [prev=000 (1) | sink        ]
condition:
            055: kCustomKernel [source | sink] wrapped_compare grid: [1, 1, 1] threads: [1, 1, 1]
          body:
            056: kCustomKernel [source       | sink        ] gemm_fusion_dot_1 grid: [1, 1, 1] threads: [64, 1, 1]
      true_branch:
        194: kCopy [source | sink] kCopy
"""

POOL = (8192, 16, 8, 128)
HLO = """\
%fused_scatter.16 (param_0.870: bf16[8192,16,8,128], param_1.1173: bf16[64,8,128]) -> bf16[8192,16,8,128] {
  %param_0.870 = bf16[8192,16,8,128]{3,2,1,0} parameter(0), metadata={scheduling_name="param_0.870"}
  ROOT %scatter.31.1 = bf16[8192,16,8,128]{3,2,1,0} scatter(%param_0.870, %bitcast.272, %param_1.1173), to_apply=%region
  %cond.23 = (bf16[8192,16,8,128]{3,2,1,0}, bf16[8192,16,8,128]{3,2,1,0}) conditional(%i#0, %c.22, %c.21), true_computation=%r
  %input_scatter_fusion.16 = bf16[8192,16,8,128]{3,2,1,0} fusion(%cond.23#2, %gemm_fusion_dot), kind=kInput, calls=%fused_scatter.16
  %while.1 = (s32[], s32[8192]{0}, bf16[8192,16,8,128]{3,2,1,0}) while(%tuple.110), condition=%c, body=%b, metadata={op_name="jit(_decode_many)/while"}, backend_config={"known_trip_count":{"n":"16"}}
"""  # noqa: E501

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'body_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for body_mosaic_gpu_kernel
    0 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 154 registers, used 2 barriers, 1 bytes smem
ptxas info    : Compile time = 12.567 ms
"""
SERIALISED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
    "non wgmma instructions defining accumulator registers in the function 'body_mosaic_gpu_kernel'\n"
)
RESOURCES = (
    "Resources(smem_scratch_bytes=9216, tmem_scratch_cols=0, tmem_collective_scratch_cols=0, barrier_counts=Counter("
    "{Barrier(arrival_count=3, num_barriers=1, orders_tensor_core=False): 1}), scoped_gmem_semaphores={})"
)
STORE = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%rd16+8192], {%r83, %r85, %r87, %r89};\n"
FENCE = "fence.proxy.async.shared::cta;\n"
WGMMA = "wgmma.fence.sync.aligned;\n{ wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r9,%r10}, %rd4, %rd5; }\n"
PTX = ".target sm_90a\n.maxntid 256, 1, 1\n"

KERNEL = parse.Kernel(
    name="decode_0",
    arch="sm_90a",
    registers=115,
    spill_bytes=0,
    threads=256,
    smem_bytes=69632,
    warnings=(),
    unfenced_wgmma=0,
    instructions={},
)
SIZES = {
    "alias_bytes": 110,
    "cache_bytes": 100,
    "state_bytes": 120,
    "temp_bytes": 40,
    "layer_bytes": 50,
    "pool_shapes": [POOL, (8192,)],
}
DECODE = ProgramCase(program="decode_many", model="llama3_8b", implementation="mosaic_gpu")


def facts(thunks=LOOP, hlo=HLO, kernels=(), **sizes):
    return checks.Facts(sizes=SIZES | sizes, kernels=kernels, thunks=parse.parse_thunks(thunks), hlo=hlo)


def test_thunks_nest_by_indentation_and_section():
    prologue, loop, last = parse.parse_thunks(LOOP)
    assert [prologue.kind, loop.kind, last.kind] == ["kCommandBuffer", "kWhile", "kCopy"]
    assert [t.name for t in loop.inside("condition")] == ["loop_compare_fusion"]
    (body,) = loop.inside("body")
    assert [t.kind for t in body.children] == ["kCustomKernel", "kConditional", "kCustomKernel"]
    branches = body.children[1]
    # The empty branch of the inner conditional must not lend its name to what follows it.
    assert [t.kind for t in branches.inside("false_branch")] == ["kCublasLtMatmul", "kConditional", "kCustomCall"]
    assert [t.kind for t in branches.inside("true_branch")] == ["kCopy"]


def test_launches_count_the_step_without_its_rare_branches():
    (loop,) = parse.loops(parse.parse_thunks(LOOP))
    kinds = sorted(t.kind for t in parse.launches(loop.inside("body")))
    assert kinds == ["kCublasLtMatmul", "kCustomCall", "kCustomKernel", "kCustomKernel"]
    assert len(parse.launches(parse.parse_thunks(WHILE_NODE))) == 4


def test_command_buffers_are_told_from_what_lies_outside():
    loop, node, broken = map(parse.parse_thunks, (LOOP, WHILE_NODE, BROKEN))
    assert parse.is_one_command_buffer(parse.loops(loop)[0].inside("body"))
    assert not parse.is_one_command_buffer(parse.loops(broken)[0].inside("body"))
    assert (parse.loop_in_command_buffer(loop), parse.loop_in_command_buffer(node)) == (False, True)
    assert parse.outside_command_buffers(node) == []
    outside = parse.outside_command_buffers(parse.loops(broken)[0].inside("body"))
    assert [t.kind for t in outside] == ["kConditional", "kWhile", "kCustomKernel", "kCustomKernel", "kCopy"]


def test_writes_in_place_are_no_rewrites_of_a_pool():
    assert parse.rewrites(HLO, POOL) == []


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("  %copy.36 = bf16[8192,16,8,128]{3,2,1,0} copy(%arg_tuple.8#4), metadata={}", "copy copy.36"),
        ("  ROOT %select.2 = f32[8192,16,8,128]{3,2,1,0} select(%p, %a, %b)", "select select.2"),
        (
            "  %copy-start.1 = (bf16[8192,16,8,128]{3,2,1,0}, bf16[8192,16,8,128]{3,2,1,0}, u32[]) copy-start(%a)",
            "copy-start copy-start.1",
        ),
    ],
)
def test_rewrites_of_a_pool_are_found(line, name):
    assert parse.rewrites(HLO + line, POOL) == [name]
    assert parse.rewrites(HLO + line.replace("8192", "8191"), POOL) == []


def test_trip_counts_and_host_transfers():
    assert parse.trip_counts(HLO) == [16]
    assert parse.trip_counts(HLO.replace('"known_trip_count":{"n":"16"}', "")) == [None]
    assert parse.host_transfers(parse.parse_thunks(LOOP), HLO) == []
    hlo = (
        '  %c.1 = f32[] custom-call(), custom_call_target="xla_ffi_python_gpu_callback"\n  %out.1 = token[] outfeed(%x)'
    )
    thunks = parse.parse_thunks("001: kHostExecuteStart [source | sink] x")
    assert parse.host_transfers(thunks, hlo) == ["kHostExecuteStart", "c.1", "out.1"]


def test_reports_of_ptxas_and_mosaic():
    report = {"arch": "sm_90a", "registers": 154, "spill_bytes": 20, "warnings": ()}
    assert parse.parse_ptxas(PTXAS) == report
    (warning,) = parse.parse_ptxas(PTXAS + SERIALISED)["warnings"]
    assert "serialized" in warning
    assert parse.parse_resources(RESOURCES) == 9216
    with pytest.raises(ValueError, match="not a report of ptxas"):
        parse.parse_ptxas("ptxas info : something new")


def test_wgmma_needs_a_fence_behind_the_last_store():
    assert parse.parse_ptx(PTX + STORE + FENCE + WGMMA)["unfenced_wgmma"] == 0
    assert parse.parse_ptx(PTX + FENCE + STORE + WGMMA + FENCE)["unfenced_wgmma"] == 1
    read = parse.parse_ptx(PTX + STORE + FENCE + WGMMA)
    assert (read["threads"], read["instructions"]["wgmma"], read["instructions"]["store"]) == (256, 1, 1)


def test_the_reason_of_a_failed_compilation_is_one_line():
    stderr = "LLVM ERROR: Cannot select: intrinsic %llvm.nvvm.wgmma\nStack dump:\n 0. Running pass\n"
    assert parse.error_of(stderr).startswith("LLVM ERROR")
    stderr = "Traceback:\n  File x\nValueError: too much SMEM\n-----\nFor simplicity, JAX has removed frames.\n"
    assert parse.error_of(stderr) == "ValueError: too much SMEM"
    assert parse.error_of("") == "no message"


@pytest.mark.parametrize(
    ("registers", "threads", "smem", "ctas"),
    [
        (168, 384, 1024, 1),  # 12 warps of 5376 registers fill the SM
        (128, 256, 1024, 2),
        (129, 256, 1024, 1),  # 136 by granularity: 15 warps, 12 in fours
        (32, 128, 115712, 2),  # the most shared memory with which two fit
        (32, 128, 115713, 1),
        (24, 1024, 0, 2),  # threads
    ],
)
def test_ctas_per_sm(registers, threads, smem, ctas):
    assert CHIPS["h200"].ctas_per_sm(registers=registers, threads=threads, smem=smem) == ctas


def test_a_good_case_has_no_failures():
    assert checks.failures(DECODE, facts()) == []
    assert checks.failures(dataclasses.replace(DECODE, flags="while_node"), facts(WHILE_NODE)) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"thunks": BROKEN}, "not one command buffer"),
        ({"thunks": WHILE_NODE.replace("kWhile", "kAsyncStart")}, "0 loops"),
        ({"hlo": HLO.replace('"known_trip_count":{"n":"16"}', "")}, "trip count"),
        ({"hlo": HLO + "  %copy.1 = s32[8192]{0} copy(%x)\n"}, "pool-shaped array rewritten: copy copy.1"),
        ({"hlo": HLO + "  %outfeed.1 = token[] outfeed(%x)\n"}, "host"),
        ({"alias_bytes": 99}, "alias"),
        ({"alias_bytes": 121}, "alias"),
        ({"temp_bytes": 50}, "temp bytes"),
    ],
)
def test_failures_of_a_decode_loop(change, complaint):
    assert any(complaint in f for f in checks.failures(DECODE, facts(**change)))


CALL = "001: kCustomCall [source | sink] kCustomCall\n"


@pytest.mark.parametrize(
    ("kernel", "num_calls", "complaint"),
    [
        ({}, 2, None),
        ({}, 3, "3 Mosaic launches"),
        ({}, 0, "0 Mosaic launches"),
        ({"spill_bytes": 20}, 1, "spills 20 bytes"),
        ({"smem_bytes": 125952}, 1, "1 CTAs per SM"),
        ({"warnings": ("serialized",)}, 1, "serialized"),
        ({"unfenced_wgmma": 4}, 1, "fence.proxy.async"),
    ],
)
def test_failures_of_a_kernel(kernel, num_calls, complaint):
    case = KernelCase(kernel="paged_decode", shape="llama3_8b", chip="h200")
    found = checks.failures(
        case, facts(CALL * num_calls, kernels=(dataclasses.replace(KERNEL, **kernel),), cache_bytes=0)
    )
    assert [complaint in f for f in found] == [True] if complaint else found == []


def test_launches_per_layer_come_from_two_depths():
    limit = checks.MATMULS_PER_LAYER + checks.EXTRA_LAUNCHES_PER_LAYER
    layer = ["kCustomCall", *(f"kCublasLtMatmul {i}" for i in range(limit - 1))]
    assert checks.depth_failures(["a", *6 * layer, "b"], ["a", *2 * layer, "b"], 4) == (limit, [])
    layer.append("extra")
    per_layer, (failure,) = checks.depth_failures(["a", *6 * layer, "b"], ["a", *2 * layer, "b"], 4)
    assert per_layer == limit + 1
    assert f"{limit + 1} launches per layer, at most {limit}" in failure
    assert failure.endswith(", ".join(layer))


def test_a_planted_fault_that_is_not_noticed_fails_the_gate():
    control = ControlCase(control="spilling_kernel", complaint="spills")
    assert verdict(control, ["body_0 spills 8 bytes"]) == []
    assert "not noticed" in verdict(control, [])[0]
    assert "not noticed" in verdict(control, ["does not compile"])[0]
    assert verdict(DECODE, ["wrong"]) == ["wrong"]


def test_cases_have_names_of_their_own_and_ci_runs_all_controls():
    cases = all_cases()
    assert len({c.name for c in cases}) == len(cases)
    assert all(case_named(c.name) is not None for c in cases)
    assert set(CONTROLS) < set(bounded_cases()) < set(cases)


def test_target_config_names_the_driver():
    """Without it XLA keeps conditionals out of command buffers."""
    text = CHIPS["b200"].target_config()
    assert "major: 10 minor: 0" in text
    assert 'driver_version: "13' in text
    assert text.count("{") == text.count("}")


@pytest.mark.parametrize(("platform", "has_loops"), [("cuda", False), ("cpu", True)])
def test_sampling_has_no_loops_on_a_gpu(platform, has_loops):
    """A loop inside the step's conditional would keep XLA:GPU from making the step one command buffer."""
    traced = jax.jit(sample, static_argnames="vocab_size").trace(
        jnp.zeros((4, 256)), init_sampling_state(4), jnp.zeros(4, jnp.int32), vocab_size=256
    )
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("stablehlo.while" in text) == has_loops
