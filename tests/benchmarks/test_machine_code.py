"""Which instructions benchmarks.machine_code takes for a loop's."""

from __future__ import annotations

from benchmarks.machine_code import find_loops


def disassembled(*lines: str) -> str:
    """A label by itself, else an instruction, as nvdisasm prints them."""
    return "\n".join(line if line.endswith(":") else f"        /*{16 * i:04x}*/   {line} ;" for i, line in enumerate(lines))


def test_a_loop_is_what_lies_between_a_label_and_a_branch_back_to_it():
    code = disassembled("MOV R1, c[0x0]", ".L_x_1:", "UTMALDG.4D [UR8]", "IADD R2, R2, 1", "@P1 BRA `(.L_x_1)", "EXIT")
    assert find_loops(code) == [["UTMALDG.4D [UR8]", "IADD R2, R2, 1", "@P1 BRA `(.L_x_1)"]]


def test_the_slow_way_of_a_wait_behind_the_kernels_end_is_no_loop():
    hot = (".L_x_1:", "SYNCS.TRYWAIT P0, [R3]", "@!P0 BRA `(.L_x_9)", ".L_x_2:", "UTMALDG.4D [UR8]", "@P1 BRA `(.L_x_1)", "EXIT")
    waiting = (".L_x_9:", "SYNCS.TRYWAIT P0, [R3]", "@!P0 BRA `(.L_x_9)", "BRA `(.L_x_2)")
    lengths = [len(loop) for loop in find_loops(disassembled(*hot, *waiting))]
    assert lengths == [4, 2]  # the tile's, and the wait's own; `BRA .L_x_2` would be a shorter one that copies


def test_arithmetic_that_a_branch_passes_over_is_not_a_tiles():
    code = disassembled(".L_x_1:", "HGMMA", "@!P2 BRA `(.L_x_3)", "FMUL R1, R1, R2", "FMUL R2, R2, R2", ".L_x_3:", "@P1 BRA `(.L_x_1)")
    assert find_loops(code) == [["HGMMA", "@!P2 BRA `(.L_x_3)", "@P1 BRA `(.L_x_1)"]]
