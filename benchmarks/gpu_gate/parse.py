"""Readers of what the compilers write: XLA's thunk sequences and HLO, ptxas' report, Mosaic's resources."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_THUNK = re.compile(r"^(?P<indent> *)\d+: (?P<kind>k\w+)\s+\[[^\]]*\]\s*(?P<name>[\w.\-]*)")
_SECTION = re.compile(r"^ *(\w+):\s*$")
_CONTAINERS = {"kCommandBuffer", "kWhile", "kConditional", "kSequential", "kAsyncStart", "kAsyncDone"}
_HOST_THUNK = re.compile(r"kHost\w*|kInfeed|kOutfeed|kSend\w*|kRecv\w*")
#: Host instructions, callbacks, and arrays in the host's memory, which is space 5.
_HOST_OP = re.compile(r" (infeed|outfeed|send|recv)\(|custom_call_target=\"[^\"]*(callback|Host)|:S\(5\)")


@dataclass(frozen=True)
class Thunk:
    """One step of XLA's run time.

    Attributes:
        kind: e.g. "kCustomKernel" (a kernel of XLA), "kCustomCall" (e.g. a Mosaic kernel), "kCommandBuffer".
        name: of the kernel.
        section: "body" or "condition" of a loop, the branch of a conditional, "" elsewhere.
        children: what it contains.
    """

    kind: str
    name: str = ""
    section: str = ""
    children: list["Thunk"] = field(default_factory=list)

    @property
    def is_launch(self) -> bool:
        """Whether it puts work of its own on the GPU."""
        return self.kind not in _CONTAINERS

    def inside(self, section: str) -> list["Thunk"]:
        """The children of one section."""
        return [c for c in self.children if c.section == section]


def parse_thunks(text: str) -> list[Thunk]:
    """The thunk sequence that `--xla_dump_to` writes, as a tree: nesting by indentation, four spaces a level."""
    top: list[Thunk] = []
    open_thunks: list[tuple[int, Thunk]] = []
    section = ""
    for line in text.splitlines():
        label, match = _SECTION.match(line), _THUNK.match(line)
        if not match:
            section = label[1] if label else ""  # "No thunks." ends a section
            continue
        indent = len(match["indent"])
        siblings, inherited = top, ""
        while open_thunks and open_thunks[-1][0] >= indent:
            previous = open_thunks.pop()
            if previous[0] == indent:
                inherited = previous[1].section
        if open_thunks:
            siblings = open_thunks[-1][1].children
        is_sectioned = bool(open_thunks) and open_thunks[-1][1].kind in ("kWhile", "kConditional")
        thunk = Thunk(match["kind"], match["name"], (section or inherited) if is_sectioned else "")
        section = ""
        siblings.append(thunk)
        open_thunks.append((indent, thunk))
    return top


def walk(thunks: Sequence[Thunk]) -> Iterator[Thunk]:
    """All thunks, depth first."""
    for thunk in thunks:
        yield thunk
        yield from walk(thunk.children)


def loops(thunks: Sequence[Thunk]) -> list[Thunk]:
    """The outermost loops, in or out of command buffers."""
    found: list[Thunk] = []
    for thunk in thunks:
        found += [thunk] if thunk.kind == "kWhile" else loops(thunk.children)
    return found


def outside_command_buffers(thunks: Sequence[Thunk]) -> list[Thunk]:
    """The launches, loops and conditionals that no command buffer holds: what the host starts one by one."""
    found: list[Thunk] = []
    for thunk in thunks:
        if thunk.kind != "kCommandBuffer":
            found += [thunk] if thunk.is_launch or thunk.kind in ("kWhile", "kConditional") else []
            found += outside_command_buffers(thunk.children)
    return found


def is_one_command_buffer(thunks: Sequence[Thunk]) -> bool:
    """Whether the sequence is a single command buffer: one graph launch."""
    return [t.kind for t in thunks] == ["kCommandBuffer"]


def loop_in_command_buffer(thunks: Sequence[Thunk]) -> bool:
    """Whether every loop lies inside a command buffer, as a while node of its graph."""
    return bool(loops(thunks)) and not any(t.kind == "kWhile" for t in outside_command_buffers(thunks))


def launches(thunks: Sequence[Thunk]) -> list[Thunk]:
    """The launches of one pass through a sequence in which every condition that guards rare work is false.

    A conditional at the top of the sequence (a decode step that may be skipped) counts with its larger branch, those
    further in (copy-on-write, the filters of sampling) not at all. A loop counts as one pass.
    """

    def direct(sequence: Sequence[Thunk]) -> list[Thunk]:
        found: list[Thunk] = []
        for thunk in sequence:
            if thunk.is_launch:
                found.append(thunk)
            elif thunk.kind != "kConditional":
                found += direct(thunk.children)
        return found

    found = direct(thunks)
    for thunk in walk_flat(thunks):
        if thunk.kind == "kConditional":
            branches = {c.section for c in thunk.children}
            found += max((direct(thunk.inside(b)) for b in branches), key=len, default=[])
    return found


def walk_flat(thunks: Sequence[Thunk]) -> Iterator[Thunk]:
    """The thunks of a sequence, command buffers opened, conditionals and loops not."""
    for thunk in thunks:
        if thunk.kind == "kCommandBuffer":
            yield from walk_flat(thunk.children)
        else:
            yield thunk


def host_transfers(thunks: Sequence[Thunk], hlo: str) -> list[str]:
    """Thunks and HLO instructions that talk to the host."""
    kinds = [t.kind for t in walk(thunks) if _HOST_THUNK.fullmatch(t.kind)]
    return kinds + [_name_of(line) for line in hlo.splitlines() if _HOST_OP.search(line)]


def trip_counts(hlo: str) -> list[int | None]:
    """For each `while` of the optimised HLO its static trip count, or None where the host must read a predicate."""
    counts: list[int | None] = []
    for line in hlo.splitlines():
        if re.search(r"\) while\(", line):
            match = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
            counts.append(int(match[1]) if match else None)
    return counts


#: What may produce an array of a pool's shape without moving the pool: views, control flow and writes in place.
_IN_PLACE = {"parameter", "get-tuple-element", "bitcast", "scatter", "dynamic-update-slice", "fusion", "custom-call"}


def rewrites(hlo: str, shape: Sequence[int]) -> list[str]:
    """Instructions that produce an array of this shape, of any dtype, by other means than a write in place.

    Inside fusions as well: a select over a whole pool needs no copy, and yet it reads and writes all of it.

    Args:
        hlo: optimised HLO text. shape: of the pool.

    Returns:
        "opcode name" of each, e.g. "copy copy.36".
    """
    dims = ",".join(map(str, shape))
    result = re.compile(rf"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<tuple>\()?\w+\[{dims}\](?P<rest>.*)$")
    found = []
    for line in hlo.splitlines():
        match = result.match(line)
        if not match:
            continue
        # The opcode is the first word in front of a parenthesis behind the type; a tuple's type ends with ") ".
        rest = match["rest"].split(") ", 1)[-1] if match["tuple"] else match["rest"]
        opcode = re.search(r"(?:^| )([a-z][\w\-]*)\(", rest)
        is_copy_start = opcode is not None and opcode[1] == "copy-start"
        if opcode and (is_copy_start or not match["tuple"]) and opcode[1] not in _IN_PLACE:
            found.append(f"{opcode[1]} {match['name']}")
    return found


def error_of(stderr: str) -> str:
    """The line that says why a compilation failed: the exception, or what an abort printed above its stack trace."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    for pattern in (r"LLVM ERROR|Check failed|ptxas fatal", r"^[\w.]*(Error|Exception)\b"):
        matching = [line for line in lines if re.search(pattern, line)]
        if matching:
            return matching[-1][:300]
    return lines[-1][:300] if lines else "no message"


