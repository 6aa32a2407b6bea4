"""From a configuration to a ready EncodeWorker; weights are read while programs compile."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import jax

from checkpoints.hub import open_source, resolve
from checkpoints.sentence_files import read_sentence_files
from jaxinfer.architecture.encoder_config import EncoderConfig
from jaxinfer.config import ConfigError, EngineConfig
from jaxinfer.encode.queue import EncodeQueue
from jaxinfer.encode.runner import EncodeRunner
from jaxinfer.encode.text_batching import TextReader
from jaxinfer.encode.worker import EncodeWorker
from jaxinfer.models.bert import Bert
from jaxinfer.pipeline.device_clock import DeviceClock
from jaxinfer.programs.compilation import COUNTER, compile_programs
from jaxinfer.stats import EngineStats
from jaxinfer.tokenizer import Tokenizer
from jaxinfer.weights.format_choice import lay_out
from jaxinfer.weights.load import load_weights, weight_bytes
from jaxinfer.weights.template import Weights, template_of
from sharding.mesh import make_mesh
from sharding.rules import RULES


def load_encoder(config: EngineConfig, stats: EngineStats, clock: DeviceClock) -> EncodeWorker:
    """The embedding model on the prefill mesh; nothing compiles afterwards.

    Raises `ConfigError`, `CheckpointError` or `UnsupportedModelError`, which say what to change.
    """
    assert config.model.embedding_model is not None
    source = open_source(resolve(config.model.embedding_model))
    if not source.path.is_dir():
        raise ConfigError(
            f"embedding_model is {config.model.embedding_model!r}: give a folder with config.json, tokenizer.json and safetensors"
        )
    encoder = EncoderConfig.from_hf(source.config, read_sentence_files(source.path))
    rules = RULES["encode"]
    try:
        mesh = make_mesh(config.devices.layout("prefill").stages(config.devices.prefill_devices)[0])
        template = lay_out(
            lambda form, dtype, _: template_of(Bert, encoder, form, dtype),
            config.model,
            mesh.devices.flat[0].platform,
            [(mesh, rules)],
            keeps_types=True,
        )
        template.abstract(mesh, rules)
    except ValueError as error:
        raise ConfigError(f"prefill_devices is {config.devices.prefill_devices}: {error}") from error
    tokenizer = Tokenizer.from_source(source)
    reader = TextReader(tokenizer, min(tokenizer.vocab_size, encoder.vocab_size), encoder.max_tokens, encoder.hidden_size)
    queue = EncodeQueue(encoder.max_tokens)
    runner = EncodeRunner(template, mesh, rules, queue.shapes, normalizes=encoder.normalizes)

    def load() -> Weights:
        started = time.monotonic()
        with COUNTER.compiling():
            weights = jax.block_until_ready(load_weights(template, source, mesh, rules))
        stats.load_seconds += time.monotonic() - started
        return weights

    with ThreadPoolExecutor(1, "weights") as background:
        started = time.monotonic()
        loading = background.submit(load)
        programs = compile_programs(runner.programs())
        stats.compile_seconds += time.monotonic() - started
        weights = loading.result()
    with COUNTER.compiling():
        runner.start(programs, weights)
    stats.num_programs += len(programs)
    stats.memory["embedding weights"] = weight_bytes(weights)
    return EncodeWorker(reader, queue, runner, encoder.pooling, clock, stats)
