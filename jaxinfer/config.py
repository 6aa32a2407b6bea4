"""EngineConfig: frozen, composed, checked once. Its fields make the command-line flags and their help. Imports no
JAX."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Integral
from typing import Any

from sharding.layout import Parallel


class ConfigError(ValueError):
    """A configuration that can't work; the message names the flag, its value and what to change."""


def _flag(default: Any, help: str, **extra: Any) -> Any:
    return field(default=default, metadata={"help": help, **extra})


@dataclass(frozen=True, slots=True)
class ModelConfig:
    model: str = _flag("default", "local folder, .gguf file, Hugging Face id, or 'default' (SmolLM2-135M-Instruct)")
    dtype: str = _flag(
        "auto",
        "compute type: float32, bfloat16 (on CPU: products only, activations stay float32), auto (bfloat16 on GPU, and on CPU with "
        "AVX512-BF16 or AMX; else float32)",
        choices=("auto", "float32", "bfloat16"),
    )
    weights: str = _flag(
        "auto",
        "weight matrices in memory: auto (dtype's type; a GGUF file's blocks as they are, where a CPU kernel multiplies them), dequantised "
        "(dtype's type always), int8 (8-bit integers with a scale per output, integer products: faster for small batches on CPU, results "
        "differ slightly from the checkpoint's) or lossless (bfloat16 in 12 bits a value: the same weights in three quarters of the memory)",
        choices=("auto", "dequantised", "int8", "lossless"),
    )
    matmul_backend: str = _flag(
        "auto",
        "backend of weight products: xla; packed (CPU only: matrices in the memory layout of a kernel for this processor); auto: packed "
        "where supported",
        choices=("auto", "packed", "xla"),
    )
    max_model_len: int | None = _flag(None, "longest prompt plus output in tokens; default: the model's context")
    generation_config: str = _flag(
        "auto",
        "default sampling parameters: auto (from the checkpoint's generation_config.json or, for the default model, its model card: "
        "temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens), none (temperature 1, everything else off)",
        choices=("auto", "none"),
    )
    embedding_model: str | None = _flag(
        None, "embedding model to serve as well: a local folder, a Hugging Face id, or 'minilm' (all-MiniLM-L6-v2)"
    )
    random_weights: bool = _flag(False, "random weights of the model's shapes, to measure without its files' contents")


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    prefill_devices: tuple[int, ...] = _flag((), "devices of prefill, such as 0 or 0,1; default: from 0 on, as many as its layout has")
    decode_devices: tuple[int, ...] = _flag(
        (),
        "devices of decode; default: prefill's, or the next ones if the layouts differ; on the same devices both share one page pool",
    )
    prefill_parallel: str | None = _flag(
        None,
        "layout of prefill's devices: tp=N, tensor parallel over N devices; pp=N, pipeline stages of tp devices each; ep=N, expert "
        "parallel: whole experts on each of the tp devices; such as tp=2,pp=2; default: tp over all of them",
    )
    decode_parallel: str | None = _flag(None, "layout of decode's devices; default: prefill's, where it has as many devices")
    sequence_parallel: str = _flag(
        "auto",
        "sequence parallelism of prefill, tokens split over a stage's devices between reductions: on, off, or auto (whichever is "
        "faster by the cost model)",
        choices=("auto", "on", "off"),
    )
    attention_backend: str = _flag(
        "auto",
        "attention backend: mosaic_gpu (NVIDIA GPUs from Hopper on), llvm_cpu (CPU, kernels for this processor), xla (any device), "
        "reference (plain and slow); auto: mosaic_gpu or llvm_cpu where supported, else xla",
        choices=("auto", "mosaic_gpu", "llvm_cpu", "xla", "reference"),
    )
    cpu_devices: int | None = _flag(None, "split the CPU into this many virtual devices")
    coordinator: str | None = _flag(None, "HOST:PORT where process 0 listens, for one engine over several processes; the same for all")
    num_processes: int = _flag(1, "processes of one engine; devices are numbered consecutively, process by process")
    process_id: int = _flag(0, "this process's number; process 0 takes requests, the others run `jaxinfer follow`")
    connect_seconds: float = _flag(120.0, "seconds that processes wait for each other at the start")
    heartbeat_seconds: float = _flag(
        20.0, "seconds without a heartbeat after which a process counts as lost and all of them end; at least 1; the same for all processes"
    )
    programs: str | None = _flag(None, "folder of compiled programs that `jaxinfer compile` wrote; what fits is not compiled again")
    programs_key: str | None = _flag(
        None, "file of the key that such a folder is sealed with, at least 32 bytes; default: this user's own key, in the cache folder"
    )
    profile: str | None = _flag(None, "folder for a trace of the first seconds of work, for XProf and Perfetto")
    profile_seconds: float = _flag(5.0, "length of that trace in seconds")

    def of_role(self, role: str) -> tuple[int, ...]:
        """The devices of 'prefill' or 'decode', stage by stage."""
        ids: tuple[int, ...] = getattr(self, f"{role}_devices")
        return ids

    def layout(self, role: str) -> Parallel:
        """The layout of 'prefill' or 'decode'."""
        return Parallel.parse(getattr(self, f"{role}_parallel"))


