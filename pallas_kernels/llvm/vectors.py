"""Texts of vectors' constants and functions in LLVM IR."""

from __future__ import annotations

from collections.abc import Iterable

from pallas_kernels.llvm.host import HostTarget


def indices(places: Iterable[int]) -> str:
    """The elements of a `shufflevector`'s mask."""
    return ", ".join(f"i32 {place}" for place in places)


def look_up(target: HostTarget) -> str:
    """Of 16 bytes that are repeated four times, those that the lower four bits of %places say."""
    begin = "define internal <64 x i8> @look_up(<64 x i8> %of, <64 x i8> %places) alwaysinline {"
    if target.avx512_vbmi:  # it reads six bits, which find the repetitions
        return f"""
declare <64 x i8> @llvm.x86.avx512.permvar.qi.512(<64 x i8>, <64 x i8>)
{begin}
  %found = call <64 x i8> @llvm.x86.avx512.permvar.qi.512(<64 x i8> %of, <64 x i8> %places)
  ret <64 x i8> %found
}}"""
    if target.avx512:  # it gives 0 where the uppermost bit is set
        return f"""
declare <64 x i8> @llvm.x86.avx512.pshuf.b.512(<64 x i8>, <64 x i8>)
{begin}
  %codes = and <64 x i8> %places, splat (i8 15)
  %found = call <64 x i8> @llvm.x86.avx512.pshuf.b.512(<64 x i8> %of, <64 x i8> %codes)
  ret <64 x i8> %found
}}"""
    low, high = indices(range(32)), indices(range(32, 64))
    return f"""
declare <32 x i8> @llvm.x86.avx2.pshuf.b(<32 x i8>, <32 x i8>)
{begin}
  %codes = and <64 x i8> %places, splat (i8 15)
  %half = shufflevector <64 x i8> %of, <64 x i8> poison, <32 x i32> <{low}>
  %low = shufflevector <64 x i8> %codes, <64 x i8> poison, <32 x i32> <{low}>
  %high = shufflevector <64 x i8> %codes, <64 x i8> poison, <32 x i32> <{high}>
  %found_low = call <32 x i8> @llvm.x86.avx2.pshuf.b(<32 x i8> %half, <32 x i8> %low)
  %found_high = call <32 x i8> @llvm.x86.avx2.pshuf.b(<32 x i8> %half, <32 x i8> %high)
  %found = shufflevector <32 x i8> %found_low, <32 x i8> %found_high, <64 x i32> <{low}, {high}>
  ret <64 x i8> %found
}}"""
