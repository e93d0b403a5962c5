"""Loops and paths of machine code, read off short listings."""

from itertools import starmap

from benchmarks.gpu.control_flow import ControlFlow, Work
from benchmarks.gpu.disassembly import Instruction, Kernel, parse_code

NESTED = """\
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_0:
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
.L_x_1:
        /*0020*/                   HMMA.1688.F32.TF32 R8, R4, R6, R8 ;
        /*0030*/                   IADD3 R1, R1, 0x1, RZ ;
        /*0040*/              @!P1 BRA `(.L_x_1) ;
        /*0050*/                   STS.128 [R9], R8 ;
        /*0060*/               @P0 BRA `(.L_x_0) ;
        /*0070*/                   STG.E desc[UR4][R2.64], R8 ;
        /*0080*/                   EXIT ;
"""
BRANCHES = """\
.L_x_0:
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0010*/                   BSSY B0, `(.L_x_3) ;
        /*0020*/               @P0 BRA `(.L_x_1) ;
        /*0030*/                   MUFU.EX2 R4, R4 ;
        /*0040*/                   FMUL R4, R4, R4 ;
        /*0050*/                   BSYNC B0 ;
.L_x_1:
        /*0060*/               @P2 BRA `(.L_x_2) ;
        /*0070*/                   MUFU.EX2 R4, R4 ;
.L_x_2:
        /*0080*/                   BSYNC B0 ;
.L_x_3:
        /*0090*/               @P1 BRA `(.L_x_0) ;
        /*00a0*/              @!P3 EXIT ;
.L_x_4:
        /*00b0*/                   LDG.E R4, desc[UR4][R2.64] ;
        /*00c0*/               @P1 BRA `(.L_x_4) ;
        /*00d0*/                   EXIT ;
.L_x_5:
        /*00e0*/                   BRA `(.L_x_5) ;
"""


def flow_of(text: str) -> ControlFlow:
    code, labels = parse_code(text)
    return ControlFlow(Kernel("stem", "kernel<float>", "90", 32, 0, 0, code, labels))


def test_instruction_knows_its_parts() -> None:
    code, labels = parse_code(NESTED)
    load, branch = code[1], code[4]
    assert load == Instruction(0x10, "", "LDG.E.128", "R4, desc[UR4][R2.64] ")
    assert (load.name, load.bytes) == ("LDG", 16)
    assert (branch.predicate, labels[branch.label]) == ("!P1", 0x20)
    sizes = {"LDG.E": 4, "LDG.E.U16.CONSTANT": 2, "STG.E.64": 8, "LDGSTS.E.BYPASS.128": 16}
    assert {opcode: Instruction(0, "", opcode, "").bytes for opcode in sizes} == sizes


def test_loops_are_nested() -> None:
    flow = flow_of(NESTED)
    (outer,) = flow.loops
    (inner,) = outer.inner
    assert flow.hot is outer
    assert [i.name for i in flow.listing(inner)] == ["HMMA", "IADD3", "BRA"]
    assert len(flow.listing(outer)) == 6


def test_iterations_multiply_work() -> None:
    flow = flow_of(NESTED)
    (outer,) = flow.loops
    once, whole = flow.work_of(outer), flow.whole(lambda loop: 5 if loop is outer else 4)
    assert (once.instructions, once.tensor, once.products, once.wide) == (6, 1, 2048, 1)
    assert whole.instructions == 3 + 5 * (3 + 4 * 3)
    assert whole.looped == 5 * (3 + 4 * 3)
    assert (whole.tensor, whole.moved, whole.local) == (20, 5 * 16 + 4, 5)


def test_path_is_fullest_and_shortest() -> None:
    """Both ways take one exponential; the longer one and the one without are left out."""
    flow = flow_of(BRANCHES)
    first, second = flow.loops
    work = flow.work_of(first)
    assert (work.special, work.instructions) == (1, 7)
    assert flow.work_of(second) == Work.of(flow.listing(second))


def test_loops_without_iterations_are_avoided() -> None:
    flow = flow_of(BRANCHES)
    first, second = flow.loops
    once = flow.work_of(first).instructions
    assert flow.whole(lambda loop: 1).instructions == once + 4
    short = flow.whole(lambda loop: float(loop is not second))
    assert (short.instructions, short.skipped) == (once + 1, 0)


def test_work_adds_up() -> None:
    parts = list(starmap(Work, [(1, 0, 2), (3, 1, 4)]))
    assert parts[0] + parts[1] == Work(4, 1, 6)
    assert parts[1].times(2) == Work(6, 2, 8)