def _name_of(line: str) -> str:
    match = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) =", line)
    return match[1] if match else line.strip()[:80]


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One compiled Mosaic kernel.

    Attributes:
        arch: e.g. "sm_90a". registers: per thread. spill_bytes: stores and loads. threads: per CTA.
        smem_bytes: shared memory per CTA.
        warnings: of ptxas, e.g. that it serialised wgmma instructions.
        unfenced_wgmma: wgmma instructions before which registers were stored to shared memory without a
            fence.proxy.async in between (in the order of the text): wgmma may then read the old content.
        instructions: how often the PTX has each of the instructions that matter.
    """

    name: str
    arch: str
    registers: int
    spill_bytes: int
    threads: int
    smem_bytes: int
    warnings: tuple[str, ...]
    unfenced_wgmma: int
    instructions: dict[str, int]


def parse_ptxas(text: str) -> dict[str, object]:
    """arch, registers, spill_bytes and warnings of a `ptxas -v` report on one kernel.

    Raises:
        ValueError: the report has no registers or no spills: its format has changed.
    """
    registers = re.search(r"Used (\d+) registers", text)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    arch = re.search(r"Compiling entry function '[^']*' for '(\w+)'", text)
    if not (registers and spills and arch):
        raise ValueError(f"not a report of ptxas -v: {text[:300]!r}")
    # That wgmma is serialised comes as "info", everything else that matters as "warning".
    problems = re.findall(r"^ptxas (?:warning\s*:|info\s*:(?=.*serialized))\s*(.*)$", text, re.M)
    return {
        "arch": arch[1],
        "registers": int(registers[1]),
        "spill_bytes": int(spills[1]) + int(spills[2]),
        "warnings": tuple(problems),
    }


def parse_resources(text: str) -> int:
    """Bytes of shared memory in Mosaic's `.resources.txt`."""
    match = re.search(r"smem_scratch_bytes=(\d+)", text)
    if not match:
        raise ValueError(f"no smem_scratch_bytes in {text[:300]!r}")
    return int(match[1])


_INSTRUCTIONS = {
    "wgmma": r"wgmma\.mma_async",
    "mma": r"\bmma\.sync",
    "tma_load": r"cp\.async\.bulk\.tensor\S*\.global",
    "cp_async": r"cp\.async\.c[ag]\.",
    "fence": r"fence\.proxy\.async",
    "store": r"\bst\.shared|\bstmatrix",
}


def _count_unfenced(ptx: str) -> int:
    """See Kernel.unfenced_wgmma."""
    unfenced, is_stale = 0, False
    for match in re.finditer("|".join(f"(?P<{n}>{_INSTRUCTIONS[n]})" for n in ("wgmma", "fence", "store")), ptx):
        if match.lastgroup == "wgmma":
            unfenced += is_stale
        else:
            is_stale = match.lastgroup == "store"
    return unfenced


def parse_ptx(text: str) -> dict[str, object]:
    """Threads per CTA, wgmma instructions without their fence, and counts of the instructions that matter."""
    threads = re.search(r"\.(?:max|req)ntid (\d+)(?:, (\d+))?(?:, (\d+))?", text)
    if not threads:
        raise ValueError("no .maxntid in the PTX")
    count = 1
    for group in threads.groups():
        count *= int(group or 1)
    return {
        "threads": count,
        "unfenced_wgmma": _count_unfenced(text),
        "instructions": {name: len(re.findall(pattern, text)) for name, pattern in _INSTRUCTIONS.items()},
    }
