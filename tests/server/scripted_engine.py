"""An engine without a model: what LocalBackend and the command line drive."""

import threading
from collections import deque

from jaxinfer.config import EngineConfig
from jaxinfer.engine_access import EngineAccess
from jaxinfer.request import DEFAULT_CONTEXT, FinishReason, OutputDelta, RequestError
from jaxinfer.segments import Prompt
from jaxinfer.stats import EngineStats
from tests.server.fakes import MAX_MODEL_LEN, byte_tokenizer


class ScriptedEngine:
    """Keeps to the engine's contract and to one thread: each step gives every sequence a letter, until its max_tokens."""

    def __init__(self, config=None, *, max_queue_size=4, batch_size=2, progress=None):
        self.config = config or EngineConfig.of(max_queue_size=max_queue_size)
        self.tokenizer = byte_tokenizer()
        self.stats = EngineStats()
        self.max_model_len = MAX_MODEL_LEN
        self.encode = None
        self.sampling_defaults = {}
        self.batch_size = batch_size
        self.waiting, self.running = deque(), {}
        self.prompts, self.contexts, self.aborted, self.threads = [], [], [], set()
        self.may_step = threading.Event()
        self.may_step.set()
        self.error = None
        self.num_steps = 0
        self.is_closed = False
        self.access = EngineAccess()

    @property
    def has_requests(self):
        return self.has_work

    @property
    def has_work(self):
        return bool(self.waiting or self.running)

    def validate(self, prompt_token_ids, params):
        if not prompt_token_ids:
            raise RequestError("the prompt is empty", "prompt")
        return Prompt.of_tokens(prompt_token_ids)

    def add_request(self, request_id, prompt, params, context=DEFAULT_CONTEXT, remote=None, output_ids=()):
        self.threads.add(threading.current_thread().name)
        if len(prompt) > 300:
            raise RequestError("found out late", "prompt")
        self.prompts.append(prompt.token_ids.tolist())
        self.contexts.append(context)
        self.waiting.append((request_id, params))
        self.stats.num_waiting = len(self.waiting)

    def abort(self, request_id):
        self.threads.add(threading.current_thread().name)
        self.aborted.append(request_id)
        was_running = self.running.pop(request_id, None) is not None
        self.waiting = deque(entry for entry in self.waiting if entry[0] != request_id)
        return was_running

    def on_process_loss(self, listener):
        self.lose_process = listener

    def close(self):
        self.threads.add(threading.current_thread().name)
        assert not self.has_work
        self.is_closed = True

    def step(self):
        self.threads.add(threading.current_thread().name)
        self.may_step.wait(5)
        if self.error is not None:
            raise self.error
        self.num_steps += 1
        while self.waiting and len(self.running) < self.batch_size:
            request_id, params = self.waiting.popleft()
            self.running[request_id] = [params, 0]
        deltas = []
        for request_id, entry in list(self.running.items()):
            params, count = entry
            entry[1] += 1
            reason = FinishReason.LENGTH if count + 1 == params.max_tokens else None
            deltas += [OutputDelta(request_id, index, "abcdefgh"[count % 8], (count,), finish_reason=reason) for index in range(params.n)]
            if reason:
                del self.running[request_id]
        self.stats.num_waiting = len(self.waiting)
        return deltas
