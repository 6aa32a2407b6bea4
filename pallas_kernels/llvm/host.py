"""Code for the host's processor: from LLVM IR to a custom call that XLA's CPU programs can make (`jax.ffi`)."""

from __future__ import annotations

import ctypes
import platform
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import jax
import llvmlite.binding as llvm

_LOCK = threading.Lock()


@dataclass(frozen=True)
class _CustomCall:
    code: bytes  # an object file
    engine: llvm.ExecutionEngine  # owns the loaded code


_CALLS: dict[str, _CustomCall] = {}


@dataclass(frozen=True)
class HostTarget:
    """Instruction sets that generated code may use."""

    is_x86: bool
    avx2: bool
    avx512: bool  # with its instructions for bytes
    avx512_vbmi: bool
    avx512_bf16: bool
    avx512_vnni: bool
    amx_bf16: bool
    llvm_version: int

    @property
    def native_bfloat16(self) -> str | None:
        """The instructions that multiply bfloat16 as such; None where it is widened first."""
        return "AVX512-BF16" if self.avx512_bf16 else "AMX" if self.amx_bf16 else None


@cache
def host_target() -> HostTarget:
    """The processor of this host."""
    features = llvm.get_host_cpu_features()
    return HostTarget(
        is_x86=platform.machine() in ("x86_64", "AMD64"),
        avx2=bool(features.get("avx2")),
        avx512=bool(features.get("avx512f") and features.get("avx512bw")),
        avx512_vbmi=bool(features.get("avx512vbmi")),
        avx512_bf16=bool(features.get("avx512bf16")),
        avx512_vnni=bool(features.get("avx512vnni")),
        amx_bf16=bool(features.get("amx-bf16")),
        llvm_version=llvm.llvm_version_info[0],
    )


def register(name: str, ir: Callable[[], str]) -> str:
    """Registers a custom call of this name with XLA once, from a module that defines `@handler`. Returns the name."""
    return _register(name, lambda: _compile(ir()))


def register_code(name: str, code: bytes) -> None:
    """Registers object code that `object_code_for` returned in another process on the same kind of host."""
    _register(name, lambda: code)


def object_code_for(program: str) -> dict[str, bytes]:
    """The object files, by name, of the custom calls that a program's text names."""
    with _LOCK:
        return {name: call.code for name, call in _CALLS.items() if name in program}


def _register(name: str, object_code: Callable[[], bytes]) -> str:
    with _LOCK:
        if name not in _CALLS:
            _CALLS[name] = call = _load(object_code())
            handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(call.engine.get_function_address("handler"))
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
    return name


def _compile(ir: str) -> bytes:
    machine = _target_machine()
    module = llvm.parse_assembly(ir)
    module.verify()
    passes = llvm.create_new_module_pass_manager()  # all other optimisations are in the IR as written
    passes.add_always_inliner_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    return machine.emit_object(module)


def _load(code: bytes) -> _CustomCall:
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return _CustomCall(code, engine)


def _target_machine() -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, jit=True
    )
