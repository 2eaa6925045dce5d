"""Reads the text of compiled HLO: which instructions run, what they move, where they come from."""

import dataclasses
import re
from collections.abc import Iterator

BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16}  # of the others the name says it
FREE = set(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all "
    "fusion-done copy-done partition-id replica-id opt-barrier".split()
)

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)(.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")


@dataclasses.dataclass
class Instruction:
    """One instruction that runs as it stands, not inside a fusion."""

    name: str
    opcode: str
    what: str  # the target of a custom call, the kind of a fusion
    moved: int  # bytes of operands and results, of slices where a fusion takes slices
    source: str  # the path of scopes and the primitive that it comes from
    times: int  # in one run, by the trip counts of the loops around it
    branch: bool  # it stands in a branch, and may not run


def bytes_of(shapes: str) -> int:
    """The bytes of all arrays in a shape as HLO writes it."""
    total = 0
    for dtype, dims in _ARRAY.findall(shapes):
        width = BITS.get(dtype) or next((int(n) for n in re.findall(r"\d+", dtype)), 0)
        count = 1
        for dim in filter(None, dims.split(",")):
            count *= int(dim)
        total += count * width // 8
    return total


def computations(text: str) -> Iterator[tuple[str, list[re.Match[str]]]]:
    """The name of each computation, "ENTRY" for the first to run, and its instructions."""
    name, found = None, []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            name, found = "ENTRY" if header[1] else header[2], []
        elif line.startswith("}") and name is not None:
            yield name, found
            name = None
        elif name is not None and (match := _INSTRUCTION.match(line)):
            found.append(match)


def instructions(text: str) -> list[Instruction]:
    """Those that run one by one: of the entry, of loops and of branches."""
    bodies = dict(computations(text))
    out: list[Instruction] = []

    def visit(name: str, times: int, branch: bool) -> None:
        shapes = {match[1]: match[2] for match in bodies[name]}
        for match in bodies[name]:
            opcode, rest = match[3], match[5]
            if opcode == "while":
                trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', rest)
                body = re.search(r"body=%?([\w.\-]+)", rest)
                assert body is not None
                visit(body[1], times * int(trips[1] if trips else 1), branch)
            elif opcode == "conditional":
                inner = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", rest)
                listed = re.search(r"branch_computations=\{([^}]*)\}", rest)
                inner += re.findall(r"[\w.\-]+", listed[1]) if listed else []
                for computation in inner:
                    visit(computation, times, True)
            elif opcode == "call":
                target = re.search(r"to_apply=%?([\w.\-]+)", rest)
                assert target is not None
                visit(target[1], times, branch)
            elif opcode not in FREE:
                out.append(_instruction(match, bodies, shapes, times, branch))

    visit("ENTRY", 1, False)
    return out


def _instruction(
    match: re.Match[str],
    bodies: dict[str, list[re.Match[str]]],
    shapes: dict[str, str],
    times: int,
    branch: bool,
) -> Instruction:
    name, shape, opcode, operands, rest = match.groups()
    target = re.search(r'custom_call_target="([^"]*)"', rest)
    kind = re.search(r'"kind":"([^"]*)"', rest) or re.search(r"kind=(\w+)", rest)
    source = re.search(r'op_name="([^"]*)"', rest)
    called = re.search(r"calls=%?([\w.\-]+)", rest)
    for inner in bodies.get(called[1], []) if called else []:
        if inner[3] == "custom-call":  # a library's kernel with slices around it
            target = re.search(r'custom_call_target="([^"]*)"', inner[5])
            source = re.search(r'op_name="([^"]*)"', inner[5]) or source
    if target:
        shape = re.sub(r"[su]8\[\d+\]", "", shape)  # room to work in
    sizes = [bytes_of(shapes.get(x, "")) for x in _names(operands)]
    result = bytes_of(shape)
    if opcode.endswith("-start"):  # its shape has the operands in it
        result -= sum(sizes)
    inside = bodies.get(called[1], []) if called and opcode in ("fusion", "fusion-start") else []
    moved = _moved_inside(inside, sizes, result)
    return Instruction(
        name,
        opcode,
        what=(target or kind or [None, ""])[1],
        moved=moved,
        source=source[1] if source else "",
        times=times,
        branch=branch,
    )


def _names(operands: str) -> list[str]:
    return re.findall(r"%([\w.\-]+)", operands)


def _moved_inside(body: list[re.Match[str]], operands: list[int], result: int) -> int:
    """The bytes that a fusion reads and writes, given those of its operands and of its result."""
    shapes = {match[1]: match[2] for match in body}
    users: dict[str, list[re.Match[str]]] = {}
    for match in body:
        for name in _names(match[4]):
            users.setdefault(name, []).append(match)
    moved = list(operands)
    for match in body:
        name, opcode = match[1], match[3]
        if opcode == "parameter":
            uses = [(use[3], _names(use[4])) for use in users.get(name, [])]
            index = int(match[4])
            if uses and all(use == "dynamic-slice" or use == "gather" for use, _ in uses):
                moved[index] = sum(bytes_of(use[2]) for use in users[name])
            elif uses and all(use in _IN_PLACE and args[0] == name for use, args in uses):
                moved[index] = 0
        elif opcode in _IN_PLACE:  # it writes the update into what is there
            update = _names(match[4])[_IN_PLACE[opcode]]
            result -= bytes_of(match[2]) - bytes_of(shapes.get(update, ""))
    return sum(moved) + max(result, 0)


_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}  # and which operand is the update


def part(source: str) -> str:
    """Where in the model, and whether forward or backward: layers of a list are one."""
    if not source:
        return ""
    scopes = re.sub(r"\b(jit|jvp|transpose|checkpoint|remat|rematted_computation)\b", "", source)
    names = [re.sub(r"_\d+$", "_*", name.strip("()")) for name in scopes.split("/")[1:-1]]
    direction = "backward" if "transpose(" in source else "forward"
    names = [
        name
        for name in names
        if name and name not in ("while", "body", "closed_call", "eval_jaxpr")
    ]
    if "jvp(" not in source:
        direction = "update"
    return f"{direction} {'/'.join(names)}".strip()
