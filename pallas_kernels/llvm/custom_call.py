"""The LLVM IR around every CPU kernel: XLA's custom call, cut into chunks that threads process one after another.

The calling thread processes chunks too. Helpers are tasks for XLA's own thread pool: one that starts late, or never,
only leaves more chunks to the others, so calls that wait can't wait for each other. `handler` builds the whole module
around two functions of the kernel:

    define internal i64 @plan(ptr %job, i64 %threads)    ; number of chunks; may store numbers for them in the job
    define internal void @chunk(ptr %job, i64 %c)        ; process one chunk
"""

from __future__ import annotations

from pallas_kernels.llvm.host import HostTarget

MAX_BUFFERS = 8  # arguments and results of a call, together
MAX_NUMBERS = 16

# Fields of a job, by which IR addresses them.
_FIELDS = ("next", "done", "holders", "chunks", "data", "dims", "numbers")


def load_data(name: str, buffer: int) -> str:
    """IR that sets %name to the address of a buffer's values. Buffers are the arguments in order, then the results."""
    return (
        f" %{name}_at = getelementptr %job, ptr %job, i64 0, i32 {_FIELDS.index('data')}, i64 {buffer}\n %{name} = load ptr, ptr %{name}_at"
    )


def load_dim(name: str, buffer: int, dim: int) -> str:
    """IR that sets %name, i64, to a dimension of a buffer."""
    place = _FIELDS.index("dims")
    return (
        f" %{name}_dims_at = getelementptr %job, ptr %job, i64 0, i32 {place}, i64 {buffer}\n %{name}_dims = load ptr, ptr %{name}_dims_at\n"
        f" %{name}_at = getelementptr i64, ptr %{name}_dims, i64 {dim}\n %{name} = load i64, ptr %{name}_at"
    )


def load_number(name: str, number: int) -> str:
    """IR that sets %name, i64, to a number that the plan has stored."""
    return f" %{name}_at = getelementptr %job, ptr %job, i64 0, i32 {_FIELDS.index('numbers')}, i64 {number}\n %{name} = load i64, ptr %{name}_at"


def store_number(value: str, number: int) -> str:
    """IR by which the plan stores %value, i64."""
    where = f"%{value}_goes_to"
    return f" {where} = getelementptr %job, ptr %job, i64 0, i32 {_FIELDS.index('numbers')}, i64 {number}\n store i64 %{value}, ptr {where}"


def handler(target: HostTarget, num_arguments: int, num_results: int, kernel: str) -> str:
    """A module with `XLA_FFI_Error* handler(XLA_FFI_CallFrame*)`. Offsets are those of xla/ffi/api/c_api.h, whose
    structures only grow at their ends."""
    assert num_arguments + num_results <= MAX_BUFFERS
    return "\n".join([_declarations(target), kernel, _SCHEDULING, _entry(num_arguments, num_results)])


def _declarations(target: HostTarget) -> str:
    pause = "call void @llvm.x86.sse2.pause()" if target.is_x86 else ""
    return f"""
%job = type {{ i64, i64, i64, i64, [{MAX_BUFFERS} x ptr], [{MAX_BUFFERS} x ptr], [{MAX_NUMBERS} x i64] }}
declare ptr @malloc(i64)
declare void @free(ptr)
declare i64 @llvm.umin.i64(i64, i64)
declare i64 @llvm.umax.i64(i64, i64)
{"declare void @llvm.x86.sse2.pause()" if target.is_x86 else ""}
define internal void @pause() alwaysinline {{
  {pause}
  ret void
}}"""


