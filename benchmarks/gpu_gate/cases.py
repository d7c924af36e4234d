"""What the gate compiles: every kernel for every named shape and chip, and the steps of whole models."""

from dataclasses import dataclass

from pallas_kernels.shapes import MODEL_SHAPES

CHIPS = ("a100", "h200", "b200")
KERNELS = ("paged_decode", "paged_decode_int8", "paged_decode_fp8", "paged_prefill", "write_kv", "copy_blocks")
#: XLA_FLAGS of a case. "while_node": the loop itself becomes a node of the graph. "cublas": without a GPU to time them
#: on, XLA guesses which Triton matmul is best and takes split-K ones, whose sums are launches of their own; cuBLAS
#: makes the number of launches independent of that guess.
FLAGS = {
    "": "",
    "while_node": "--xla_gpu_enable_command_buffer=+WHILE",
    "cublas": "--xla_gpu_enable_triton_gemm=false",
}


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """One call of one kernel."""

    kernel: str
    shape: str
    chip: str
    flags: str = ""

    @property
    def name(self) -> str:
        return f"{self.kernel}/{self.shape}/{self.chip}"


@dataclass(frozen=True, kw_only=True)
class ProgramCase:
    """A step of a whole model on an H200.

    Attributes:
        program: "decode_many" or "prefill_step".
        model: a key of worker.MODELS.
        implementation: of the attention.
        num_layers: None = all. Launches per layer are the difference between two depths.
        flags: a key of FLAGS.
        cache_dtype: storage format of K and V.
    """

    program: str
    model: str
    implementation: str
    num_layers: int | None = None
    flags: str = ""
    cache_dtype: str = "bfloat16"
    chip: str = "h200"

    @property
    def name(self) -> str:
        layers = "" if self.num_layers is None else f"{self.num_layers}_layers"
        dtype = "" if self.cache_dtype == "bfloat16" else self.cache_dtype
        parts = (self.program, self.model, self.implementation, layers, dtype, self.flags)
        return "/".join(part for part in parts if part)


@dataclass(frozen=True, kw_only=True)
class ControlCase:
    """A planted fault (controls.py): the gate fails unless it complains of it.

    Attributes:
        control: name of the fault.
        complaint: words of the check that must fail.
    """

    control: str
    complaint: str
    chip: str = "h200"
    flags: str = ""

    @property
    def name(self) -> str:
        return f"control/{self.control}"


Case = KernelCase | ProgramCase | ControlCase

CONTROLS = [
    ControlCase(control="spilling_kernel", complaint="spills"),
    ControlCase(control="one_cta_per_sm", complaint="CTAs per SM"),
    ControlCase(control="no_fence_before_wgmma", complaint="fence.proxy.async"),
    ControlCase(control="wgmma_without_wgmma", complaint="does not compile", chip="b200"),
    ControlCase(control="pool_not_donated", complaint="pool-shaped"),
    ControlCase(control="pool_rebuilt_by_select", complaint="pool-shaped"),
    ControlCase(control="loop_within_step", complaint="command buffer"),
    ControlCase(control="predicate_read_by_host", complaint="trip count"),
    ControlCase(control="callback_within_step", complaint="does not compile"),
]


#: The difference between these two gives the launches per layer.
DEPTHS = [
    ProgramCase(program="decode_many", model="llama3_8b", implementation="mosaic_gpu", num_layers=n, flags="cublas")
    for n in (6, 2)
]


#: Groups that share arrays, blocks that leave windows, scales beside the blocks.
GROUPS_AND_FORMATS = [
    ProgramCase(program=program, model=model, implementation="mosaic_gpu", num_layers=n, cache_dtype=dtype)
    for model, n, dtype in (
        ("gemma3_270m", None, "bfloat16"),
        ("gemma3_270m", 6, "int8"),
        ("llama3_8b", 2, "int8"),
        ("llama3_8b", 2, "float8_e4m3fn"),
    )
    for program in ("decode_many", "prefill_step")
]


def all_cases() -> list[Case]:
    """Everything; the programs, which take longest, first."""
    programs = [
        ProgramCase(program=program, model=model, implementation=implementation, flags=flags)
        for implementation in ("mosaic_gpu", "xla")
        for model in ("llama3_8b", "smollm2_135m")
        for program, flags in (("decode_many", ""), ("decode_many", "while_node"), ("prefill_step", ""))
    ]
    kernels = [
        KernelCase(kernel=kernel, shape=shape, chip=chip)
        for chip in CHIPS
        for shape in MODEL_SHAPES
        for kernel in KERNELS
        if (kernel, chip) != ("paged_decode_fp8", "a100")  # which has no 8-bit floats
    ]
    return [*programs, *GROUPS_AND_FORMATS, *DEPTHS, *kernels, *CONTROLS]


def bounded_cases() -> list[Case]:
    """What CI compiles: each kind of step with the Mosaic kernels, each kernel for each chip, all planted faults."""

    def is_bounded(case: Case) -> bool:
        if case in GROUPS_AND_FORMATS:
            return case.num_layers == 6 and case.program == "decode_many"
        if isinstance(case, ProgramCase):
            is_plain_decode = case.program == "decode_many" and case.flags != "while_node"
            return case.implementation == "mosaic_gpu" and is_plain_decode == (case.model == "llama3_8b")
        if isinstance(case, KernelCase):
            is_other_width = case.kernel in ("paged_decode", "paged_prefill") and case.shape == "smollm2_135m"
            return case.shape == "llama3_8b" or (case.chip == "h200" and is_other_width)
        return True

    return [case for case in all_cases() if is_bounded(case)]


def refusal(case: Case) -> str | None:
    """Words of the NotImplementedError with which the kernel refuses the chip, None where it must compile."""
    if not isinstance(case, KernelCase):
        return None
    if case.kernel == "paged_prefill" and case.chip != "h200":
        return "written for wgmma"
    if case.kernel in ("write_kv", "copy_blocks") and case.chip == "a100":
        return "go by TMA"
    return None


def case_named(name: str) -> Case:
    """The case of that name."""
    return next(case for case in all_cases() if case.name == name)
