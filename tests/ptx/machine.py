"""Runs a kernel's PTX: a block's warps by turns, each until it waits, with shared memory, barriers and the copy engine.

An instruction that isn't known, a branch that a warp's threads don't agree on, an address outside of what there is, and warps that all wait are
errors. Copies arrive as late as they may: when every warp waits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from tests.ptx.instructions import described_matrix, matrix_of, product
from tests.ptx.launch import Launch, TensorMap

LANES = 32
_GLOBAL, _MAPS = 1 << 32, 1 << 44  # where global memory begins, and tensor maps
_FLOATS = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
}
_INTEGERS = {
    f"{sign}{bits}": np.dtype(f"{kind}{bits // 8}") for sign, kind in (("u", "u"), ("s", "i"), ("b", "u")) for bits in (8, 16, 32, 64)
}
_TYPES = _FLOATS | _INTEGERS
_REGISTER = {"%rs": np.uint16, "%rd": np.uint64, "%r": np.uint32, "%p": np.bool_}


def run(launch: Launch, arrays: Sequence[np.ndarray]) -> None:
    """Runs all blocks, one after the other. Results are written into their arrays, which follow the operands; one of them may be an operand."""
    memory = _Memory.of(arrays)
    program = _Program.of(launch.ptx)
    with np.errstate(all="ignore"):
        _run_blocks(launch, program, memory)
    memory.write_back(arrays)


def _run_blocks(launch: Launch, program: _Program, memory: _Memory) -> None:
    for z in range(launch.grid[2]):
        for y in range(launch.grid[1]):
            for x in range(launch.grid[0]):
                _Block(launch, program, memory, (x, y, z)).run()


@dataclass
class _Memory:
    """Global memory: arrays one after the other, with gaps that no one may touch."""

    data: np.ndarray
    starts: list[int]
    sizes: list[int]
    item_sizes: list[int]

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray]) -> _Memory:
        starts, place = [], 256
        for i, array in enumerate(arrays):
            before = next((j for j in range(i) if arrays[j] is array), None)
            starts.append(place if before is None else starts[before])
            place += 0 if before is not None else -(-array.nbytes // 256) * 256 + 256
        data = np.zeros(place, np.uint8)
        for start, array in zip(starts, arrays, strict=True):
            data[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return cls(data, starts, [array.nbytes for array in arrays], [array.itemsize for array in arrays])

    def write_back(self, arrays: Sequence[np.ndarray]) -> None:
        for start, array in zip(self.starts, arrays, strict=True):
            array[...] = self.data[start : start + array.nbytes].view(array.dtype).reshape(array.shape)

    def check(self, addresses: np.ndarray, size: int) -> None:
        low, high = int(addresses.min()), int(addresses.max()) + size
        if not any(start <= low and high <= start + length for start, length in zip(self.starts, self.sizes, strict=True)):
            raise IndexError(f"global memory from {low} to {high} is no array's")


@dataclass
class _Barrier:
    """An mbarrier."""

    expected: int
    pending: int = 0
    bytes: int = 0
    phase: int = 0

    def __post_init__(self) -> None:
        self.pending = self.expected

    def arrive(self, count: int = 1, expected_bytes: int = 0) -> None:
        self.bytes += expected_bytes
        self.pending -= count
        assert self.pending >= 0, "more arrive than a phase has"
        self._turn()

    def complete(self, size: int) -> None:
        self.bytes -= size
        self._turn()

    def _turn(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.expected, self.phase + 1


@dataclass
class _Warp:
    block: _Block
    index: int
    registers: dict[str, np.ndarray] = field(default_factory=dict)

    def get(self, name: str) -> np.ndarray:
        """What was never written is anything: as a number, NaN."""
        found = self.registers.get(name)
        return np.full(LANES, -1).astype(_kind(name)) if found is None else found


class _Block:
    def __init__(self, launch: Launch, program: _Program, memory: _Memory, place: tuple[int, int, int]) -> None:
        self.launch, self.program, self.memory, self.place = launch, program, memory, place
        self.shared = np.full(launch.shared_memory, 0xFF, np.uint8)  # NaN in every type
        self.barriers: dict[int, _Barrier] = {}
        self.named: dict[int, int] = {}  # threads that have come to a barrier of the block's
        self.passed: dict[int, int] = {}  # how often it let them through
        self.copies: list[Callable[[], None]] = []
        self.maps: dict[int, TensorMap] = {}
        for parameter in launch.parameters:
            if isinstance(parameter, tuple):
                self.maps = {_MAPS + 128 * i: each for i, each in enumerate(parameter)}

    def run(self) -> None:
        warps = [_Warp(self, i) for i in range(self.launch.num_threads // LANES)]
        running = [self._steps(warp) for warp in warps]
        waits: list[Callable[[], bool] | None] = [None] * len(warps)
        alive = set(range(len(warps)))
        while alive:
            has_moved = False
            for i in sorted(alive):
                wait = waits[i]
                if wait is not None and not wait():
                    continue
                has_moved = True
                try:
                    waits[i] = next(running[i])
                except StopIteration:
                    alive.remove(i)
            if not has_moved:
                if not self.copies:
                    raise RuntimeError(f"warps {sorted(alive)} wait for ever")
                self.copies.pop(0)()
        for copy in self.copies:
            copy()

    def _steps(self, warp: _Warp) -> Iterator[Callable[[], bool]]:
        steps, place = self.program.steps, 0
        while place < len(steps):
            found = steps[place](warp)
            if found is None:
                place += 1
            elif callable(found):
                place += 1
                if not found():
                    yield found
            elif found < 0:
                return
            else:
                place = found

    def bytes_at(self, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """The memory that addresses lie in, and the places of their bytes, [..., size]."""
        addresses = addresses.astype(np.int64)
        if addresses.size and addresses.min() >= _GLOBAL:
            addresses = addresses - _GLOBAL
            self.memory.check(addresses, size)
            data = self.memory.data
        else:
            data = self.shared
        assert not (addresses % size).any(), "aligned"
        return data, addresses[..., None] + np.arange(size)


Step = Callable[[_Warp], Any]


@dataclass
class _Program:
    steps: list[Step]

    @classmethod
    def of(cls, ptx: str) -> _Program:
        text = re.sub(r"//.*", "", ptx[ptx.index(".entry") :])
        body = text[text.index("\n{") + 2 : text.index("$L__func_end")].rstrip().removesuffix("}")
        body = re.sub(r"^\s*\.(loc|reg|pragma|shared|file|section)\b.*$", "", body, flags=re.MULTILINE)
        # What waits for a barrier is a loop around one instruction: it becomes that instruction.
        body = re.sub(r"\{\s*LAB_WAIT:\s*(mbarrier\.try_wait.*?;).*?DONE:\s*\}", r"\1", body, flags=re.DOTALL)
        # And so does a product, from what says whether it adds to what there is.
        body = re.sub(r"\{\s*\.reg \.pred p; setp\.ne\.b32 p, (\S+), 0; (wgmma[^;]*), p, ([^;]*);\s*\}", r"\2, \1, \3;", body)
        body = re.sub(r"^\s*[{}]\s*$", "", body, flags=re.MULTILINE)
        body = re.sub(r"\bresult_pair(\d+)", r"%rpair\1", body)  # a name of inline assembly's own
        body = re.sub(r"\$L__tmp\d+:|\$L__func_\w+:", "", body)
        labels: dict[str, int] = {}
        lines: list[str] = []
        for piece in re.split(r";|(?<=:)\s", body):
            line = " ".join(piece.split())
            if line.endswith(":"):
                labels[line[:-1]] = len(lines)
            elif line:
                lines.append(line)
        return cls([_step(line, labels) for line in lines])


def _step(line: str, labels: dict[str, int]) -> Step:
    guard = re.match(r"@(!?)(%\w+)\s+(.*)", line)
    text = guard[3] if guard else line
    name, _, rest = text.partition(" ")
    operands = _operands(rest)

    def active(warp: _Warp) -> np.ndarray:
        if guard is None:
            return _ALL
        return warp.get(guard[2]) ^ bool(guard[1])

    parts = name.split(".")
    if parts[0] == "bra":
        target = labels[operands[0]]

        def branch(warp: _Warp) -> int | None:
            mask = active(warp)
            assert mask.all() or not mask.any(), f"threads of a warp part at {line}"
            return target if mask.all() else None

        return branch
    if parts[0] in _CONTROL:
        return _CONTROL[parts[0]](parts, operands, active)
    compute = _arithmetic(parts, operands)
    if guard is None:
        return compute

    def guarded(warp: _Warp) -> None:
        mask = active(warp)
        before = dict(warp.registers)
        compute(warp)
        for register, value in warp.registers.items():
            if (old := before.get(register)) is not value:
                warp.registers[register] = value if old is None else np.where(mask, value, old)

    return guarded


_ALL = np.ones(LANES, bool)


def _operands(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    found, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            found.append(text[start:i].strip())
            start = i + 1
    return [*found, text[start:].strip()] if text.strip() else []


def _kind(register: str) -> Any:
    return next(kind for prefix, kind in _REGISTER.items() if register.startswith(prefix))


def _constant(text: str, dtype: np.dtype) -> np.ndarray:
    if text.startswith("0f"):
        bits = np.uint32(int(text[2:], 16))
        value = np.full(LANES, bits).view(np.float32)
        return value if dtype == np.float32 else value.view(dtype)
    number = int(text, 0)
    bits = np.array([number & (2 ** (8 * dtype.itemsize) - 1)], f"u{dtype.itemsize}")
    return np.repeat(bits.view(dtype), LANES)


def _reader(text: str, dtype: np.dtype) -> Callable[[_Warp], np.ndarray]:
    """Of a register or a constant, as this type."""
    if text.startswith("%"):
        if text in _SPECIAL:
            special = _SPECIAL[text]
            return lambda warp: special(warp).astype(dtype)
        if dtype == np.bool_:
            return lambda warp: warp.get(text)

        def read(warp: _Warp) -> np.ndarray:
            value = warp.get(text)
            if value.dtype.itemsize == dtype.itemsize:
                return value.view(dtype)
            return value.astype(f"u{dtype.itemsize}").view(dtype)  # the lower part

        return read
    if re.match(r"^-?\d|^0[fx]", text):
        value = _constant(text, dtype)
        return lambda warp: value
    if "dynamic_shmem" in text:
        return lambda warp: np.zeros(LANES, dtype)
    if match := re.search(r"_param_(\d+)$", text):  # its address: of tensor maps alone
        assert match
        return lambda warp: np.full(LANES, _MAPS, dtype)
    raise NotImplementedError(text)


_SPECIAL: dict[str, Callable[[_Warp], np.ndarray]] = {
    "%tid.x": lambda warp: np.arange(LANES) + LANES * warp.index,
    **{f"%ctaid.{axis}": lambda warp, i=i: np.full(LANES, warp.block.place[i]) for i, axis in enumerate("xyz")},
    **{f"%nctaid.{axis}": lambda warp, i=i: np.full(LANES, warp.block.launch.grid[i]) for i, axis in enumerate("xyz")},
}


def _write(warp: _Warp, register: str, value: np.ndarray) -> None:
    if register != "_":
        kind = np.dtype(_kind(register))
        if value.dtype != kind:
            if value.dtype == np.bool_ or value.dtype.itemsize < kind.itemsize:
                value = value.view(f"u{value.dtype.itemsize}").astype(kind)
            else:
                value = np.ascontiguousarray(value).view(kind)
        warp.registers[register] = value


def _address(text: str) -> Callable[[_Warp], np.ndarray]:
    inner = text.strip("[] ")
    base, _, offset = inner.partition("+")
    read = _reader(base, np.dtype(np.uint64))
    number = int(offset or 0)
    return lambda warp: read(warp).astype(np.int64) + number


def _braced(text: str) -> list[str]:
    return [name.strip() for name in text.strip("{} ").split(",")]


# Instructions that have to do with memory, barriers or other threads.


def _load(parts: list[str], operands: list[str], active: Any) -> Step:
    dtype = _TYPES[parts[-1]]
    targets = _braced(operands[0])
    if parts[1].startswith("param"):
        number = int(re.findall(r"_param_(\d+)", operands[1])[0])

        def load_parameter(warp: _Warp) -> None:
            parameter = warp.block.launch.parameters[number]
            assert isinstance(parameter, int)
            _write(warp, targets[0], np.full(LANES, _GLOBAL + warp.block.memory.starts[parameter], np.uint64))

        return load_parameter
    address, size = _address(operands[1]), dtype.itemsize

    def load(warp: _Warp) -> None:
        mask = active(warp)
        if not mask.any():
            return
        places = np.where(mask, address(warp), address(warp)[mask.argmax()])
        data, at = warp.block.bytes_at(places, size * len(targets))
        found = data[at].reshape(LANES, len(targets), size)
        for i, target in enumerate(targets):
            value = np.ascontiguousarray(found[:, i]).view(dtype).reshape(LANES)
            _write_masked(warp, target, value, mask)

    return load


def _write_masked(warp: _Warp, register: str, value: np.ndarray, mask: np.ndarray) -> None:
    old = warp.registers.get(register)
    _write(warp, register, value)
    if old is not None and not mask.all():
        warp.registers[register] = np.where(mask, warp.registers[register], old)


def _store(parts: list[str], operands: list[str], active: Any) -> Step:
    dtype = _TYPES[parts[-1]]
    address, sources = _address(operands[0]), [_reader(name, dtype) for name in _braced(operands[1])]

    def store(warp: _Warp) -> None:
        mask = active(warp)
        if mask.any():
            values = np.stack([np.ascontiguousarray(read(warp)) for read in sources], axis=1)
            data, at = warp.block.bytes_at(address(warp)[mask], dtype.itemsize * len(sources))
            data[at] = values.view(np.uint8).reshape(LANES, -1)[mask]

    return store


def _ldmatrix(parts: list[str], operands: list[str], active: Any) -> Step:
    targets, address, is_transposed = _braced(operands[0]), _address(operands[1]), "trans" in parts

    def load(warp: _Warp) -> None:
        data, at = warp.block.bytes_at(address(warp)[: 8 * len(targets)], 16)
        rows = np.ascontiguousarray(data[at]).view(np.uint16).reshape(len(targets), 8, 8)
        for target, matrix in zip(targets, rows, strict=True):
            _write(warp, target, np.ascontiguousarray(matrix_of(matrix, is_transposed=is_transposed)).view(np.uint32).reshape(LANES))

    return load


def _stmatrix(parts: list[str], operands: list[str], active: Any) -> Step:
    address, is_transposed = _address(operands[0]), "trans" in parts
    readers = [_reader(name, np.dtype(np.uint32)) for name in _braced(operands[1])]

    def store(warp: _Warp) -> None:
        data, at = warp.block.bytes_at(address(warp)[: 8 * len(readers)], 16)
        matrices = [np.ascontiguousarray(read(warp)).view(np.uint16).reshape(8, 8) for read in readers]
        rows = np.concatenate([matrix.T if is_transposed else matrix for matrix in matrices])
        data[at] = np.ascontiguousarray(rows).view(np.uint8)

    return store


def _mma(parts: list[str], operands: list[str], active: Any) -> Step:
    assert parts[3] == "m16n8k16", parts
    dtype, word = _TYPES[parts[7]], np.dtype(np.uint32)
    out, a, b, c = (_braced(text) for text in operands)
    readers = [[_reader(name, word) for name in group] for group in (a, b)]
    sums = [_reader(name, _TYPES["f32"]) for name in c]

    def multiply(warp: _Warp) -> None:
        left, right = ([np.ascontiguousarray(read(warp)).view(dtype).reshape(LANES, 2) for read in group] for group in readers)
        for target, part, read in zip(out, product(left, right), sums, strict=True):
            _write(warp, target, part + read(warp))

    return multiply


def _wgmma(parts: list[str], operands: list[str], active: Any) -> Step:
    if parts[1] != "mma_async":  # products are done when they are started
        return lambda warp: None
    _, columns, depth = map(int, re.fullmatch(r"m(\d+)n(\d+)k(\d+)", parts[4]).groups())  # type: ignore[union-attr]
    assert parts[5] == "f32" and depth == 16, parts
    dtype, word, wide = _TYPES[parts[6]], np.dtype(np.uint32), np.dtype(np.uint64)
    out, a_in_registers = _braced(operands[0]), operands[1].startswith("{")
    a = [_reader(name, word if a_in_registers else wide) for name in _braced(operands[1])]
    b = _reader(operands[2], wide)
    adds, scale_a, scale_b, *transposes = (int(text) for text in operands[3:])
    assert (adds, scale_a, scale_b) == (1, 1, 1)
    sums = [_reader(name, _TYPES["f32"]) for name in out]

    def multiply(warp: _Warp) -> None:
        if a_in_registers:
            left = [np.ascontiguousarray(read(warp)).view(dtype).reshape(LANES, 2) for read in a]
        else:
            rows = described_matrix(warp.block.shared, int(a[0](warp)[0]), 64, is_transposed=bool(transposes[0]))[16 * warp.index % 64 :][
                :16
            ]
            left = [matrix_of(rows[8 * (i % 2) :, 8 * (i // 2) :][:8, :8].view(dtype), is_transposed=False) for i in range(4)]
        matrix = described_matrix(warp.block.shared, int(b(warp)[0]), columns, is_transposed=bool(transposes[-1])).view(dtype)
        for place in range(columns // 8):
            right = [matrix_of(matrix[8 * place : 8 * place + 8, 8 * i : 8 * i + 8], is_transposed=False) for i in range(2)]
            for i, part in enumerate(product(left, right)):
                _write(warp, out[4 * place + i], part + sums[4 * place + i](warp))

    return multiply


def _shuffle(parts: list[str], operands: list[str], active: Any) -> Step:
    source, other = _reader(operands[1], np.dtype(np.uint32)), _reader(operands[2], np.dtype(np.int32))
    target = operands[0].split("|")[0]

    def shuffle(warp: _Warp) -> None:
        lane = np.arange(LANES)
        place = lane ^ other(warp) if "bfly" in parts else other(warp)
        _write(warp, target, source(warp)[place])

    return shuffle


def _elect(parts: list[str], operands: list[str], active: Any) -> Step:
    target, predicate = operands[0].split("|")

    def elect(warp: _Warp) -> None:
        _write(warp, target, np.zeros(LANES, np.uint32))
        _write(warp, predicate, np.arange(LANES) == 0)

    return elect


def _block_barrier(parts: list[str], operands: list[str], active: Any) -> Step:
    number = _reader(operands[0], np.dtype(np.int32))
    threads = _reader(operands[1], np.dtype(np.int32)) if len(operands) > 1 else None

    def wait(warp: _Warp) -> Callable[[], bool]:
        block, name = warp.block, int(number(warp)[0])
        needed = block.launch.num_threads if threads is None else int(threads(warp)[0])
        before = block.passed.get(name, 0)
        block.named[name] = block.named.get(name, 0) + LANES
        if block.named[name] == needed:
            block.named[name], block.passed[name] = 0, before + 1
        return lambda: block.passed.get(name, 0) > before

    return wait


def _mbarrier(parts: list[str], operands: list[str], active: Any) -> Step:
    kind = parts[1]
    if kind == "init":
        address, count = _address(operands[0]), _reader(operands[1], np.dtype(np.int32))

        def init(warp: _Warp) -> None:
            for lane in np.flatnonzero(active(warp)):
                warp.block.barriers[int(address(warp)[lane])] = _Barrier(int(count(warp)[lane]))

        return init
    if kind == "try_wait":
        address, parity = _address(operands[1]), _reader(operands[2], np.dtype(np.int32))

        def wait(warp: _Warp) -> Callable[[], bool]:
            barrier, wanted = warp.block.barriers[int(address(warp)[0])], int(parity(warp)[0])
            assert (address(warp) == address(warp)[0]).all()
            return lambda: barrier.phase & 1 != wanted

        return wait
    assert kind == "arrive", parts
    address = _address(operands[1])
    expects = parts[2] == "expect_tx"
    amount = _reader(operands[2] if len(operands) > 2 else "1", np.dtype(np.int32))

    def arrive(warp: _Warp) -> None:
        for lane in np.flatnonzero(active(warp)):
            barrier, number = warp.block.barriers[int(address(warp)[lane])], int(amount(warp)[lane])
            barrier.arrive(1, number) if expects else barrier.arrive(number)

    return arrive


def _copy(parts: list[str], operands: list[str], active: Any) -> Step:
    """cp.async.bulk: by tensor maps, or of bytes in a row to global memory."""
    if "commit_group" in parts:
        return lambda warp: None
    if "wait_group" in parts:  # copies to global memory are made when they are asked for
        return lambda warp: None
    if "tensor" not in parts:
        assert parts[3] == "global", parts
        target, source, size = _address(operands[0]), _address(operands[1]), _reader(operands[2], np.dtype(np.int64))

        def copy_row(warp: _Warp) -> None:
            for lane in np.flatnonzero(active(warp)):
                count, start = int(size(warp)[lane]), int(source(warp)[lane])
                place = int(target(warp)[lane]) - _GLOBAL
                warp.block.memory.check(np.array([place]), count)
                warp.block.memory.data[place : place + count] = warp.block.shared[start : start + count]

        return copy_row
    loads = "mbarrier::complete_tx::bytes" in ".".join(parts)
    described = operands[1] if loads else operands[0]
    name, coordinates = re.match(r"\[\s*([%\w]+)\s*,\s*\{(.*?)\}\s*\]", described).groups()  # type: ignore[union-attr]
    which, at = _reader(name, np.dtype(np.int64)), [_reader(c.strip(), np.dtype(np.int32)) for c in coordinates.split(",")]
    shared = _address(operands[0] if loads else operands[1])
    barrier = _address(operands[2]) if loads else None

    def copy(warp: _Warp) -> None:
        block = warp.block
        for lane in np.flatnonzero(active(warp)):
            tensor = block.maps[int(which(warp)[lane])]
            origin = [int(read(warp)[lane]) for read in reversed(at)]
            start = int(shared(warp)[lane])
            if barrier is None:
                _move(block, tensor, origin, start, loads=False)
            else:
                arrived = block.barriers[int(barrier(warp)[lane])]
                block.copies.append(lambda t=tensor, o=origin, s=start, b=arrived: b.complete(_move(block, t, o, s, loads=True)))

    return copy


def _move(block: _Block, tensor: TensorMap, origin: Sequence[int], start: int, *, loads: bool) -> int:
    """Copies a box, and gives its bytes. Outside of the array it is read as zeros, and not written."""
    size = block.memory.item_sizes[tensor.buffer]
    index = np.indices(tensor.box).reshape(len(tensor.box), -1) + np.array(origin)[:, None]
    is_inside = ((index >= 0) & (index < np.array(tensor.sizes)[:, None])).all(axis=0)
    elements = (index * np.array(tensor.strides)[:, None]).sum(axis=0)
    source = block.memory.starts[tensor.buffer] + elements[:, None] * size + np.arange(size)
    place = start + np.arange(index.shape[1] * size)
    assert start % (128 if tensor.swizzle == 16 else 8 * tensor.swizzle) == 0, "tiles begin where their parts' order does"
    if tensor.swizzle > 16:
        assert tensor.box[-1] * size == tensor.swizzle, "a row of a tile is what its parts are interleaved over"
        place = place ^ (place >> 3 & tensor.swizzle - 16)
    place = place.reshape(-1, size)
    block.memory.check(source[is_inside], 1)
    if loads:
        block.shared[place] = np.where(is_inside[:, None], block.memory.data[np.where(is_inside[:, None], source, 0)], 0)
    else:
        block.memory.data[source[is_inside]] = block.shared[place[is_inside]]
    return place.size


def _nothing(parts: list[str], operands: list[str], active: Any) -> Step:
    return lambda warp: None


_CONTROL: dict[str, Callable[[list[str], list[str], Any], Step]] = {
    "ld": _load,
    "st": _store,
    "ldmatrix": _ldmatrix,
    "stmatrix": _stmatrix,
    "mma": _mma,
    "wgmma": _wgmma,
    "shfl": _shuffle,
    "elect": _elect,
    "bar": _block_barrier,
    "mbarrier": _mbarrier,
    "cp": _copy,
    "fence": _nothing,
    "prefetch": _nothing,
    "setmaxnreg": _nothing,
    "ret": lambda *_: lambda warp: -1,
}


# Instructions of a thread by itself.


def _arithmetic(parts: list[str], operands: list[str]) -> Step:
    name, kind = parts[0], parts[-1]
    if name in ("mov", "cvta"):
        return _move_registers(kind, operands)
    if name == "cvt":
        return _convert(parts, operands)
    if name == "setp":
        compare = _COMPARISONS[parts[1]]
        a, b = (_reader(text, _TYPES[kind]) for text in operands[1:])
        return lambda warp: _write(warp, operands[0], compare(a(warp), b(warp)))
    if name == "selp":
        a, b = (_reader(text, _TYPES[kind]) for text in operands[1:3])
        return lambda warp: _write(warp, operands[0], np.where(warp.get(operands[3]), a(warp), b(warp)))
    if kind == "pred":
        readers = [_reader(text, np.dtype(bool)) for text in operands[1:]]
        combine = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not}[name]
        return lambda warp: _write(warp, operands[0], combine(*(read(warp) for read in readers)))
    if kind.endswith("x2"):  # pairs
        dtype = _TYPES[kind[:-2]]
        whole = np.dtype(f"u{2 * dtype.itemsize}")
        pairs = [_reader(text, whole) for text in operands[1:]]
        operate = _OPERATIONS[name]
        return lambda warp: _write(
            warp,
            operands[0],
            np.ascontiguousarray(operate(*(np.ascontiguousarray(r(warp)).view(dtype) for r in pairs)).astype(dtype)).view(whole),
        )
    dtype = _TYPES[kind]
    readers = [_reader(text, dtype) for text in operands[1:]]
    if name in ("shl", "shr"):
        readers[1] = _reader(operands[2], np.dtype(np.uint32))
    if name == "bfe":
        readers[1:] = [_reader(text, np.dtype(np.uint32)) for text in operands[2:]]
    if name in ("mul", "mad") and parts[1] in ("wide", "hi", "lo"):
        return _products(parts, operands, readers, dtype)
    if name == "lop3":
        table = int(operands[4], 0)
        return lambda warp: _write(warp, operands[0], _lookup(table, *(read(warp) for read in readers[:3])))
    operate = (
        {"max": np.fmax, "min": np.fmin}[name] if name in ("max", "min") and dtype.kind == "f" and "NaN" not in parts else _OPERATIONS[name]
    )
    return lambda warp: _write(warp, operands[0], operate(*(read(warp) for read in readers)).astype(dtype))


def _shift_right(value: np.ndarray, by: np.ndarray) -> np.ndarray:
    return value >> np.minimum(by, 8 * value.dtype.itemsize - 1).astype(value.dtype)


def _field(value: np.ndarray, start: np.ndarray, length: np.ndarray) -> np.ndarray:
    bits = 8 * value.dtype.itemsize
    left = (bits - start.astype(np.int64) - length.astype(np.int64)).astype(value.dtype)
    return (value << left) >> (left + start.astype(value.dtype))


def _permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    both = np.stack([a, b], axis=1).view(np.uint8).reshape(LANES, 8)
    nibbles = (selector[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)) & 7
    return np.ascontiguousarray(np.take_along_axis(both, nibbles.astype(np.int64), axis=1)).view(np.uint32).reshape(LANES)


def _lookup(table: int, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    found = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            found |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return found


_OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": lambda a, b: np.divide(a, b) if a.dtype.kind == "f" else np.trunc(a / b),
    "fma": lambda a, b, c: (a.astype(np.float64) * b + c).astype(a.dtype),
    "neg": np.negative,
    "abs": np.abs,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "shl": lambda value, by: np.where(by < 8 * value.dtype.itemsize, value << by.astype(value.dtype), 0),
    "shr": _shift_right,
    "bfe": _field,
    "prmt": _permute,
    "ex2": np.exp2,
    "lg2": np.log2,
    "tanh": np.tanh,
}


_COMPARISONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "eq": np.equal,
    "ne": lambda a, b: (a < b) | (a > b),  # NaN is not even different; to `neu` it is
    "neu": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def _products(parts: list[str], operands: list[str], readers: list[Any], dtype: np.dtype) -> Step:
    which = parts[1]
    bits = 8 * dtype.itemsize
    wide = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}") if bits < 64 else np.dtype(object)
    if which == "wide" and len(operands) > 3:
        readers[2] = _reader(operands[3], wide)

    def multiply(warp: _Warp) -> None:
        a, b = (read(warp).astype(wide) for read in readers[:2])
        value = a * b
        if which == "hi":
            value = (value >> bits).astype(dtype)
        elif which == "lo":
            value = (value & (2**bits - 1)).astype(f"u{dtype.itemsize}").view(dtype)
        if len(readers) > 2:
            value = value + readers[2](warp)
        _write(warp, operands[0], value)

    return multiply


def _move_registers(kind: str, operands: list[str]) -> Step:
    if operands[0].startswith("{"):
        targets = _braced(operands[0])
        whole = _TYPES[kind]
        read, part = _reader(operands[1], whole), np.dtype(f"u{whole.itemsize // len(targets)}")

        def unpack(warp: _Warp) -> None:
            for i, target in enumerate(targets):
                _write(warp, target, np.ascontiguousarray(np.ascontiguousarray(read(warp)).view(part).reshape(LANES, -1)[:, i]))

        return unpack
    if operands[1].startswith("{"):
        sources = _braced(operands[1])
        whole = _TYPES[kind]
        part = np.dtype(f"u{whole.itemsize // len(sources)}")
        readers = [_reader(name, part) for name in sources]
        return lambda warp: _write(warp, operands[0], np.stack([read(warp) for read in readers], axis=1).view(whole).reshape(LANES))
    if kind == "pred":
        read = _reader(operands[1], np.dtype(bool))
        return lambda warp: _write(warp, operands[0], read(warp))
    read = _reader(operands[1], _TYPES[kind])
    return lambda warp: _write(warp, operands[0], read(warp))


def _convert(parts: list[str], operands: list[str]) -> Step:
    to, of = parts[-2:]
    if to.endswith("x2") and of.endswith("x2"):
        source, target = _TYPES[of[:-2]], _TYPES[to[:-2]]
        read = _reader(operands[1], np.dtype(f"u{2 * source.itemsize}"))

        def convert_pair(warp: _Warp) -> None:
            pair = np.ascontiguousarray(read(warp)).view(source).astype(target)
            _write(warp, operands[0], pair.view(f"u{2 * target.itemsize}"))

        return convert_pair
    if to.endswith("x2"):
        target = _TYPES[to[:-2]]
        high, low = (_reader(text, _TYPES[of]) for text in operands[1:3])
        whole = np.dtype(f"u{2 * target.itemsize}")
        return lambda warp: _write(warp, operands[0], np.stack([low(warp), high(warp)], axis=1).astype(target).view(whole).reshape(LANES))
    read = _reader(operands[1], _TYPES[of])
    return lambda warp: _write(warp, operands[0], read(warp).astype(_TYPES[to]))
