"""What a compiled program does, read from its text: products and traffic between devices, loops counted as often as they run.

XLA's own `cost_analysis` counts the body of a loop once; here a body counts as often as the loop runs, where its text tells.
All figures are per device, since a partitioned program is what one device runs.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*\(.*->.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT\s+)?%?([\w.\-]+)\s*=\s*(.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(r"(calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line: `result` is its type as written; `shapes` the (element type, dimensions) in it; operands are the names in `arguments`."""

    name: str
    opcode: str
    result: str
    operands: tuple[str, ...]
    arguments: str
    text: str

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(kind, tuple(int(n) for n in dims.split(",") if n)) for kind, dims in _ARRAY.findall(self.result)]


@dataclasses.dataclass
class Traffic:
    """Collectives of one kind: how often, and the bytes of their arrays on one device (the larger of what goes in and comes out)."""

    count: int = 0
    bytes: int = 0


@dataclasses.dataclass
class Cost:
    """flops: of matrix products (2 per multiply-add). unknown_loops: loops whose trip count the program does not know, counted once."""

    flops: float = 0.0
    collectives: dict[str, Traffic] = dataclasses.field(default_factory=dict)
    unknown_loops: int = 0


def cost(text: str) -> Cost:
    """The cost of a compiled program (`compiled.as_text()`). Of a conditional's branches each counts once."""
    computations, entry = parse(text)
    total = Cost()
    _add(computations, entry, 1, total)
    return total


