"""Loops of a kernel's machine code, and the instructions on a path through them."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from benchmarks.gpu.disassembly import Instruction, Kernel

_ENDS = ("BRA", "EXIT", "BSYNC", "RET", "BRX", "JMP", "BREAK")
GLOBAL = ("LDG", "STG", "LDGSTS")
"""Accesses to global memory; the last one copies to shared memory."""
SHARED = ("LDS", "STS", "LDSM")


@dataclass(frozen=True)
class Work:
    """Instructions that a warp issues on a path.

    Attributes:
        instructions: number of all instructions.
        looped: number of the instructions in loops.
        tensor: products of tensor cores.
        products: operations of these products, two for each multiply-add.
        special: functions such as ex2 and rcp.
        accesses: number of accesses to global memory.
        wide: number of the accesses that move 16 bytes for each thread.
        moved: the bytes of a thread's accesses to global memory.
        local: number of accesses to shared memory.
        multiply_adds: number of multiply-adds in float32.
        barriers: number of barriers of the block.
        skipped: loops on the path that have no iteration.
    """

    instructions: float = 0
    looped: float = 0
    tensor: float = 0
    products: float = 0
    special: float = 0
    accesses: float = 0
    wide: float = 0
    moved: float = 0
    local: float = 0
    multiply_adds: float = 0
    barriers: float = 0
    skipped: float = 0

    @classmethod
    def of(cls, code: list[Instruction]) -> "Work":
        """Return the work of a list of instructions."""
        names = [instruction.name for instruction in code]
        accesses = [instruction for instruction in code if instruction.name in GLOBAL]
        return cls(
            instructions=len(code),
            tensor=names.count("HMMA"),
            products=sum(_operations(i) for i in code if i.name == "HMMA"),
            special=names.count("MUFU"),
            accesses=len(accesses),
            wide=sum(instruction.bytes == 16 for instruction in accesses),
            moved=sum(instruction.bytes for instruction in accesses),
            local=sum(name in SHARED for name in names),
            multiply_adds=names.count("FFMA"),
            barriers=names.count("BAR"),
        )

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(self._values, other._values, strict=True)))

    def times(self, count: float) -> "Work":
        """Return the work of so many repetitions."""
        return Work(*(value * count for value in self._values))

    @property
    def _values(self) -> tuple[float, ...]:
        return tuple(vars(self).values())

    @property
    def order(self) -> tuple[float, ...]:
        """The key by which the path of a full iteration is the largest.

        It skips no code but that of loops without iterations, such as a second way to an exact sum.
        It multiplies, moves and exponentiates the most; of two paths that do the same, as with and
        without a mask, it is the shorter one.
        """
        return (
            -self.skipped, self.tensor, self.moved, self.special, self.local, -self.instructions,
        )  # fmt: skip


def _operations(product: Instruction) -> int:
    """Return the operations of a tensor core's product, whose opcode has its shape."""
    shape = re.search(r"\.16(8)(16|8|4)\b", product.opcode)
    assert shape, product
    return 2 * 16 * int(shape[1]) * int(shape[2])


@dataclass
class Loop:
    """A natural loop.

    Attributes:
        header: the block where every iteration begins.
        blocks: all blocks, those of inner loops too.
        inner: the loops directly inside.
    """

    header: int
    blocks: set[int]
    inner: list["Loop"] = field(default_factory=list)


Trips = Callable[[Loop], float]


def once(_: Loop) -> float:
    """Give every loop one iteration."""
    return 1