# A job is freed by its last holder: a helper may start after the call has returned, and then touches nothing else.
_SCHEDULING = f"""
define internal void @work(ptr %job) {{
entry:
  %done_at = getelementptr %job, ptr %job, i64 0, i32 {_FIELDS.index("done")}
  %chunks_at = getelementptr %job, ptr %job, i64 0, i32 {_FIELDS.index("chunks")}
  %chunks = load i64, ptr %chunks_at
  br label %take
take:
  %c = atomicrmw add ptr %job, i64 1 seq_cst
  %is_left = icmp ult i64 %c, %chunks
  br i1 %is_left, label %chunk, label %end
chunk:
  call void @chunk(ptr %job, i64 %c)
  %was = atomicrmw add ptr %done_at, i64 1 release
  br label %take
end:
  ret void
}}

define internal void @let_go(ptr %job) {{
  %holders_at = getelementptr %job, ptr %job, i64 0, i32 {_FIELDS.index("holders")}
  %before = atomicrmw sub ptr %holders_at, i64 1 acq_rel
  %is_last = icmp eq i64 %before, 1
  br i1 %is_last, label %last, label %end
last:
  call void @free(ptr %job)
  br label %end
end:
  ret void
}}

define internal void @help(ptr %job) {{
  call void @work(ptr %job)
  call void @let_go(ptr %job)
  ret void
}}

define internal void @drop(ptr %api, ptr %error) {{
  %is_none = icmp eq ptr %error, null
  br i1 %is_none, label %end, label %destroy
destroy:
  %order = alloca [3 x i64]                   ; XLA_FFI_Error_Destroy_Args
  store i64 24, ptr %order
  %extension = getelementptr i64, ptr %order, i64 1
  store i64 0, ptr %extension
  %what = getelementptr i64, ptr %order, i64 2
  store ptr %error, ptr %what
  %function_at = getelementptr i8, ptr %api, i64 64
  %function = load ptr, ptr %function_at
  call void %function(ptr %order)
  br label %end
end:
  ret void
}}"""