@dataclass(frozen=True, slots=True)
class CacheConfig:
    page_size: int | None = _flag(
        None, "tokens per KV page; default: 16, or for latents 16 times the devices of a stage, which then share each page"
    )
    prefix_cache: bool = _flag(True, "cache the pages of finished requests, for requests with the same prefix")
    session_seconds: float = _flag(300.0, "seconds for which a session's pages (x-session-affinity) are evicted after others")
    kv_memory: str = _flag(
        "auto", "KV page memory on each device, such as 512MiB; auto: 512MiB on CPU, 85% of what weights leave free on GPU", is_size=True
    )
    kv_dtype: str = _flag(
        "auto",
        "type of cached keys and values: auto (that of activations: float32 on a CPU, bfloat16 on a GPU), or fp8 (float8_e4m3fn: a byte "
        "each, with a scale for each layer and KV head, the checkpoint's or found at the start)",
        choices=("auto", "fp8"),
    )
    kv_host_memory: str | None = _flag(None, "host memory for KV pages evicted from the devices, such as 8GiB; 0: none", is_size=True)
    kv_disk: str | None = _flag(
        None, "PATH:SIZE of a file for KV pages evicted from host memory, such as /var/cache/kv.bin:20GiB; reused after a restart"
    )
    kv_peers: bool = _flag(False, "let other engines pull pages that this one has prefilled, and pull pages from them", has_flag=False)


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    max_batch_size: int = _flag(32, "most sequences in the decode batch")
    structured_outputs: bool = _flag(True, "answers held to a JSON schema, a regular expression or a grammar, where requests ask for it")
    decode_buckets: tuple[int, ...] = _flag((1, 8, 32), "batch sizes that decode programs are compiled for")
    prefill_chunk_size: int = _flag(
        512, "most prompt tokens in one prefill step; longer prompts are prefilled in chunks, with decode steps between them"
    )
    prefill_buckets: tuple[int, ...] = _flag((32, 128, 512), "token counts that prefill programs are compiled for")
    ready_when: str = _flag(
        "all",
        "when requests are served: all, once every program is there; first, once each role's largest bucket is (those for fewer tokens "
        "or sequences follow in the background, and padding costs time until then)",
        choices=("all", "first"),
    )
    target_ttft: float | None = _flag(
        None, "target seconds to the first token: prefill chunks are as small as it allows, to delay running requests less"
    )
    target_itl: float | None = _flag(
        None, "target seconds between tokens: prefill chunks are kept small enough for running requests to meet it"
    )
    ageing_seconds: float = _flag(
        3.0, "seconds of being passed over after which waiting work gains one priority level (flex is 10, batch 20)"
    )
    max_queue_size: int = _flag(256, "requests that may wait ahead of one of their priority; beyond it a server answers 429")


