"""The engines that are available, from the creation of their environments to their last answer; which are missing, and
why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.machine import BackgroundLoad
from benchmarks.peers.embedding_rates import measure_embeddings
from benchmarks.peers.engines import PeerEngine, ServerCommand
from benchmarks.peers.measures import Measures
from benchmarks.peers.memory import record_memory
from benchmarks.peers.plan import PeerPlan
from benchmarks.peers.quality import TEXT, measure_quality, windows
from benchmarks.peers.rates import last_line, measure_rates
from benchmarks.peers.second_turn import WITH, WITHOUT, measure_second_turn
from benchmarks.peers.serving_load import RunningServer, measure_served, vocabulary_words
from benchmarks.peers.starts import measure_starts
from benchmarks.peers.venvs import PeerUnavailable, provide
from benchmarks.peers.weights import provide_weights
from benchmarks.serving import Server, ServerError, served_model
from benchmarks.worker import Worker, WorkerError
from checkpoints.hub import open_source, resolve
from checkpoints.source import CheckpointError
from jaxinfer.tokenizer import Tokenizer

Log = Callable[[str], None]
EMBEDDING_MODEL = "minilm"


class PeerSet:
    """Call `gather` first, then `measure` for each part, then `close`. `about` has each available engine's report of
    itself."""

    def __init__(self, engines: Sequence[PeerEngine], model: Path, threads: int, plan: PeerPlan, others: BackgroundLoad, say: Log) -> None:
        self._engines, self._model, self._threads, self._say = {e.name: e for e in engines}, model, threads, say
        self.plan, self.others = plan, others
        self.measures = Measures()
        self.absent: dict[str, str] = {}
        self.lost: dict[str, str] = {}  # engines that failed in the middle, and why
        self.about: dict[str, dict[str, Any]] = {}
        self._models: dict[str, Path] = {}
        self._workers: dict[str, Worker] = {}

    def gather(self, *, installs: bool) -> None:
        """Finds out which engines are available: environment, weights, a worker that starts."""
        for name, engine in self._engines.items():
            try:
                if engine.recipe:
                    provide(engine.recipe, installs=installs, say=self._say)
                self._models[name] = provide_weights(engine.weights, self._model, self._say)
                self._say(f"starting {name}")
                worker = engine.worker(self._models[name], self._threads, self.plan.context)
            except (PeerUnavailable, WorkerError) as error:
                self.absent[name] = last_line(error)
                self._say(f"{name}: absent ({self.absent[name]})")
                continue
            self._workers[name] = worker
            self.about[name] = {"bits": engine.bits, "settings": dict(engine.settings), **worker.about}

    def measure(self, part: str) -> None:
        """Measures one of `plan.PARTS`. An engine that fails in one is tried again in the next."""
        measure = {
            "rates": self._rates,
            "second-turn": self._second_turn,
            "quality": self._quality,
            "embeddings": self._embeddings,
            "start": self._start,
            "served": self._served,
        }[part]
        lost: dict[str, str] = {}
        measure(lost)
        for name, why in lost.items():
            self._say(f"{name}: {why}")
            self.lost[f"{name}, {part}"] = why

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    def _present(self) -> list[PeerEngine]:
        return [self._engines[name] for name in self.about]

    def _rates(self, lost: dict[str, str]) -> None:
        told = measure_rates(self._workers, self.plan.rates, self.plan.rounds, self.measures, lost, self.others, self._say)
        for name, worker in self._workers.items():
            self.about[name]["told"] = told[name]
            if name not in lost:
                record_memory(self.measures, "without a server", name, worker.pid)

    def _second_turn(self, lost: dict[str, str]) -> None:
        ours = next((engine for engine in self._present() if engine.is_ours), None)
        if ours is None:
            return
        with ExitStack() as stack:
            pair = {}
            for name, has_cache in ((WITH, True), (WITHOUT, False)):
                pair[name] = ours.worker(self._models[ours.name], self._threads, self.plan.context, prefix_cache=has_cache)
                stack.callback(pair[name].close)
            try:
                measure_second_turn(pair, self.plan.chat, self.plan.rounds, self.measures, self.others, self._say)
            except WorkerError as error:
                lost[ours.name] = last_line(error)

    def _quality(self, lost: dict[str, str]) -> None:
        tokenizer = Tokenizer.from_source(open_source(self._model))
        tokens = windows(tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False), *self.plan.windows)
        able = {name: worker for name, worker in self._workers.items() if self._engines[name].gives_logits}
        measure_quality(able, tokens, self.measures, lost, self._say)

    def _embeddings(self, lost: dict[str, str]) -> None:
        self.close()
        try:
            folder = resolve(EMBEDDING_MODEL)
        except CheckpointError as error:
            lost["embeddings"] = last_line(error)
            return
        measure_embeddings(
            self._present(),
            folder,
            self._threads,
            self.plan.num_texts,
            self.plan.rounds,
            self.measures,
            lost,
            self.others,
            self._say,
        )

    def _start(self, lost: dict[str, str]) -> None:
        self.close()
        measure_starts(
            self._present(),
            self._models,
            self._threads,
            self.plan.start_rounds,
            self.plan.start,
            self.measures,
            lost,
            self.others,
            self._say,
        )

    def _served(self, lost: dict[str, str]) -> None:
        self.close()
        tokenizer = Tokenizer.from_source(open_source(self._model))
        with ExitStack() as stack:
            servers: dict[str, RunningServer] = {}
            for engine in self._present():
                command = engine.server(self._models[engine.name], self._threads, self.plan.context)
                if command is None:
                    continue
                self._say(f"starting {engine.name}'s server")
                try:
                    servers[engine.name] = self._serve(stack, command)
                except ServerError as error:
                    lost[engine.name] = f"its server: {last_line(error)}"
            words = vocabulary_words(tokenizer)
            measure_served(servers, self.plan.loads, self.plan.rounds, words, self.measures, lost, self.others, self._say)
            for name, served in servers.items():
                if name not in lost:
                    record_memory(self.measures, "as a server", name, served.server.pid)

    def _serve(self, stack: ExitStack, command: ServerCommand) -> RunningServer:
        server = Server((), command=command.command, ready_path=command.ready_path, environment=command.environment)
        stack.enter_context(server)
        name, _ = served_model(server.url)
        server.pause()
        return RunningServer(server, name, command.body)
