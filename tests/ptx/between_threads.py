"""Instructions that have to do with memory, barriers or other threads."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.ptx.block import Barrier, Block, NamedBarrier, Products, Step, Warp
from tests.ptx.instructions import described_places, matrix_of, product
from tests.ptx.launch import TensorMap
from tests.ptx.ordering import RaceError
from tests.ptx.registers import GLOBAL, LANES, TYPES, address_of, braced, reader, write, write_masked


def _load(parts: list[str], operands: list[str], active: Any) -> Step:
    dtype = TYPES[parts[-1]]
    targets = braced(operands[0])
    if parts[1].startswith("param"):
        number = int(re.findall(r"_param_(\d+)", operands[1])[0])

        def load_parameter(warp: Warp) -> None:
            parameter = warp.block.launch.parameters[number]
            assert isinstance(parameter, int)
            write(warp, targets[0], np.full(LANES, GLOBAL + warp.block.memory.starts[parameter], np.uint64))

        return load_parameter
    address, size = address_of(operands[1]), dtype.itemsize

    def load(warp: Warp) -> None:
        mask = active(warp)
        if not mask.any():
            return
        places = np.where(mask, address(warp), address(warp)[mask.argmax()])
        data, at = warp.block.bytes_at(places, size * len(targets))
        if data is warp.block.shared:
            warp.block.order.reads(warp.index, at)
        found = data[at].reshape(LANES, len(targets), size)
        for i, target in enumerate(targets):
            value = np.ascontiguousarray(found[:, i]).view(dtype).reshape(LANES)
            write_masked(warp, target, value, mask)

    return load


def _store(parts: list[str], operands: list[str], active: Any) -> Step:
    dtype = TYPES[parts[-1]]
    address, sources = address_of(operands[0]), [reader(name, dtype) for name in braced(operands[1])]

    def store(warp: Warp) -> None:
        mask = active(warp)
        if mask.any():
            values = np.stack([np.ascontiguousarray(read(warp)) for read in sources], axis=1)
            data, at = warp.block.bytes_at(address(warp)[mask], dtype.itemsize * len(sources))
            if data is warp.block.shared:
                warp.block.order.writes(warp.index, at)
            data[at] = values.view(np.uint8).reshape(LANES, -1)[mask]

    return store


def _ldmatrix(parts: list[str], operands: list[str], active: Any) -> Step:
    targets, address, is_transposed = braced(operands[0]), address_of(operands[1]), "trans" in parts

    def load(warp: Warp) -> None:
        data, at = warp.block.bytes_at(address(warp)[: 8 * len(targets)], 16)
        warp.block.order.reads(warp.index, at)
        rows = np.ascontiguousarray(data[at]).view(np.uint16).reshape(len(targets), 8, 8)
        for target, matrix in zip(targets, rows, strict=True):
            write(warp, target, np.ascontiguousarray(matrix_of(matrix, is_transposed=is_transposed)).view(np.uint32).reshape(LANES))

    return load


def _stmatrix(parts: list[str], operands: list[str], active: Any) -> Step:
    address, is_transposed = address_of(operands[0]), "trans" in parts
    readers = [reader(name, np.dtype(np.uint32)) for name in braced(operands[1])]

    def store(warp: Warp) -> None:
        data, at = warp.block.bytes_at(address(warp)[: 8 * len(readers)], 16)
        matrices = [np.ascontiguousarray(read(warp)).view(np.uint16).reshape(8, 8) for read in readers]
        rows = np.concatenate([matrix.T if is_transposed else matrix for matrix in matrices])
        warp.block.order.writes(warp.index, at)
        data[at] = np.ascontiguousarray(rows).view(np.uint8)

    return store


def _mma(parts: list[str], operands: list[str], active: Any) -> Step:
    assert parts[3] == "m16n8k16", parts
    dtype, word = TYPES[parts[7]], np.dtype(np.uint32)
    out, a, b, c = (braced(text) for text in operands)
    readers = [[reader(name, word) for name in group] for group in (a, b)]
    sums = [reader(name, TYPES["f32"]) for name in c]

    def multiply(warp: Warp) -> None:
        left, right = ([np.ascontiguousarray(read(warp)).view(dtype).reshape(LANES, 2) for read in group] for group in readers)
        for target, part, read in zip(out, product(left, right), sums, strict=True):
            write(warp, target, part + read(warp))

    return multiply


def _wgmma(parts: list[str], operands: list[str], active: Any) -> Step:
    if parts[1] == "commit_group":
        return lambda warp: warp.products.append(Products())
    if parts[1] == "wait_group":
        num_left = int(operands[0]) + 1  # with the open one
        return lambda warp: _multiply_all_but(warp, num_left)
    if parts[1] == "fence":
        return lambda warp: warp.touched.clear()
    assert parts[1] == "mma_async", parts
    _, columns, depth = map(int, re.fullmatch(r"m(\d+)n(\d+)k(\d+)", parts[4]).groups())  # type: ignore[union-attr]
    assert parts[5] == "f32" and depth == 16, parts
    dtype, word, wide = TYPES[parts[6]], np.dtype(np.uint32), np.dtype(np.uint64)
    out, a_in_registers = braced(operands[0]), operands[1].startswith("{")
    a = [reader(name, word if a_in_registers else wide) for name in braced(operands[1])]
    b = reader(operands[2], wide)
    adds, scale_a, scale_b, *transposes = (int(text) for text in operands[3:])
    assert (adds, scale_a, scale_b) == (1, 1, 1)
    sums = [reader(name, TYPES["f32"]) for name in out]

    registers = frozenset(out)
    factors = frozenset(braced(operands[1])) if a_in_registers else frozenset()
    shift = bool(transposes[0]) if not a_in_registers else False

    def multiply(warp: Warp, places: Sequence[np.ndarray]) -> None:
        matrix, *of_warpgroup = (warp.block.shared[place].view(dtype)[..., 0] for place in places)
        if a_in_registers:
            left = [np.ascontiguousarray(read(warp)).view(dtype).reshape(LANES, 2) for read in a]
        else:
            rows = of_warpgroup[0][16 * (warp.index % 4) :]
            left = [matrix_of(rows[8 * (i % 2) :, 8 * (i // 2) :][:8, :8], is_transposed=False) for i in range(4)]
        for place in range(columns // 8):
            right = [matrix_of(matrix[8 * place : 8 * place + 8, 8 * i : 8 * i + 8], is_transposed=False) for i in range(2)]
            for i, part in enumerate(product(left, right)):
                write(warp, out[4 * place + i], part + sums[4 * place + i](warp))

    def start(warp: Warp) -> None:
        """A group is done by itself at any time until it is waited for: here at once, or as late as may be. Descriptors are read at the start."""
        group, order = warp.products[-1], warp.block.order
        if unordered := warp.touched & (registers | factors):
            raise RaceError(f"warp {warp.index} used registers {sorted(unordered)[:4]} of a product without a wgmma.fence after it")
        places = [described_places(int(b(warp)[0]), columns, is_transposed=bool(transposes[-1]))]
        if not a_in_registers:
            places.append(described_places(int(a[0](warp)[0]), 64, is_transposed=shift))
        group.last = order.product_begins(warp.index)
        for place in places:  # nothing says that a warp's part of a product reads no more of the factors than it needs
            order.product_reads(warp.index, group.last, place[..., 0])
        group.sums |= registers
        group.factors |= factors
        is_first = not any(each.waiting for each in warp.products)
        warp.sums |= registers
        warp.factors |= factors
        if is_first and warp.block.random.random() < 0.5:
            multiply(warp, places)
        else:
            group.waiting.append(lambda: multiply(warp, places))

    return start


def _multiply_all_but(warp: Warp, num_groups: int) -> None:
    """Does the products of all groups but the last ones."""
    while len(warp.products) > num_groups:
        group = warp.products.pop(0)
        for multiply in group.waiting:
            multiply()
        if group.last:
            warp.block.order.product_is_done(warp.index, group.last)
    warp.sums = set[str]().union(*(group.sums for group in warp.products))
    warp.factors = set[str]().union(*(group.factors for group in warp.products))


def _shuffle(parts: list[str], operands: list[str], active: Any) -> Step:
    source, other = reader(operands[1], np.dtype(np.uint32)), reader(operands[2], np.dtype(np.int32))
    target = operands[0].split("|")[0]

    def shuffle(warp: Warp) -> None:
        lane = np.arange(LANES)
        place = lane ^ other(warp) if "bfly" in parts else other(warp)
        write(warp, target, source(warp)[place])

    return shuffle


def _elect(parts: list[str], operands: list[str], active: Any) -> Step:
    target, predicate = operands[0].split("|")

    def elect(warp: Warp) -> None:
        write(warp, target, np.zeros(LANES, np.uint32))
        write(warp, predicate, np.arange(LANES) == 0)

    return elect


def _block_barrier(parts: list[str], operands: list[str], active: Any) -> Step:
    number = reader(operands[0], np.dtype(np.int32))
    threads = reader(operands[1], np.dtype(np.int32)) if len(operands) > 1 else None

    def wait(warp: Warp) -> Callable[[], bool]:
        block, name = warp.block, int(number(warp)[0])
        needed = block.launch.num_threads if threads is None else int(threads(warp)[0])
        barrier = block.named.setdefault(name, NamedBarrier(block.order.nothing()))
        np.maximum(barrier.clock, block.order.release(warp.index), out=barrier.clock)
        barrier.num_threads += LANES
        if barrier.num_threads == needed:
            barrier.is_over = True
            del block.named[name]

        def is_over() -> bool:
            if barrier.is_over:
                block.order.acquire(warp.index, barrier.clock)
            return barrier.is_over

        return is_over

    return wait


def _mbarrier(parts: list[str], operands: list[str], active: Any) -> Step:
    kind = parts[1]
    if kind == "init":
        address, count = address_of(operands[0]), reader(operands[1], np.dtype(np.int32))

        def init(warp: Warp) -> None:
            order = warp.block.order
            for lane in np.flatnonzero(active(warp)):
                place = int(address(warp)[lane])
                made = order.made_by(warp.index)
                warp.block.barriers[place] = Barrier(int(count(warp)[lane]), place, made, order.nothing(), order.nothing())

        return init
    if kind == "try_wait":
        address, parity = address_of(operands[1]), reader(operands[2], np.dtype(np.int32))

        def wait(warp: Warp) -> Callable[[], bool]:
            barrier, wanted = _barrier_at(warp, int(address(warp)[0])), int(parity(warp)[0])
            assert (address(warp) == address(warp)[0]).all()

            def is_over() -> bool:
                if barrier.phase & 1 == wanted:
                    return False
                warp.block.order.acquire(warp.index, barrier.released)
                warp.block.order.copies_are_there(warp.index, barrier.address, barrier.num_waited_for)
                return True

            return is_over

        return wait
    assert kind == "arrive", parts
    address = address_of(operands[1])
    expects = parts[2] == "expect_tx"
    amount = reader(operands[2] if len(operands) > 2 else "1", np.dtype(np.int32))

    def arrive(warp: Warp) -> None:
        clock = warp.block.order.release(warp.index)
        for lane in np.flatnonzero(active(warp)):
            barrier, number = _barrier_at(warp, int(address(warp)[lane])), int(amount(warp)[lane])
            np.maximum(barrier.collected, clock, out=barrier.collected)
            barrier.arrive(1, number) if expects else barrier.arrive(number)

    return arrive


def _barrier_at(warp: Warp, address: int, *, is_async: bool = False) -> Barrier:
    barrier = warp.block.barriers.get(address)
    if barrier is None:
        raise RaceError(f"warp {warp.index} uses a barrier that nobody has initialised")
    warp.block.order.check_made(warp.index, barrier.made, is_async=is_async)
    return barrier


def _copy(parts: list[str], operands: list[str], active: Any) -> Step:
    """cp.async.bulk: by tensor maps, or of bytes in a row to global memory."""
    if "commit_group" in parts:
        return _commit_copies
    if "wait_group" in parts:
        num_left = int(operands[0])
        return lambda warp: warp.block.order.copies_are_done(warp.index, num_left)
    if "tensor" not in parts:
        assert parts[3] == "global", parts
        target, source, size = address_of(operands[0]), address_of(operands[1]), reader(operands[2], np.dtype(np.int64))

        def copy_row(warp: Warp) -> None:
            for lane in np.flatnonzero(active(warp)):
                count, start = int(size(warp)[lane]), int(source(warp)[lane])
                place = int(warp.block.memory.at(target(warp)[lane : lane + 1] - GLOBAL, count)[0])
                warp.block.order.copy_reads(warp.index, np.arange(start, start + count))
                warp.block.memory.data[place : place + count] = warp.block.shared[start : start + count]

        return copy_row
    loads = "mbarrier::complete_tx::bytes" in ".".join(parts)
    described = operands[1] if loads else operands[0]
    name, coordinates = re.match(r"\[\s*([%\w]+)\s*,\s*\{(.*?)\}\s*\]", described).groups()  # type: ignore[union-attr]
    which, at = reader(name, np.dtype(np.int64)), [reader(c.strip(), np.dtype(np.int32)) for c in coordinates.split(",")]
    shared = address_of(operands[0] if loads else operands[1])
    barrier = address_of(operands[2]) if loads else None

    def copy(warp: Warp) -> None:
        block = warp.block
        for lane in np.flatnonzero(active(warp)):
            tensor = block.maps[int(which(warp)[lane])]
            origin = [int(read(warp)[lane]) for read in reversed(at)]
            start = int(shared(warp)[lane])
            move = _move(block, tensor, origin, start, loads=barrier is not None)
            if barrier is None:
                block.order.copy_reads(warp.index, move.places)
                move.run()
            else:
                arrived = _barrier_at(warp, int(barrier(warp)[lane]), is_async=True)
                arrived.num_copies += 1
                block.order.copy_writes(warp.index, move.places.reshape(-1), arrived.address, arrived.num_copies)
                block.copies.append(lambda move=move, arrived=arrived: (move.run(), arrived.complete(move.size)))

    return copy


def _commit_copies(warp: Warp) -> None:
    warp.block.order.groups[warp.index] += 1


@dataclass(frozen=True)
class _Move:
    """A copy: of so many bytes, to or from these places of shared memory."""

    size: int
    places: np.ndarray
    run: Callable[[], None]


def _move(block: Block, tensor: TensorMap, origin: Sequence[int], start: int, *, loads: bool) -> _Move:
    """Copies a box. Outside of the array it is read as zeros, and not written."""
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
    kept = block.memory.at(source[is_inside])

    def load() -> None:
        block.shared[place] = 0
        block.shared[place[is_inside]] = block.memory.data[kept]

    def store() -> None:
        block.memory.data[kept] = block.shared[place[is_inside]]

    return _Move(place.size, place if loads else place[is_inside], load if loads else store)


_ATOMIC: dict[str, Callable[..., Any]] = {
    "add": lambda old, value: old + value,
    "inc": lambda old, limit: np.where(old >= limit, 0, old + 1),
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "exch": lambda old, value: value,
    "cas": lambda old, expected, value: np.where(old == expected, value, old),
}


def _atomic(parts: list[str], operands: list[str], active: Any) -> Step:
    """atom and red: of each thread's place what was there, then what becomes of it, one thread after the other."""
    dtype = TYPES[parts[-1]]
    target, *rest = operands if parts[0] == "atom" else ["_", *operands]
    address, values = address_of(rest[0]), [reader(text, dtype) for text in rest[1:]]
    operate = next(_ATOMIC[part] for part in parts if part in _ATOMIC)

    def change(warp: Warp) -> None:
        mask, found = active(warp), np.zeros(LANES, dtype)
        for lane in np.flatnonzero(mask):
            data, at = warp.block.bytes_at(address(warp)[lane : lane + 1], dtype.itemsize)
            old = data[at[0]].view(dtype)
            found[lane] = old[0]
            data[at[0]] = np.asarray(operate(old, *(read(warp)[lane] for read in values))).astype(dtype).reshape(1).view(np.uint8)
        write_masked(warp, target, found, mask)

    return change


def _fence(parts: list[str], operands: list[str], active: Any) -> Step:
    if parts[1:3] == ["proxy", "async"]:
        return lambda warp: warp.block.order.fence_async(warp.index)
    if parts[1] == "mbarrier_init":
        return lambda warp: warp.block.order.fence_barriers(warp.index)
    raise NotImplementedError(".".join(parts))


def _nothing(parts: list[str], operands: list[str], active: Any) -> Step:
    return lambda warp: None


def _trap(parts: list[str], operands: list[str], active: Any) -> Step:
    def stop(warp: Warp) -> None:
        if active(warp).any():
            raise RuntimeError("trap")

    return stop


CONTROL: dict[str, Callable[[list[str], list[str], Any], Step]] = {
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
    "atom": _atomic,
    "red": _atomic,
    "fence": _fence,
    "membar": _nothing,
    "prefetch": _nothing,
    "setmaxnreg": _nothing,
    "trap": _trap,
    "ret": lambda *_: lambda warp: -1,
}
