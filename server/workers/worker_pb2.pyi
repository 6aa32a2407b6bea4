from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Registered(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RoleRequest(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: str
    def __init__(self, role: _Optional[str] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "address", "role", "version", "model", "model_digest", "tokenizer_digest", "page_geometry", "page_port", "max_model_len", "max_batch_size", "vocab_size", "sampling_defaults", "page_size", "kv_bytes_per_token")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PAGE_GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    PAGE_PORT_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    role: str
    version: str
    model: str
    model_digest: str
    tokenizer_digest: str
    page_geometry: str
    page_port: int
    max_model_len: int
    max_batch_size: int
    vocab_size: int
    sampling_defaults: str
    page_size: int
    kv_bytes_per_token: int
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., role: _Optional[str] = ..., version: _Optional[str] = ..., model: _Optional[str] = ..., model_digest: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., page_geometry: _Optional[str] = ..., page_port: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_batch_size: _Optional[int] = ..., vocab_size: _Optional[int] = ..., sampling_defaults: _Optional[str] = ..., page_size: _Optional[int] = ..., kv_bytes_per_token: _Optional[int] = ...) -> None: ...

class Context(_message.Message):
    __slots__ = ("tenant", "namespace", "session", "priority", "seconds_left")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SECONDS_LEFT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    namespace: str
    session: str
    priority: int
    seconds_left: float
    def __init__(self, tenant: _Optional[str] = ..., namespace: _Optional[str] = ..., session: _Optional[str] = ..., priority: _Optional[int] = ..., seconds_left: _Optional[float] = ...) -> None: ...

class GenerateRequests(_message.Message):
    __slots__ = ("generate", "cancel")
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    generate: _containers.RepeatedCompositeFieldContainer[GenerateRequest]
    cancel: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, generate: _Optional[_Iterable[_Union[GenerateRequest, _Mapping]]] = ..., cancel: _Optional[_Iterable[str]] = ...) -> None: ...

class GenerateEvents(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[GenerateEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[GenerateEvent, _Mapping]]] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("request_id", "delta", "refused", "failed")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    delta: Delta
    refused: str
    failed: str
    def __init__(self, request_id: _Optional[str] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., refused: _Optional[str] = ..., failed: _Optional[str] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "params", "context", "output_token_ids", "prefill_address", "num_new_tokens", "prefix_address", "num_prefix_tokens", "traceparent")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    params: str
    context: Context
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    prefill_address: str
    num_new_tokens: int
    prefix_address: str
    num_prefix_tokens: int
    traceparent: str
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., params: _Optional[str] = ..., context: _Optional[_Union[Context, _Mapping]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., prefill_address: _Optional[str] = ..., num_new_tokens: _Optional[int] = ..., prefix_address: _Optional[str] = ..., num_prefix_tokens: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "params", "context", "handoff_id", "num_known", "page_geometry", "model_digest", "version", "output_token_ids", "num_new_tokens", "prefix_address", "num_prefix_tokens", "traceparent")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_FIELD_NUMBER: _ClassVar[int]
    PAGE_GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    params: str
    context: Context
    handoff_id: bytes
    num_known: int
    page_geometry: str
    model_digest: str
    version: str
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_new_tokens: int
    prefix_address: str
    num_prefix_tokens: int
    traceparent: str
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., params: _Optional[str] = ..., context: _Optional[_Union[Context, _Mapping]] = ..., handoff_id: _Optional[bytes] = ..., num_known: _Optional[int] = ..., page_geometry: _Optional[str] = ..., model_digest: _Optional[str] = ..., version: _Optional[str] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., num_new_tokens: _Optional[int] = ..., prefix_address: _Optional[str] = ..., num_prefix_tokens: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class PrefillEvent(_message.Message):
    __slots__ = ("offered", "first_token")
    OFFERED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    offered: Offered
    first_token: FirstToken
    def __init__(self, offered: _Optional[_Union[Offered, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ...) -> None: ...

class Offered(_message.Message):
    __slots__ = ("page_port",)
    PAGE_PORT_FIELD_NUMBER: _ClassVar[int]
    page_port: int
    def __init__(self, page_port: _Optional[int] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token_id", "logprob", "prompt_logprobs", "num_cached", "queue_seconds", "prefill_seconds")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: TokenLogprob
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    num_cached: int
    queue_seconds: float
    prefill_seconds: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[_Union[TokenLogprob, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., num_cached: _Optional[int] = ..., queue_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "top_token_ids", "top_logprobs", "rank")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    rank: int
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., rank: _Optional[int] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("text", "token_ids", "logprobs", "finish_reason", "stop_text", "stop_token_id", "prompt_logprobs", "has_prompt_logprobs", "cached_tokens", "usage")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TEXT_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    HAS_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    finish_reason: str
    stop_text: str
    stop_token_id: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    has_prompt_logprobs: bool
    cached_tokens: int
    usage: Usage
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., stop_text: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., has_prompt_logprobs: bool = ..., cached_tokens: _Optional[int] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("queue_seconds", "prefill_seconds", "decode_seconds")
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    def __init__(self, queue_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ..., decode_seconds: _Optional[float] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_waiting", "num_prefilling", "num_running", "num_free_pages", "num_incoming", "num_cached_tokens", "num_prompt_tokens", "num_output_tokens", "num_used_pages", "num_kept_handoffs", "num_pages_received", "num_pending_tokens", "num_sequences", "prefill_tokens_per_second", "bytes_per_second", "role", "num_bytes_pulled", "pull_seconds", "num_wire_bytes_pulled")
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILLING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_INCOMING_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_KEPT_HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    NUM_PENDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_PULLED_FIELD_NUMBER: _ClassVar[int]
    PULL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_WIRE_BYTES_PULLED_FIELD_NUMBER: _ClassVar[int]
    num_waiting: int
    num_prefilling: int
    num_running: int
    num_free_pages: int
    num_incoming: int
    num_cached_tokens: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_used_pages: int
    num_kept_handoffs: int
    num_pages_received: int
    num_pending_tokens: int
    num_sequences: int
    prefill_tokens_per_second: float
    bytes_per_second: float
    role: str
    num_bytes_pulled: int
    pull_seconds: float
    num_wire_bytes_pulled: int
    def __init__(self, num_waiting: _Optional[int] = ..., num_prefilling: _Optional[int] = ..., num_running: _Optional[int] = ..., num_free_pages: _Optional[int] = ..., num_incoming: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_used_pages: _Optional[int] = ..., num_kept_handoffs: _Optional[int] = ..., num_pages_received: _Optional[int] = ..., num_pending_tokens: _Optional[int] = ..., num_sequences: _Optional[int] = ..., prefill_tokens_per_second: _Optional[float] = ..., bytes_per_second: _Optional[float] = ..., role: _Optional[str] = ..., num_bytes_pulled: _Optional[int] = ..., pull_seconds: _Optional[float] = ..., num_wire_bytes_pulled: _Optional[int] = ...) -> None: ...

class CacheChange(_message.Message):
    __slots__ = ("first", "last", "inserted", "evicted", "is_reset", "is_stored")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    INSERTED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    IS_RESET_FIELD_NUMBER: _ClassVar[int]
    IS_STORED_FIELD_NUMBER: _ClassVar[int]
    first: int
    last: int
    inserted: bytes
    evicted: bytes
    is_reset: bool
    is_stored: bool
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ..., inserted: _Optional[bytes] = ..., evicted: _Optional[bytes] = ..., is_reset: bool = ..., is_stored: bool = ...) -> None: ...
