"""What JAX's compiler writes down of a Mosaic GPU kernel: its PTX, and how the host launches it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TensorMap:
    """How the copy engine sees an array in global memory (CUDA's cuTensorMapEncodeTiled), the outermost dimension first."""

    buffer: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # elements
    swizzle: int  # bytes that parts of 16 are interleaved over; 16: none
    box: tuple[int, ...]


@dataclass(frozen=True)
class Launch:
    grid: tuple[int, int, int]
    num_threads: int
    shared_memory: int  # bytes
    parameters: tuple[int | tuple[TensorMap, ...], ...]  # an array's place among operands and results, or maps
    ptx: str


def read_launch(folder: Path) -> Launch:
    """Of the one kernel whose compilation was dumped there (MOSAIC_GPU_DUMP_TO)."""
    (ptx,), (passes,) = folder.glob("*.ptx"), folder.glob("*.mlir-passes.log")
    host = passes.read_text().split("IR Dump Before GpuLaunchLoweringPass")[1].split("gpu.binary")[0]
    return _Host().run(host, ptx.read_text())


class _Host:
    """Runs the host's instructions: constants, addresses of arrays, sizes that are put in a row, and maps that are made of them."""

    def __init__(self) -> None:
        self.addresses = ""  # the value that holds the arrays' addresses, the function's second argument
        self.values: dict[str, int] = {}
        self.pointers: dict[str, tuple[str, int]] = {}  # what a value points to: an allocation, and how far into it
        self.arrays: dict[str, int] = {}  # operands, by the values that come of their addresses
        self.stored: dict[str, dict[int, int]] = {}
        self.maps: dict[str, dict[int, TensorMap]] = {}

    def run(self, text: str, ptx: str) -> Launch:
        for line in text.splitlines():
            if match := re.search(r"func\.func @\w+\(%\w+: !llvm\.ptr.*?, (%\w+): !llvm\.ptr", line):
                self.addresses = match[1]
            line = re.sub(r" loc\(.*$", "", line.strip())
            if "gpu.launch_func" in line:
                return self._launch(line, ptx)
            self._step(line)
        raise ValueError("nothing is launched")

    def _step(self, line: str) -> None:
        if match := re.match(r"(%\w+) = llvm.mlir.constant\((\d+)", line):
            self.values[match[1]] = int(match[2])
        elif match := re.match(r"(%\w+) = llvm.getelementptr (%\w+)\[(\d+)\]", line):
            base, offset = self.pointers.get(match[2], (match[2], 0))
            self.pointers[match[1]] = base, offset + int(match[3])
        elif match := re.match(r"(%\w+) = llvm.load (%\w+)", line):
            base, offset = self.pointers.get(match[2], (match[2], 0))
            if base == self.addresses:
                self.arrays[match[1]] = offset
            elif base in self.maps:
                self.maps[match[1]] = self.maps[base]
        elif match := re.match(r"llvm.store (%\w+), (%\w+)", line):
            base, offset = self.pointers.get(match[2], (match[2], 0))
            self.stored.setdefault(base, {})[offset] = self.values[match[1]]
        elif match := re.match(r"call @mosaic_gpu_init_tma_desc\((.*?)\)", line):
            place, source, _, rank, sizes, strides, swizzle, box = match[1].split(", ")
            base, offset = self.pointers.get(place, (place, 0))
            rows = (tuple(self.stored[name][i] for i in range(self.values[rank])) for name in (sizes, strides, box))
            sizes_, strides_, box_ = rows
            self.maps.setdefault(base, {})[offset] = TensorMap(self.arrays[source], sizes_, strides_, self.values[swizzle], box_)
        elif match := re.match(r"(%\w+) = [\w.]+ ([%\w]+)", line):  # the same address, cast or seen in another shape
            if match[2] in self.arrays:
                self.arrays[match[1]] = self.arrays[match[2]]
            elif match[2] in self.pointers:
                self.pointers[match[1]] = self.pointers[match[2]]
            if (put := re.match(r"(%\w+) = llvm.insertvalue (%\w+), (%\w+)", line)) and put[3] in self.arrays:
                self.arrays[put[1]] = self.arrays[put[3]]

    def _launch(self, line: str, ptx: str) -> Launch:
        numbers = [tuple(self.values[name] for name in group.split(", ")) for group in re.findall(r"in \(([^)]*)\)", line)]
        shared = re.search(r"dynamic_shared_memory_size (%\w+)", line)
        arguments = re.search(r" args\((.*)\)", line)
        assert shared and arguments
        parameters = []
        for name in re.findall(r"(%\w+) :", arguments[1]):
            maps = self.maps.get(name)
            parameters.append(self.arrays[name] if maps is None else tuple(maps[offset] for offset in sorted(maps)))
        return Launch(numbers[0], numbers[1][0], self.values[shared[1]], tuple(parameters), ptx)