def _lay_out(devices: DeviceConfig) -> None:
    """Fill in the defaults of both roles' devices and layouts. Raises `ConfigError` where they don't match."""
    layouts: dict[str, Parallel | None] = {}
    for role in ("prefill", "decode"):
        ids, text = devices.of_role(role), getattr(devices, f"{role}_parallel")
        if len(set(ids)) != len(ids) or any(i < 0 for i in ids):
            raise ConfigError(f"{role}_devices is {ids}: give distinct device numbers from 0, such as 0 or 0,1")
        try:
            layouts[role] = None if text is None else Parallel.parse(text)
        except ValueError as error:
            raise ConfigError(f"{role}_parallel is {text!r}: {error}") from error
    prefill_ids, decode_ids = devices.prefill_devices, devices.decode_devices
    prefill, decode = layouts["prefill"], layouts["decode"]
    if prefill is None:
        prefill = decode if decode is not None and not prefill_ids and not decode_ids else Parallel(tp=len(prefill_ids) or 1)
    prefill_ids = prefill_ids or tuple(range(prefill.num_devices))
    if decode is None:
        decode = prefill if len(decode_ids or prefill_ids) == prefill.num_devices else Parallel(tp=len(decode_ids))
    if not decode_ids:
        after = max(prefill_ids) + 1
        decode_ids = prefill_ids if decode == prefill else tuple(range(after, after + decode.num_devices))
    for role, ids, layout in (("prefill", prefill_ids, prefill), ("decode", decode_ids, decode)):
        if len(ids) != layout.num_devices:
            raise ConfigError(
                f"{role}_parallel is {layout}, for {layout.num_devices} device(s), but {role}_devices is {ids}, which are {len(ids)}: "
                f"give {layout.num_devices} devices, or a layout of {len(ids)}, such as tp={len(ids)}"
            )
        object.__setattr__(devices, f"{role}_devices", ids)
        object.__setattr__(devices, f"{role}_parallel", str(layout))
    if set(prefill_ids) & set(decode_ids) and (prefill_ids, prefill) != (decode_ids, decode):
        layouts_too = f", with one layout (not {prefill} and {decode})," if prefill_ids == decode_ids else ""
        raise ConfigError(
            f"prefill_devices {prefill_ids} and decode_devices {decode_ids} overlap: make them the same{layouts_too} or disjoint"
        )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The configuration of an engine. `EngineConfig.of(model=..., kv_memory=...)` takes all fields by their flat
    names."""

    model: ModelConfig = field(default_factory=ModelConfig)
    devices: DeviceConfig = field(default_factory=DeviceConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    def __post_init__(self) -> None:
        devices, cache, schedule = self.devices, self.cache, self.schedule
        for part in (self.model, devices, cache, schedule):
            for setting in dataclasses.fields(part):
                object.__setattr__(part, setting.name, _checked(setting, getattr(part, setting.name)))
        _lay_out(devices)
        if cache.page_size is not None:
            _at_least("page_size", cache.page_size, 1)
        if cache.kv_memory != "auto":
            parse_bytes("kv_memory", cache.kv_memory)
        host_bytes = parse_bytes("kv_host_memory", "0" if cache.kv_host_memory is None else cache.kv_host_memory)
        if host_bytes and not cache.prefix_cache:
            raise ConfigError(f"kv_host_memory is {cache.kv_host_memory}, but without prefix_cache no page is cached: leave one out")
        if cache.kv_disk is not None:
            parse_disk("kv_disk", cache.kv_disk)
            if cache.kv_dtype == "fp8":
                raise ConfigError(
                    f"kv_disk is {cache.kv_disk}, but its pages would need the scales that kv_dtype fp8 finds at each start: leave one out"
                )
            if not host_bytes:
                raise ConfigError(
                    f"kv_disk is {cache.kv_disk}, but pages reach it through host memory: give kv_host_memory too, such as 1GiB"
                )
        if not cache.session_seconds >= 0:
            raise ConfigError(f"session_seconds is {cache.session_seconds}: it must be at least 0")
        if not schedule.ageing_seconds > 0:
            raise ConfigError(f"ageing_seconds is {schedule.ageing_seconds}: it must be over 0")
        for name in ("target_ttft", "target_itl"):
            target = getattr(schedule, name)
            if target is not None and not target > 0:
                raise ConfigError(f"{name} is {target}: it must be over 0 seconds")
        for name in ("max_batch_size", "prefill_chunk_size", "max_queue_size"):
            _at_least(name, getattr(schedule, name), 1)
        for name, most in (("decode_buckets", schedule.max_batch_size), ("prefill_buckets", schedule.prefill_chunk_size)):
            buckets = getattr(schedule, name)
            if not buckets or any(b < 1 for b in buckets):
                raise ConfigError(f"{name} is {buckets}: give positive sizes, such as 1,8,32")
            # The largest bucket must hold the largest step; a smaller limit needs no larger program.
            fitted = tuple(sorted({min(b, most) for b in buckets} | {most}))
            object.__setattr__(schedule, name, fitted)
        if not devices.profile_seconds > 0:
            raise ConfigError(f"profile_seconds is {devices.profile_seconds}: it must be over 0")
        if self.model.max_model_len is not None:
            _at_least("max_model_len", self.model.max_model_len, 2)
        if devices.cpu_devices is not None:
            _at_least("cpu_devices", devices.cpu_devices, 1)
        _check_processes(self)

    @classmethod
    def of(cls, **flat: Any) -> EngineConfig:
        """Build from flat field names. Raises `ConfigError` for an unknown name, with the nearest known one."""
        part_of = {f.name: part for part, kind in _PARTS.items() for f in dataclasses.fields(kind)}
        for name in flat:
            if name not in part_of:
                nearest = difflib.get_close_matches(name, part_of, 1)
                raise ConfigError(
                    f"unknown setting {name!r}: {f'did you mean {nearest[0]}?' if nearest else 'known are ' + ', '.join(part_of)}"
                )
        return cls(**{part: kind(**{k: v for k, v in flat.items() if part_of[k] == part}) for part, kind in _PARTS.items()})


_PARTS: dict[str, type[Any]] = {"model": ModelConfig, "devices": DeviceConfig, "cache": CacheConfig, "schedule": ScheduleConfig}


def flat_fields() -> list[dataclasses.Field[Any]]:
    """All settings of EngineConfig as dataclass fields (name, type, default, metadata['help']), for building flags."""
    return [f for kind in _PARTS.values() for f in dataclasses.fields(kind)]


_PREFIXES = ("K", "M", "G", "T", "P")
_UNITS = (
    {"": 1, "B": 1}
    | {f"{prefix}B": 1000**power for power, prefix in enumerate(_PREFIXES, 1)}
    | {unit: 1024**power for power, prefix in enumerate(_PREFIXES, 1) for unit in (prefix, f"{prefix}IB")}
)


def parse_bytes(name: str, text: str) -> int:
    """'512MiB' -> 536870912. Case doesn't matter; kB is 1000 bytes, KiB and K are 1024. Raises `ConfigError` naming the
    setting."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if not match or match.group(2).upper() not in _UNITS:
        raise ConfigError(f"{name} is {text!r}: give a size such as 512MiB or 2GB; the units are B, kB, KiB, MB, MiB, GB, GiB, TB, TiB")
    return int(Decimal(match.group(1)) * _UNITS[match.group(2).upper()])