def _entry(num_arguments: int, num_results: int) -> str:
    buffers = []
    for buffer in range(num_arguments + num_results):
        is_argument = buffer < num_arguments
        of, place = ("arguments", buffer) if is_argument else ("results", buffer - num_arguments)
        buffers.append(f"""
  %buffer{buffer}_at = getelementptr ptr, ptr %{of}, i64 {place}
  %buffer{buffer} = load ptr, ptr %buffer{buffer}_at
  %data{buffer}_at = getelementptr i8, ptr %buffer{buffer}, i64 24
  %data{buffer} = load ptr, ptr %data{buffer}_at
  %dims{buffer}_at = getelementptr i8, ptr %buffer{buffer}, i64 40
  %dims{buffer} = load ptr, ptr %dims{buffer}_at
  %data{buffer}_goes_to = getelementptr %job, ptr %job, i64 0, i32 {_FIELDS.index("data")}, i64 {buffer}
  store ptr %data{buffer}, ptr %data{buffer}_goes_to
  %dims{buffer}_goes_to = getelementptr %job, ptr %job, i64 0, i32 {_FIELDS.index("dims")}, i64 {buffer}
  store ptr %dims{buffer}, ptr %dims{buffer}_goes_to""")
    return f"""
define ptr @handler(ptr %frame) {{
entry:
  %extension_at = getelementptr i8, ptr %frame, i64 8
  %extension = load ptr, ptr %extension_at
  %has_extension = icmp ne ptr %extension, null
  br i1 %has_extension, label %look, label %call
look:
  %type_at = getelementptr i8, ptr %extension, i64 8
  %type = load i32, ptr %type_at
  %is_metadata = icmp eq i32 %type, 1
  br i1 %is_metadata, label %describe, label %call
describe:                                     ; XLA_FFI_Metadata_Extension: which API this is written for
  %metadata_at = getelementptr i8, ptr %extension, i64 24
  %metadata = load ptr, ptr %metadata_at
  %major_at = getelementptr i8, ptr %metadata, i64 24
  store i32 0, ptr %major_at
  %minor_at = getelementptr i8, ptr %metadata, i64 28
  store i32 3, ptr %minor_at
  %traits_at = getelementptr i8, ptr %metadata, i64 32
  store i32 0, ptr %traits_at
  ret ptr null
call:
  %api_at = getelementptr i8, ptr %frame, i64 16
  %api = load ptr, ptr %api_at
  %context_at = getelementptr i8, ptr %frame, i64 24
  %context = load ptr, ptr %context_at
  %arguments_at = getelementptr i8, ptr %frame, i64 72
  %arguments = load ptr, ptr %arguments_at
  %results_at = getelementptr i8, ptr %frame, i64 112
  %results = load ptr, ptr %results_at
  %job_end = getelementptr %job, ptr null, i64 1
  %job_bytes = ptrtoint ptr %job_end to i64
  %job = call ptr @malloc(i64 %job_bytes)
{"".join(buffers)}

  %threads_at = alloca i64
  store i64 1, ptr %threads_at
  %question = alloca [4 x i64]                ; XLA_FFI_ThreadPool_NumThreads_Args
  store i64 32, ptr %question
  %question_extension = getelementptr i64, ptr %question, i64 1
  store i64 0, ptr %question_extension
  %question_context = getelementptr i64, ptr %question, i64 2
  store ptr %context, ptr %question_context
  %question_out = getelementptr i64, ptr %question, i64 3
  store ptr %threads_at, ptr %question_out
  %count_at = getelementptr i8, ptr %api, i64 144
  %count = load ptr, ptr %count_at
  %no_pool = call ptr %count(ptr %question)
  call void @drop(ptr %api, ptr %no_pool)
  %threads = load i64, ptr %threads_at

  %chunks = call i64 @plan(ptr %job, i64 %threads)
  %others = sub i64 %threads, 1
  %work = call i64 @llvm.umax.i64(i64 %chunks, i64 1)
  %others_work = sub i64 %work, 1
  %helpers = call i64 @llvm.umin.i64(i64 %others, i64 %others_work)
  %holders = add i64 %helpers, 1
  %done_at = getelementptr %job, ptr %job, i64 0, i32 {_FIELDS.index("done")}
  %holders_at = getelementptr %job, ptr %job, i64 0, i32 {_FIELDS.index("holders")}
  %chunks_at = getelementptr %job, ptr %job, i64 0, i32 {_FIELDS.index("chunks")}
  store i64 0, ptr %job
  store i64 0, ptr %done_at
  store i64 %holders, ptr %holders_at
  store i64 %chunks, ptr %chunks_at

  %order = alloca [5 x i64]                   ; XLA_FFI_ThreadPool_Schedule_Args
  store i64 40, ptr %order
  %order_extension = getelementptr i64, ptr %order, i64 1
  store i64 0, ptr %order_extension
  %order_context = getelementptr i64, ptr %order, i64 2
  store ptr %context, ptr %order_context
  %order_task = getelementptr i64, ptr %order, i64 3
  store ptr @help, ptr %order_task
  %order_data = getelementptr i64, ptr %order, i64 4
  store ptr %job, ptr %order_data
  %schedule_at = getelementptr i8, ptr %api, i64 136
  %schedule = load ptr, ptr %schedule_at
  br label %hire
hire:
  %hired = phi i64 [0, %call], [%hired_next, %hired_one]
  %enough = icmp uge i64 %hired, %helpers
  br i1 %enough, label %begin, label %hire_one
hire_one:
  %refused = call ptr %schedule(ptr %order)
  %was_refused = icmp ne ptr %refused, null
  br i1 %was_refused, label %go_without, label %hired_one
go_without:
  call void @drop(ptr %api, ptr %refused)
  call void @let_go(ptr %job)
  br label %hired_one
hired_one:
  %hired_next = add i64 %hired, 1
  br label %hire

begin:
  call void @work(ptr %job)
  br label %wait
wait:                                         ; only for chunks that a helper is at: what no one took, this thread has done itself
  %done = load atomic i64, ptr %done_at acquire, align 8
  %is_done = icmp eq i64 %done, %chunks
  br i1 %is_done, label %finish, label %wait_on
wait_on:
  call void @pause()
  br label %wait
finish:
  call void @let_go(ptr %job)
  ret ptr null
}}
"""