class ControlFlow:
    """The blocks of a kernel that its entry reaches.

    Attributes:
        code: instructions by block; blocks are numbered in the order of their addresses.
        next: the blocks that may follow, by block.
        loops: the outermost loops, by address.
        has_products: the kernel uses tensor cores.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.has_products = any(i.name == "HMMA" for i in kernel.code)
        self._split(kernel)
        self._order()
        self.loops = self._nest(self._natural_loops())

    def work_of(self, loop: Loop, trips: Trips = once) -> Work:
        """Return the work of one iteration, with so many iterations of each inner loop."""
        return self._path(loop.header, loop.blocks, loop.inner, trips)

    def whole(self, trips: Trips = once) -> Work:
        """Return the work of the kernel, with so many iterations of each loop."""
        return self._path(0, set(self._place), self.loops, trips)

    def listing(self, loop: Loop) -> list[Instruction]:
        """Return all instructions of a loop, of every path."""
        return [instruction for block in sorted(loop.blocks) for instruction in self.code[block]]

    @cached_property
    def hot(self) -> Loop | None:
        """The outermost loop that has most products, else most wide accesses, else instructions."""

        def weight(loop: Loop) -> tuple[float, ...]:
            work = self.work_of(loop)
            return (work.tensor, work.wide, work.instructions)

        return max(self.loops, key=weight, default=None)

    def _split(self, kernel: Kernel) -> None:
        """Cut the code into blocks and connect them."""
        starts = {0, *kernel.labels.values()}
        for instruction, after in zip(kernel.code, kernel.code[1:], strict=False):
            if instruction.name in _ENDS:
                starts.add(after.address)
        self.code: list[list[Instruction]] = []
        block_at: dict[int, int] = {}
        for instruction in kernel.code:
            if instruction.address in starts:
                block_at[instruction.address] = len(self.code)
                self.code.append([])
            self.code[-1].append(instruction)
        reconverge: dict[str, int] = {}  # the target of the barrier register's last BSSY
        self.next: list[list[int]] = []
        for number, code in enumerate(self.code):
            for instruction in code:
                if instruction.name == "BSSY":
                    register = instruction.operands.partition(",")[0]
                    reconverge[register] = block_at[kernel.labels[instruction.label]]
            last = code[-1]
            follows = [number + 1] if number + 1 < len(self.code) else []
            always = not last.predicate and "P" not in last.operands.partition("`")[0]
            if last.name in ("BRA", "JMP"):
                target = block_at[kernel.labels[last.label]]
                follows = [target] if always else [target, *follows]
            elif last.name == "BSYNC":
                target = reconverge[last.operands.strip()]
                follows = [target] if always else [target, *follows]
            elif last.name in ("EXIT", "RET") and not last.predicate:
                follows = []
            self.next.append(follows)

    def _order(self) -> None:
        """Number the reachable blocks in reverse postorder and find their dominators."""
        postorder: list[int] = []
        seen, stack = {0}, [(0, iter(self.next[0]))]
        while stack:
            block, rest = stack[-1]
            for follower in rest:
                if follower not in seen:
                    seen.add(follower)
                    stack.append((follower, iter(self.next[follower])))
                    break
            else:
                postorder.append(block)
                stack.pop()
        self._sequence = postorder[::-1]
        self._place = {block: place for place, block in enumerate(self._sequence)}
        self._before: dict[int, list[int]] = {block: [] for block in self._sequence}
        for block in self._sequence:
            for follower in self.next[block]:
                self._before[follower].append(block)
        self._dominator = {0: 0}
        changed = True
        while changed:
            changed = False
            for block in self._sequence[1:]:
                known = [b for b in self._before[block] if b in self._dominator]
                nearest = known[0]
                for other in known[1:]:
                    nearest = self._meet(nearest, other)
                if self._dominator.get(block) != nearest:
                    self._dominator[block] = nearest
                    changed = True

    def _meet(self, a: int, b: int) -> int:
        while a != b:
            while self._place[a] > self._place[b]:
                a = self._dominator[a]
            while self._place[b] > self._place[a]:
                b = self._dominator[b]
        return a

    def _dominates(self, a: int, b: int) -> bool:
        while self._place[b] > self._place[a]:
            b = self._dominator[b]
        return a == b

    def _natural_loops(self) -> list[Loop]:
        found: dict[int, Loop] = {}
        for block in self._sequence:
            for header in self.next[block]:
                if not self._dominates(header, block):
                    continue
                loop = found.setdefault(header, Loop(header, {header}))
                waiting = [block]
                while waiting:
                    member = waiting.pop()
                    if member not in loop.blocks:
                        loop.blocks.add(member)
                        waiting += self._before[member]
        return sorted(found.values(), key=lambda loop: len(loop.blocks))

    def _nest(self, loops: list[Loop]) -> list[Loop]:
        """Put every loop into the smallest around it; return the others."""
        outermost = []
        for place, loop in enumerate(loops):
            around = next((o for o in loops[place + 1 :] if loop.header in o.blocks), None)
            (outermost if around is None else around.inner).append(loop)
        return sorted(outermost, key=lambda loop: loop.header)

    def _path(self, start: int, blocks: set[int], inner: list[Loop], trips: Trips) -> Work:
        """Return the work of the fullest path from `start` on that stays in `blocks`."""
        inside = {block: loop for loop in inner for block in loop.blocks}
        best: dict[int, Work] = {start: Work()}
        ends: list[Work] = []
        for block in sorted(blocks, key=self._place.__getitem__):
            loop = inside.get(block)
            if block not in best or (loop and block != loop.header):
                continue
            if loop:
                count = trips(loop)
                work = self.work_of(loop, trips).times(count) if count else Work(skipped=1)
                total = best[block] + replace(work, looped=work.instructions)
                edges = [n for b in loop.blocks for n in self.next[b] if n not in loop.blocks]
            else:
                total = best[block] + Work.of(self.code[block])
                edges = self.next[block]
            forward = [n for n in edges if n in blocks and self._place[n] > self._place[block]]
            ends_here = not loop and self.code[block][-1].name in ("EXIT", "RET")
            if ends_here or not forward or len(forward) < len(edges):
                ends.append(total)
            for follower in forward:
                if follower not in best or total.order > best[follower].order:
                    best[follower] = total
        return max(ends, key=lambda work: work.order)