def size_text(value: object) -> object:
    """A number of bytes as text for `parse_bytes`; other values unchanged."""
    is_whole = isinstance(value, Integral) or (isinstance(value, float) and value.is_integer())
    return f"{int(value)}B" if is_whole and not isinstance(value, bool) else value  # type: ignore[call-overload]


def parse_disk(name: str, text: str) -> tuple[str, int]:
    """'/var/cache/kv.bin:20GiB' -> path, which may contain ':', and bytes. Raises `ConfigError` naming the setting."""
    path, colon, size = text.rpartition(":")
    if not colon or not path.strip():
        raise ConfigError(f"{name} is {text!r}: give PATH:SIZE, such as /var/cache/kv.bin:20GiB")
    return path, parse_bytes(f"{name}'s size", size)


def parse_address(name: str, text: str) -> tuple[str, int]:
    """'10.0.0.1:7000' -> host and port. Raises `ConfigError` naming the setting."""
    host, _, port = text.rpartition(":")
    if not host.strip("[]") or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{name} is {text!r}: give HOST:PORT, such as 10.0.0.1:7000")
    return host.strip("[]"), int(port)


def format_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# For each field annotation: a description of valid values, and a test.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("text", lambda value: isinstance(value, str)),
    "str | None": ("text or None", lambda value: value is None or isinstance(value, str)),
    "bool": ("True or False", lambda value: isinstance(value, bool)),
    "int": ("an integer", _is_int),
    "float": ("a number", lambda value: isinstance(value, (int, float)) and not isinstance(value, bool)),
    "float | None": (
        "a number or None",
        lambda value: value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)),
    ),
    "int | None": ("an integer or None", lambda value: value is None or _is_int(value)),
    "tuple[int, ...]": ("integers, such as (0, 1)", lambda value: isinstance(value, tuple) and all(map(_is_int, value))),
}


