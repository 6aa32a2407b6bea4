"""packed_matmul on a CPU: the kernel's code made for this machine's processor by LLVM, and called by XLA's programs through `jax.ffi`."""

from __future__ import annotations

import ctypes
import platform
import threading
from functools import cache

import jax
import jax.numpy as jnp
import llvmlite.binding as llvm
from jaxtyping import Array, Int, Shaped

from pallas_kernels.packed_matmul import llvm_ir
from pallas_kernels.packed_matmul.layout import LANES, ZERO

NAME = "jaxinfer_packed_matmul"  # of the custom calls, before their kind
_ENGINES: list[llvm.ExecutionEngine] = []  # the code lives as long as its engine
_LOCK = threading.Lock()


def packed_matmul(x: Shaped[Array, "T I"], matrices: Shaped[Array, "S P K 16 G"], place: Int[Array, ""]) -> Shaped[Array, "T O"]:
    name = _register(x.dtype.name)
    of_sums = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    result = jax.ShapeDtypeStruct((x.shape[0], matrices.shape[1] * LANES), of_sums)
    sums: Shaped[Array, "T O"] = jax.ffi.ffi_call(name, result)(x, matrices, place)
    if x.dtype == jnp.int8:
        sums -= ZERO * jnp.sum(x, axis=1, keepdims=True, dtype=jnp.int32)
    return sums


@cache
def target() -> llvm_ir.Target:
    """This machine's processor."""
    features = llvm.get_host_cpu_features()
    return llvm_ir.Target(
        is_x86=platform.machine() in ("x86_64", "AMD64"),
        avx512=bool(features.get("avx512f")),
        avx512_bf16=bool(features.get("avx512bf16")),
        avx512_vnni=bool(features.get("avx512vnni")),
        llvm_version=llvm.llvm_version_info[0],
    )


def _register(kind: str) -> str:
    """The name of a kind's custom call, known to XLA from now on."""
    with _LOCK:
        return _registered(kind)


@cache
def _registered(kind: str) -> str:
    name = f"{NAME}_{kind}"
    address = compiled(llvm_ir.module(kind, target()))  # type: ignore[arg-type]
    handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address)
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
    return name


def compiled(ir: str) -> int:
    """The address of a module's `matmul`."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(ir)
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, jit=True
    )
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    _ENGINES.append(engine)
    return int(engine.get_function_address("matmul"))
