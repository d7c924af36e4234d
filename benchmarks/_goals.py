"""What the measurements of kernels.py are judged by: ratios of what was measured in one run.

Figures are for an H200, K/V in bfloat16, 32 query and 8 kv heads of 128, blocks of 16 tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

# Least share of the copy bandwidth by "batch x context"; a batch of 1 at 1k is judged by its time.
DECODE_SHARES = {
    "1 x 8192": 0.40,
    "1 x 65536": 0.68,
    "16 x 1024": 0.65,
    "16 x 8192": 0.88,
    "16 x 65536": 0.90,
    "64 x 1024": 0.82,
    "64 x 8192": 0.90,
    "64 x 65536": 0.91,
    "256 x 1024": 0.87,
    "256 x 8192": 0.90,
    "256 x 65536": 0.91,
}


class _Goal(NamedTuple):
    """value(numbers) is at least (or at most) limit. `numbers` are the best of each kind, see `_Numbers`."""

    name: str
    unit: str
    limit: float
    is_at_least: bool
    value: Callable[["_Numbers"], float]


class _MissingError(LookupError):
    """A measurement that a goal needs has not been made."""


class _Numbers:
    """Looks measurements up."""

    def __init__(self, measurements: list[dict[str, Any]]):
        self._good = [m for m in measurements if "us" in m]

    def best(self, part: str, name: str) -> dict[str, Any]:
        """The fastest measurement whose part and name begin like this."""
        found = [m for m in self._good if m["part"].startswith(part) and m["name"].startswith(name)]
        if not found:
            raise _MissingError(f"{part}/{name}")
        return min(found, key=lambda m: m["us"]["median"])

    def us(self, part: str, name: str) -> float:
        return self.best(part, name)["us"]["median"]

    def bytes_per_us(self, part: str, name: str) -> float:
        best = self.best(part, name)
        return best["bytes"] / best["us"]["median"]

    def share(self, part: str, name: str) -> float:
        """Of the copy bandwidth: that of the faster way to copy."""
        copy = max(self.bytes_per_us("bandwidth", "copy by the driver"), self.bytes_per_us("bandwidth", "copy by XLA"))
        return self.bytes_per_us(part, name) / copy


def _tflops(n: _Numbers) -> float:
    best = n.best("prefill", "1 x 8192, mosaic")
    return best["flop"] / best["us"]["median"] / 1e6


def _decode_goal(cell: str, limit: float) -> _Goal:
    return _Goal(f"decode {cell}", "of copy", limit, True, lambda n: n.share("decode_", cell + ","))


GOALS = [
    _Goal("decode 1 x 1024", "us", 9.0, False, lambda n: n.us("decode_", "1 x 1024,")),
    *(_decode_goal(cell, limit) for cell, limit in DECODE_SHARES.items()),
    _Goal(
        "ragged lengths against equal ones",
        "of its bandwidth",
        0.88,
        True,
        lambda n: n.bytes_per_us("ragged", "ragged") / n.bytes_per_us("ragged", "equal"),
    ),
    _Goal(
        "table of 64k tokens against a tight one",
        "x its time",
        1.03,
        False,
        lambda n: n.us("wide_table", "64 x 8192, wide") / n.us("wide_table", "64 x 8192, tight"),
    ),
    *(
        _Goal(
            f"{name} K/V against bfloat16, 64 x 8192",
            "x faster",
            1.5,
            True,
            lambda n, name=name: n.us("quantised", "bfloat16") / n.us("quantised", name),
        )
        for name in ("int8", "float8_e4m3fn")
    ),
    _Goal(
        "JAX's paged_attention, 64 x 8192",
        "x slower",
        1.3,
        True,
        lambda n: n.us("rivals", "64 x 8192, jax paged") / n.us("rivals", "64 x 8192, mosaic"),
    ),
    _Goal(
        "JAX's paged_attention, 1 x 4096 in a table of 64k",
        "x slower",
        4.0,
        True,
        lambda n: n.us("rivals", "1 x 4096 wide, jax paged") / n.us("rivals", "1 x 4096 wide, mosaic"),
    ),
    _Goal("prefill 8192, causal", "TFLOP/s", 550.0, True, _tflops),
    _Goal(
        "a mixed batch against its parts alone",
        "x their time",
        1.15,
        False,
        lambda n: n.us("mixed", "together") / (n.us("mixed", "chunk alone") + n.us("mixed", "decodes alone")),
    ),
    _Goal("K/V write, 32768 tokens", "of copy", 0.60, True, lambda n: n.share("moves", "write 32768, mosaic")),
    _Goal("block copy, 8192 blocks", "of copy", 0.80, True, lambda n: n.share("moves", "copy 8192, mosaic")),
]


def judge(measurements: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every goal with its value and whether it is met; None for what was not measured."""
    numbers, judged = _Numbers(measurements), []
    for goal in GOALS:
        entry = {"goal": goal.name, "unit": goal.unit, "at_least" if goal.is_at_least else "at_most": goal.limit}
        try:
            value = goal.value(numbers)
        except _MissingError as missing:
            judged.append(entry | {"value": None, "is_met": None, "missing": str(missing)})
            continue
        is_met = value >= goal.limit if goal.is_at_least else value <= goal.limit
        judged.append(entry | {"value": value, "is_met": is_met})
    return judged


def table(judged: list[dict[str, Any]]) -> str:
    """The judgement as text."""
    lines = []
    for entry in judged:
        bound = f">= {entry['at_least']}" if "at_least" in entry else f"<= {entry['at_most']}"
        value = f"not measured ({entry['missing']})" if entry["value"] is None else f"{entry['value']:.3g}"
        mark = {True: "met", False: "MISSED", None: "-"}[entry["is_met"]]
        lines.append(f"{entry['goal']:<52} {value:>10} {entry['unit']:<18} goal {bound:<9} {mark}")
    return "\n".join(lines)
