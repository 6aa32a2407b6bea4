"""Values in fewer bytes, without loss: exponents are entropy-coded, signs and mantissas stay as they are.

A model's values have few distinct exponents, with an entropy below 3 bits; signs and mantissas are noise. Coded values
are planes of signs and mantissas, and then

    uint8 first exponent | uint32 length | Zstandard frame of pairs | Zstandard frame of other exponents

A pair is two exponents of 15 from the first on, a nibble each; the nibble 15 says that the exponent is among the
others, in order; without any, their frame is left out. With 255 as the first exponent there are no pairs: all are among
the others. Single exponents would take a tenth more: their Huffman code wastes more of a bit, and Zstandard finds
repetitions among them that cost more than they save.
"""

from __future__ import annotations

import struct

import numpy as np
import zstandard

_LEVEL = 1  # lower ones leave Huffman codes out, higher ones only look longer for repetitions, of which there are none
_PREFIX = struct.Struct("<BI")
_OTHER, _NO_PAIRS = 15, 255
_SAMPLE = 1 << 14  # of exponents, from which their range is chosen
_FEWEST_IN_PAIRS = 0.5  # of the sample; with less the others' frame does better


class ExponentCoder:
    """For values of 2 bytes (bfloat16, and float16, of which three bits of the mantissa are coded too), 4 (float32) or
    8 (float64). Of 1 byte, such as 8-bit floats, all of it is coded. Belongs to one thread."""

    def __init__(self, bytes_per_value: int) -> None:
        self._type, self._bits = np.dtype(f"<u{bytes_per_value}"), 8 * bytes_per_value
        self._compressor, self._decompressor = zstandard.ZstdCompressor(_LEVEL), zstandard.ZstdDecompressor()

    def encode(self, data: np.ndarray) -> tuple[bytes, bytes]:
        """The planes and what codes the exponents, of uint8[bytes of whole values]."""
        if self._bits == 8:
            return b"", self._encoded(data)
        values = data.view(self._type)
        # Turned by one bit, a sign stands below the mantissa, and the exponent has a byte to itself.
        turned = ((values << 1) | (values >> (self._bits - 1))).view(np.uint8).reshape(len(values), self._type.itemsize)
        return np.ascontiguousarray(turned[:, :-1].T).tobytes(), self._encoded(np.ascontiguousarray(turned[:, -1]))

    def decode(self, coded: memoryview | bytes, data: np.ndarray) -> None:
        """Write the values to uint8[their bytes]. Raises `ValueError` for what `encode` did not give."""
        values = data.view(self._type)
        num_values, num_planes = len(values), self._type.itemsize - 1
        planes = np.frombuffer(coded, np.uint8, num_planes * num_values)
        try:
            exponents = self._decoded(coded[planes.size :], num_values)
        except (struct.error, zstandard.ZstdError) as error:
            raise ValueError(str(error)) from error
        if self._bits == 8:
            data[:] = exponents
            return
        turned = np.empty((num_values, num_planes + 1), np.uint8)
        turned[:, :-1] = planes.reshape(num_planes, num_values).T
        turned[:, -1] = exponents
        words = turned.view(self._type)[:, 0]
        np.bitwise_or(words >> 1, words << (self._bits - 1), out=values)

    def _encoded(self, exponents: np.ndarray) -> bytes:
        first, share = _range(exponents)
        if share < _FEWEST_IN_PAIRS:
            return _PREFIX.pack(_NO_PAIRS, 0) + self._compressor.compress(exponents.tobytes())
        codes = np.minimum(exponents - np.uint8(first), _OTHER)
        others = exponents[codes == _OTHER]
        half = (len(codes) + 1) // 2
        pairs = codes[:half].copy()
        pairs[: len(codes) - half] |= codes[half:] << 4
        frame = self._compressor.compress(pairs.tobytes())
        return _PREFIX.pack(first, len(frame)) + frame + (self._compressor.compress(others.tobytes()) if others.size else b"")

    def _decoded(self, coded: memoryview | bytes, num_values: int) -> np.ndarray:
        first, length = _PREFIX.unpack_from(coded)
        frames = memoryview(coded)[_PREFIX.size :]
        if first == _NO_PAIRS:
            return self._frame(frames, num_values)
        half = (num_values + 1) // 2
        pairs = self._frame(frames[:length], half)
        codes = np.empty(2 * half, np.uint8)
        codes[:half], codes[half:] = pairs & 15, pairs >> 4
        codes = codes[:num_values]
        is_other = codes == _OTHER
        exponents = codes + np.uint8(first)
        if others := int(np.count_nonzero(is_other)):
            exponents[is_other] = self._frame(frames[length:], others)
        elif len(frames) > length:
            raise ValueError("there are exponents that no code is for")
        return exponents

    def _frame(self, frame: memoryview, size: int) -> np.ndarray:
        found = np.frombuffer(self._decompressor.decompress(frame, max_output_size=size), np.uint8)
        if len(found) != size:
            raise ValueError(f"{len(found)} exponents where there should be {size}")
        return found


def _range(exponents: np.ndarray) -> tuple[int, float]:
    """The first of the 15 neighbours that most of a sample are, and their share of it."""
    sample = exponents[:: max(1, len(exponents) // _SAMPLE)]
    counts = np.concatenate([[0], np.cumsum(np.bincount(sample, minlength=256))])
    in_range = counts[_OTHER:] - counts[:-_OTHER]
    first = int(np.argmax(in_range))
    return first, float(in_range[first]) / max(len(sample), 1)