def collective_shapes(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """(kind, dimensions) of every array that some collective of the program, however often run, takes or gives."""
    computations, _ = parse(text)
    found = []
    for instructions in computations.values():
        by_name = {i.name: i for i in instructions}
        for instruction in instructions:
            kind = collective_kind(instruction.opcode)
            if kind is not None:
                arrays = instruction.shapes + [s for o in instruction.operands if o in by_name for s in by_name[o].shapes]
                found += [(kind, dims) for _, dims in arrays]
    return found


def parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """(instructions of every computation by name, the entry computation's name)."""
    computations: dict[str, list[Instruction]] = {}
    current: list[Instruction] | None = None
    entry = ""
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header and not line.startswith(" "):
            current = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
            continue
        match = _INSTRUCTION.match(line) if current is not None else None
        if match and current is not None:
            current.append(_instruction(match[1], match[2]))
    if not entry:
        raise ValueError("not the text of a compiled program: no ENTRY computation")
    return computations, entry


def collective_kind(opcode: str) -> str | None:
    """The kind of a collective; None for anything else, and for the second half of one that runs in the background."""
    kind = opcode.removesuffix("-start")
    return kind if kind in COLLECTIVES else None


def _instruction(name: str, rest: str) -> Instruction:
    """`rest` is "TYPE opcode(operands), attributes"; a tuple type is in parentheses, with nested ones in layouts."""
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    result, tail = rest[:end], rest[end:].lstrip()
    opcode, _, _ = tail.partition("(")
    start = len(opcode)
    stop = _closing(tail, start) if start < len(tail) else start
    arguments = tail[start : stop + 1]
    return Instruction(name, opcode.strip(), result, tuple(re.findall(r"%([\w.\-]+)", arguments)), arguments, tail[stop + 1 :])


def _closing(text: str, start: int) -> int:
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    return len(text) - 1


def _called(instruction: Instruction) -> Iterator[str]:
    for _, name in _CALLED.findall(instruction.text):
        yield name
    for several, one in _BRANCHES.findall(instruction.text):
        yield from (re.findall(r"%?([\w.\-]+)", several) if several else [one])


def _add(computations: dict[str, list[Instruction]], name: str, times: int, total: Cost) -> None:
    instructions = computations.get(name, [])
    by_name = {i.name: i for i in instructions}
    # TPUs spread a collective over the products beside it: it is written where it starts, in each of those, and where it is done.
    continued = "async_collective_fusion" in name or any("AsyncCollectiveDone" in i.text for i in instructions)
    for instruction in instructions:
        kind = collective_kind(instruction.opcode)
        if kind is not None and continued:
            continue
        # A fusion of an all-reduce and the slice that each device keeps is a reduce-scatter.
        scattered = instruction.opcode == "fusion" and "reduce-scatter" in f"{instruction.name} {instruction.text.split(', metadata')[0]}"
        if kind is not None or scattered:
            traffic = total.collectives.setdefault(kind or "reduce-scatter", Traffic())
            traffic.count += times
            operands = [by_name[o] for o in instruction.operands if o in by_name]
            traffic.bytes += times * max([_bytes(instruction.shapes), *(_bytes(o.shapes) for o in operands)], default=0)
            continue
        if instruction.opcode == "dot":
            total.flops += times * _dot_flops(instruction, by_name)
        elif instruction.opcode == "convolution":
            total.flops += times * _convolution_flops(instruction, by_name)
        trips = times
        if instruction.opcode == "while":
            known = _trip_count(instruction, by_name, computations)
            total.unknown_loops += times if known is None else 0
            trips = times * (1 if known is None else known)
        for called in _called(instruction):
            _add(computations, called, trips, total)


def _trip_count(loop: Instruction, by_name: dict[str, Instruction], computations: dict[str, list[Instruction]]) -> int | None:
    """How often a loop runs: as XLA notes it (CPU), or from a condition "counter < constant" and the counter's steps (TPU)."""
    noted = _TRIPS.search(loop.text)
    if noted:
        return int(noted[1])
    called = dict(_CALLED.findall(loop.text))
    condition = computations.get(called.get("condition", ""), [])
    inside = {i.name: i for i in condition}
    if not condition or condition[-1].opcode != "compare" or "direction=LT" not in condition[-1].text:
        return None
    counter, limit = (inside.get(name) for name in condition[-1].operands)
    bound = _constant(limit, inside)
    if bound is None or counter is None or counter.opcode != "get-tuple-element":
        return None
    index = re.search(r"index=(\d+)", counter.text)
    start = by_name.get(loop.operands[0])
    if index is None or start is None or start.opcode != "tuple":
        return bound
    first = _constant(by_name.get(start.operands[int(index[1])]), by_name) or 0
    return -(-(bound - first) // _step(computations.get(called.get("body", ""), []), int(index[1])))


def _step(body: list[Instruction], index: int) -> int:
    """By how much a loop's body raises entry `index` of what it carries (an unrolled loop's by more than 1); 1 where it does not tell."""
    inside = {i.name: i for i in body}
    if not body or body[-1].opcode != "tuple":
        return 1
    raised = inside.get(body[-1].operands[index])
    if raised is None or raised.opcode != "add":
        return 1
    return next((c for c in (_constant(inside.get(name), inside) for name in raised.operands) if c), 1)


def _constant(instruction: Instruction | None, by_name: dict[str, Instruction]) -> int | None:
    while instruction is not None and instruction.opcode in ("copy", "bitcast") and instruction.operands:
        instruction = by_name.get(instruction.operands[0])
    if instruction is None or instruction.opcode != "constant":
        return None
    value = instruction.arguments.strip("()")
    return int(value) if value.isdecimal() else None


def _bytes(shapes: list[tuple[str, tuple[int, ...]]]) -> int:
    """Of the largest array: an operation begun in the background lists its operand beside its result."""
    return max((_BYTES.get(kind, 1) * math.prod(dims) for kind, dims in shapes), default=0)


def _dims(text: str, key: str) -> list[int]:
    match = re.search(rf"{key}=\{{([\d,]*)\}}", text)
    return [int(n) for n in match[1].split(",") if n] if match else []


def _dot_flops(instruction: Instruction, by_name: dict[str, Instruction]) -> float:
    left = by_name[instruction.operands[0]].shapes[0][1]
    summed = math.prod(left[d] for d in _dims(instruction.text, "lhs_contracting_dims"))
    return 2.0 * math.prod(instruction.shapes[0][1]) * summed


def _convolution_flops(instruction: Instruction, by_name: dict[str, Instruction]) -> float:
    """TPUs run products as convolutions, the batch of a batched product as a window that fits in one place only: count real pairs."""
    labels = re.search(r"dim_labels=([\w?]+)_([\w?]+)->([\w?]+)", instruction.text)
    if labels is None:
        return 0.0
    left, right = (by_name[o].shapes[0][1] for o in instruction.operands[:2])
    out = instruction.shapes[0][1]
    window = re.search(r"window=\{([^}]*)\}", instruction.text)
    options = dict(part.split("=", 1) for part in window[1].split()) if window else {}
    spatial = sorted(c for c in labels[3] if c.isdigit())

    def option(name: str, index: int, default: str) -> str:
        return options[name].split("x")[index] if name in options else default

    pairs = 1
    for index, digit in enumerate(spatial):
        low = int(option("pad", index, "0_0").split("_")[0])
        pairs *= _valid_pairs(
            size=left[labels[1].index(digit)],
            kernel=right[labels[2].index(digit)],
            out=out[labels[3].index(digit)],
            stride=int(option("stride", index, "1")),
            low=low,
            dilate=int(option("lhs_dilate", index, "1")),
            kernel_dilate=int(option("rhs_dilate", index, "1")),
        )
    batch, features = out[labels[3].index("b")], out[labels[3].index("f")]
    groups = re.search(r"batch_group_count=(\d+)", instruction.text)
    return 2.0 * batch * features * right[labels[2].index("i")] * pairs / (int(groups[1]) if groups else 1)


def _valid_pairs(size: int, kernel: int, out: int, stride: int, low: int, dilate: int, kernel_dilate: int) -> int:
    """(output, kernel) positions of one dimension that meet an element of the input, not padding or a hole between elements."""
    if stride == 1 and dilate == 1 and low == 0 and out + kernel_dilate * (kernel - 1) <= size:
        return out * kernel
    count, last = 0, (size - 1) * dilate
    for o in range(out):
        for k in range(kernel):
            at = o * stride + k * kernel_dilate - low
            count += 0 <= at <= last and at % dilate == 0
    return count