def _checked(setting: dataclasses.Field[Any], value: Any) -> Any:
    """The value converted to its field's type. Raises `ConfigError` for another type, or a value not among the
    choices."""
    if setting.metadata.get("is_size"):
        value = size_text(value)
    elif setting.name == "kv_disk" and isinstance(value, (tuple, list)) and len(value) == 2:
        value = f"{os.fspath(value[0])}:{size_text(value[1])}"
    if isinstance(value, list):
        value = tuple(value)
    elif isinstance(value, os.PathLike):
        value = os.fspath(value)
    words, fits = _KINDS[str(setting.type)]
    if not fits(value):
        words = "a size such as '512MiB', or a number of bytes" if setting.metadata.get("is_size") else words
        raise ConfigError(f"{setting.name} is {value!r}: it must be {words}")
    choices = setting.metadata.get("choices")
    if choices and value not in choices:
        raise ConfigError(f"{setting.name} is {value!r}: it must be one of {', '.join(choices)}")
    return value


def _check_processes(config: EngineConfig) -> None:
    devices, several = config.devices, f"num_processes is {config.devices.num_processes}"
    _at_least("num_processes", devices.num_processes, 1)
    if not 0 <= devices.process_id < devices.num_processes:
        raise ConfigError(
            f"process_id is {devices.process_id}: with num_processes {devices.num_processes} it must be 0 to {devices.num_processes - 1}"
        )
    if not devices.connect_seconds > 0:
        raise ConfigError(f"connect_seconds is {devices.connect_seconds}: it must be over 0")
    if not devices.heartbeat_seconds >= 1:
        raise ConfigError(f"heartbeat_seconds is {devices.heartbeat_seconds}: it must be at least 1")
    if devices.coordinator is not None:
        parse_address("coordinator", devices.coordinator)
    if devices.num_processes == 1:
        if devices.coordinator is not None:
            raise ConfigError(f"coordinator is {devices.coordinator}, but {several}: give the number of processes too")
        return
    if devices.coordinator is None:
        raise ConfigError(f"{several}, but there is no coordinator: give process 0's HOST:PORT, the same to all")
    kv_dtype = config.cache.kv_dtype if config.cache.kv_dtype != "auto" else None
    for name, value in (
        ("embedding_model", config.model.embedding_model),
        ("kv_host_memory", config.cache.kv_host_memory),
        ("kv_dtype", kv_dtype),
    ):
        if value is not None:
            raise ConfigError(f"{several}, and {name} is {value}, which can't span processes yet: leave it out")


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{name} is {value}: it must be at least {low}")
