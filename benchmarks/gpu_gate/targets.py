"""The GPUs that the gate compiles for, as XLA sees them, and how many CTAs fit one of their SMs."""

from dataclasses import dataclass

_RESERVED_SMEM = 1024  # bytes per CTA that the driver keeps, sm_80 and later
_MAX_CTAS = 32
_REGISTERS = 65536  # per SM
_MAX_THREADS = 2048  # per SM

_TEXT = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {smem_per_sm} shared_memory_per_block_optin: {smem_per_cta}
  threads_per_core_limit: {max_threads} core_count: {num_sms} fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {l2_bytes} clock_rate_ghz: {clock_ghz}
  device_memory_size: {memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: {registers} registers_per_block_limit: {registers}
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "sm_{major}{minor}"
"""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One GPU.

    Attributes:
        compute_capability: (major, minor).
        num_sms: streaming multiprocessors.
        smem_per_sm, smem_per_cta: bytes of shared memory of an SM, and the most that one CTA may have.
        fpus: float32 lanes per SM.
        clock_ghz, bandwidth, l2_bytes, memory_bytes: GHz, bytes/s, bytes, bytes; XLA's cost model reads them.
    """

    compute_capability: tuple[int, int]
    num_sms: int
    smem_per_sm: int
    smem_per_cta: int
    fpus: int
    clock_ghz: float
    bandwidth: int
    l2_bytes: int
    memory_bytes: int

    def target_config(self) -> str:
        """A GpuTargetConfigProto in text form.

        Without the driver and runtime versions XLA assumes a driver that knows no conditional nodes, and leaves them
        out of every command buffer.
        """
        major, minor = self.compute_capability
        return _TEXT.format(major=major, minor=minor, registers=_REGISTERS, max_threads=_MAX_THREADS, **vars(self))

    def ctas_per_sm(self, *, registers: int, threads: int, smem: int) -> int:
        """CTAs of one kernel that are resident on an SM at once.

        Registers are handed out in 256 per warp, and warps in fours (one for each quarter of the SM). Source: CUDA's
        occupancy calculator, compute capability 8.0 and later.

        Args:
            registers: per thread. threads: per CTA. smem: bytes per CTA.
        """
        warps = -(-threads // 32)
        registers_per_warp = -(-registers * 32 // 256) * 256
        resident_warps = _REGISTERS // registers_per_warp // 4 * 4
        return min(
            resident_warps // warps, _MAX_THREADS // threads, self.smem_per_sm // (smem + _RESERVED_SMEM), _MAX_CTAS
        )


CHIPS = {
    "a100": Chip(
        compute_capability=(8, 0),
        num_sms=108,
        smem_per_sm=167936,
        smem_per_cta=166912,
        fpus=64,
        clock_ghz=1.41,
        bandwidth=2_039_000_000_000,
        l2_bytes=41_943_040,
        memory_bytes=84_900_000_000,
    ),
    "h200": Chip(
        compute_capability=(9, 0),
        num_sms=132,
        smem_per_sm=233472,
        smem_per_cta=232448,
        fpus=128,
        clock_ghz=1.98,
        bandwidth=4_800_000_000_000,
        l2_bytes=52_428_800,
        memory_bytes=150_000_000_000,
    ),
    "b200": Chip(
        compute_capability=(10, 0),
        num_sms=148,
        smem_per_sm=233472,
        smem_per_cta=232448,
        fpus=128,
        clock_ghz=1.965,
        bandwidth=8_000_000_000_000,
        l2_bytes=132_644_864,
        memory_bytes=191_500_000_000,
    ),
}
