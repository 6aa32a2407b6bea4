"""The kernel's code: LLVM IR for one query token a row over its pages, read in place.

A row's context is cut into parts, and a part into runs. A chunk is one part for some KV heads. For each run first all
scores are computed, then their weights, then the weighted values are added to the records of the query heads. Keys and
values are read in the order in which they lie in memory, in tiles of 16 tokens, head by head. The thread that finishes
the last part of a row and head merges its records, in order. A row's parts depend on its own length alone, so its
result is the same in any batch and on any number of threads.
"""

from __future__ import annotations

from pallas_kernels.llvm.custom_call import handler, load_data, load_dim, load_number, store_number
from pallas_kernels.llvm.exponential import exponential
from pallas_kernels.llvm.host import HostTarget
from pallas_kernels.paged_attention.llvm_records import lowest, records
from pallas_kernels.paged_attention.llvm_tiles import LANES, PART_TOKENS, TOKENS_AHEAD, DecodeShape, add, loop, score, score_name

_MAX_PARTS = 32  # of a row: longer contexts have longer parts
_CHUNKS_PER_THREAD = 4  # at least: a thread that starts late then costs little


def scratch_size(shape: DecodeShape, num_tokens: int) -> int:
    """float32 numbers for each row of up to `num_tokens` tokens: the records of its parts, and for each KV head a count
    of finished parts."""
    parts = max(1, min(_MAX_PARTS, -(-num_tokens // PART_TOKENS)))
    return parts * _part_size(shape) + _counts_size(shape)


def _counts_size(shape: DecodeShape) -> int:
    return -(-shape.num_kv_heads // LANES) * LANES


def _part_size(shape: DecodeShape) -> int:
    """Numbers of a part's records."""
    return shape.num_kv_heads * shape.group * shape.record_size


def module(shape: DecodeShape, target: HostTarget) -> str:
    """The IR of the custom call of (q, already scaled, kv_pages, layer, page_table, kv_len) -> (out, scratch)."""
    # Query heads at once: as many as registers hold the sums of values for.
    at_once = max(1, min(shape.group, 4, (16 if target.avx512 else 8) // shape.vectors))
    heads = [(first, min(at_once, shape.group - first)) for first in range(0, shape.group, at_once)]
    scores = {score_name(count, fetches=first == 0): score(shape, count, fetches=first == 0) for first, count in heads}
    adds = {count: add(shape, count) for _, count in heads}
    kernel = [
        _DECLARATIONS,
        exponential(),
        *scores.values(),
        *adds.values(),
        records(shape),
        _part(shape, heads),
        _plan(shape),
        _chunk(shape),
    ]
    return handler(target, 5, 2, "\n".join(kernel))


_DECLARATIONS = """
declare <16 x float> @llvm.fmuladd.v16f32(<16 x float>, <16 x float>, <16 x float>)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
"""


def _part(shape: DecodeShape, heads: list[tuple[int, int]]) -> str:
    """IR of one part for some KV heads, whose keys, values, queries and records begin here. `heads`: the query heads of
    each, by (first, count)."""
    run, group, token_bytes = shape.run_tokens, shape.group, shape.token_bytes
    head_bytes = shape.page_size * token_bytes
    num_heads = shape.num_kv_heads * group
    empty = _at("e_record", "records", "e", shape.record_size) + " call void @empty(ptr %e_record)"
    find = f""" %known = call i64 @llvm.umin.i64(i64 %i, i64 %last)
 %token = add i64 %at, %known
 %number = udiv i64 %token, {shape.page_size}
 %before = mul i64 %number, {shape.page_size}
 %place = sub i64 %token, %before
 %page_at = getelementptr i32, ptr %table, i64 %number
 %page32 = load i32, ptr %page_at
 %page = zext i32 %page32 to i64
 %page_start = mul i64 %page, {shape.num_kv_heads * head_bytes}
 %in_page = mul i64 %place, {token_bytes}
 %offset = add i64 %page_start, %in_page
 %offset_at = getelementptr i64, ptr %offsets, i64 %i
 store i64 %offset, ptr %offset_at"""
    lower = f""" %top_at = getelementptr float, ptr %tops, i64 %l
 store <16 x float> {lowest()}, ptr %top_at, align 64"""
    scores = [
        f""" %h_off = mul i64 %h, {head_bytes}
 %keys_h = getelementptr i8, ptr %keys, i64 %h_off
 %values_h = getelementptr i8, ptr %values, i64 %h_off
{_at("q_h", "q", "h", group * shape.head_size)}{_at("scores_h", "scores_s", "h", group * run)}{_at("tops_h", "tops", "h", group * LANES)}"""
    ]
    adds = [
        f""" %g_off = mul i64 %g, {head_bytes}
 %values_g = getelementptr i8, ptr %values, i64 %g_off
{_at("weights_g", "weights_a", "g", group * run)}{_at("records_g", "records", "g", group * shape.record_size)}"""
    ]
    for j, count in heads:
        scores.append(f""" %q_{j} = getelementptr float, ptr %q_h, i64 {j * shape.head_size}
 %scores_{j} = getelementptr float, ptr %scores_h, i64 {j * run}
 %tops_{j} = getelementptr float, ptr %tops_h, i64 {j * LANES}
 call void @{score_name(count, fetches=j == 0)}(ptr %q_{j}, ptr %keys_h, ptr %values_h, ptr %offsets_s, i64 %valid, ptr %scores_{j}, ptr %tops_{j})
""")
        adds.append(f""" %weights_{j} = getelementptr float, ptr %weights_g, i64 {j * run}
 %records_{j} = getelementptr float, ptr %records_g, i64 {j * shape.record_size}
 call void @add_{count}(ptr %values_g, ptr %offsets_a, i64 %tile_tokens, ptr %weights_{j}, ptr %records_{j})
""")
    score_tile = f""" %valid = sub i64 %here, %s
 %offsets_s = getelementptr i64, ptr %offsets, i64 %s
 %scores_s = getelementptr float, ptr %scores, i64 %s
{loop("h", "%heads", 1, "".join(scores))}"""
    weigh = f"""{_at("w_scores", "scores", "w", run)}{_at("w_tops", "tops", "w", LANES)}{_at("w_record", "records", "w", shape.record_size)}\
 call void @weigh(ptr %w_scores, i64 %here, ptr %w_tops, ptr %w_record)"""
    add_tile = f""" %a_left = sub i64 %here, %a
 %tile_tokens = call i64 @llvm.umin.i64(i64 %a_left, i64 {LANES})
 %offsets_a = getelementptr i64, ptr %offsets, i64 %a
 %weights_a = getelementptr float, ptr %scores, i64 %a
{loop("g", "%heads", 1, "".join(adds))}"""
    one_run = f""" %left = sub i64 %end, %at
 %here = call i64 @llvm.umin.i64(i64 %left, i64 {run})
 %last = sub i64 %left, 1                     ; stands for the tokens after it: of these nothing is read
 %found_more = add i64 %here, {LANES - 1 + TOKENS_AHEAD}
 %found = and i64 %found_more, -{LANES}
{loop("i", "%found", 1, find)}
{loop("l", "%tops_size", LANES, lower)}
{loop("s", "%here", LANES, score_tile)}
{loop("w", "%query_heads", 1, weigh)}
{loop("a", "%here", LANES, add_tile)}"""
    return f"""
define internal void @part(ptr %q, ptr %keys, i64 %half, ptr %table, i64 %heads, i64 %first, i64 %tokens, ptr %records) {{
 %offsets = alloca [{run + TOKENS_AHEAD} x i64], align 64
 %scores = alloca [{num_heads * run} x float], align 64
 %tops = alloca [{num_heads * LANES} x float], align 64
 %values = getelementptr i8, ptr %keys, i64 %half
 %end = add i64 %first, %tokens
 %query_heads = mul i64 %heads, {group}
 %tops_size = mul i64 %query_heads, {LANES}
{loop("e", "%query_heads", 1, empty)}
{loop("at", "%end", run, one_run, start="%first")}
 ret void
}}"""


def _at(name: str, base: str, i: str, size: int | str) -> str:
    """IR that sets %name to the address of element i of %base, in elements of `size` float32."""
    return f" %{name}_i = mul i64 %{i}, {size}\n %{name} = getelementptr float, ptr %{base}, i64 %{name}_i\n"


def _ceil(name: str, value: str, by: str | int) -> str:
    """IR that sets %name to value / by, rounded up."""
    return f" %{name}_sum = add i64 {value}, {by}\n %{name}_less = sub i64 %{name}_sum, 1\n %{name} = udiv i64 %{name}_less, {by}\n"


def _plan(shape: DecodeShape) -> str:
    """Number of chunks: for each row as many parts as the longest has, and for each part enough ranges of KV heads to
    keep all threads busy."""
    heads = shape.num_kv_heads
    measure = """ %length = call i64 @length(ptr %job, i64 %b)
 %own = call i64 @parts(i64 %length)
 %new_most = call i64 @llvm.umax.i64(i64 %most_so_far, i64 %own)"""
    clear = f"""{_at("row", "counts", "c", "%size")}\
{loop("h", heads, 1, _at("count", "row", "h", 1) + " store i32 0, ptr %count")}"""
    return f"""
define internal i64 @length(ptr %job, i64 %row) {{
{load_data("kv_len", 4)}
{load_dim("width", 3, 1)}
 %at = getelementptr i32, ptr %kv_len, i64 %row
 %length32 = load i32, ptr %at
 %length = zext i32 %length32 to i64
 %there = mul i64 %width, {shape.page_size}
 %most = call i64 @llvm.umin.i64(i64 %length, i64 %there)
 ret i64 %most
}}

define internal i64 @part_tokens(i64 %length) {{
{_ceil("times", "%length", _MAX_PARTS * PART_TOKENS)} %some = call i64 @llvm.umax.i64(i64 %times, i64 1)
 %tokens = mul i64 %some, {PART_TOKENS}
 ret i64 %tokens
}}

define internal i64 @parts(i64 %length) {{
 %tokens = call i64 @part_tokens(i64 %length)
{_ceil("parts", "%length", "%tokens")} ret i64 %parts
}}

define internal i64 @plan(ptr %job, i64 %threads) {{
{load_dim("rows", 0, 0)}
{load_data("scratch", 6)}
{load_dim("size", 6, 1)}
{loop("b", "%rows", 1, measure, carried=(("i64", "most_so_far", "1", "%new_most"),))}
 %row_parts = mul i64 %new_most, %rows
 %wanted = mul i64 %threads, {_CHUNKS_PER_THREAD}
{_ceil("ranges_wanted", "%wanted", "%row_parts")} %ranges_most = call i64 @llvm.umin.i64(i64 %ranges_wanted, i64 {heads})
{_ceil("each", str(heads), "%ranges_most")}{_ceil("ranges", str(heads), "%each")} %chunks = mul i64 %row_parts, %ranges
{store_number("new_most", 0)}
{store_number("each", 1)}
{store_number("ranges", 2)}
 %is_cut = icmp ugt i64 %new_most, 1
 br i1 %is_cut, label %clear, label %end
clear:
 %counts_i = sub i64 %size, {_counts_size(shape)}
 %counts = getelementptr float, ptr %scratch, i64 %counts_i
{loop("c", "%rows", 1, clear)}
 br label %end
end:
 ret i64 %chunks
}}"""


def _chunk(shape: DecodeShape) -> str:
    heads, group, head_bytes = shape.num_kv_heads, shape.group, shape.page_size * shape.token_bytes
    merge = f"""{_at("records_p", "records_h", "p", _part_size(shape))}\
{loop("j", group, 1, _at("into", "records_h", "j", shape.record_size) + _at("more", "records_p", "j", shape.record_size) + " call void @merge(ptr %into, ptr %more)")}"""
    finish = f"""{_at("record", "records_h", "f", shape.record_size)}{_at("out_f", "out_h", "f", shape.head_size)}\
 call void @finish(ptr %record, ptr %out_f)"""
    settle = f"""{_at("records_h", "records", "h", group * shape.record_size)}{_at("out_h", "out_c", "h", group * shape.head_size)}\
 br i1 %is_whole, label %finish, label %count
count:
{_at("count_at", "counts", "h", 1)} %before = atomicrmw add ptr %count_at, i32 1 acq_rel
 %is_last = icmp eq i32 %before, %last
 br i1 %is_last, label %merge, label %settled
merge:
{loop("p", "%parts", 1, merge, start="1")}
 br label %finish
finish:
{loop("f", group, 1, finish)}
 br label %settled
settled:"""
    zero = """ %z_at = getelementptr float, ptr %out_c, i64 %z
 store <16 x float> zeroinitializer, ptr %z_at, align 4"""
    return f"""
define internal void @chunk(ptr %job, i64 %c) {{
{load_data("q", 0)}
{load_data("pool", 1)}
{load_data("layer_data", 2)}
{load_data("tables", 3)}
{load_data("out", 5)}
{load_data("scratch", 6)}
{load_dim("pages", 1, 2)}
{load_dim("width", 3, 1)}
{load_dim("size", 6, 1)}
{load_number("most", 0)}
{load_number("each", 1)}
{load_number("ranges", 2)}
 %range = urem i64 %c, %ranges
 %c_part = udiv i64 %c, %ranges
 %part = urem i64 %c_part, %most
 %row = udiv i64 %c_part, %most
 %length = call i64 @length(ptr %job, i64 %row)
 %part_tokens = call i64 @part_tokens(i64 %length)
 %parts = call i64 @parts(i64 %length)
 %head = mul i64 %range, %each
 %heads_left = sub i64 {heads}, %head
 %heads = call i64 @llvm.umin.i64(i64 %heads_left, i64 %each)
 %row_start = mul i64 %row, {heads}
 %row_head = add i64 %row_start, %head
{_at("q_c", "q", "row_head", group * shape.head_size)}{_at("out_c", "out", "row_head", group * shape.head_size)}\
 %is_empty = icmp eq i64 %length, 0
 br i1 %is_empty, label %clear, label %any
clear:                                        ; in batches with longer rows several chunks do so, which is harmless
 %out_size = mul i64 %heads, {group * shape.head_size}
{loop("z", "%out_size", LANES, zero)}
 ret void
any:
 %is_part = icmp ult i64 %part, %parts
 br i1 %is_part, label %attend, label %end
attend:
 %half = mul i64 %pages, {heads * head_bytes}
 %layer32 = load i32, ptr %layer_data
 %layer = zext i32 %layer32 to i64
 %halves = shl i64 %layer, 1
 %layer_off = mul i64 %halves, %half
 %head_off = mul i64 %head, {head_bytes}
 %keys_off = add i64 %layer_off, %head_off
 %keys = getelementptr i8, ptr %pool, i64 %keys_off
 %table_i = mul i64 %row, %width
 %table = getelementptr i32, ptr %tables, i64 %table_i
 %first = mul i64 %part, %part_tokens
 %left = sub i64 %length, %first
 %tokens = call i64 @llvm.umin.i64(i64 %left, i64 %part_tokens)
 %of_row_i = mul i64 %row, %size
 %of_row = getelementptr float, ptr %scratch, i64 %of_row_i
{_at("records", "of_row", "head", group * shape.record_size)}{_at("own", "records", "part", _part_size(shape))}\
 call void @part(ptr %q_c, ptr %keys, i64 %half, ptr %table, i64 %heads, i64 %first, i64 %tokens, ptr %own)
 %is_whole = icmp eq i64 %parts, 1
 %parts32 = trunc i64 %parts to i32
 %last = sub i32 %parts32, 1
 %counts_of_row = sub i64 %size, {_counts_size(shape)}
 %counts_i = add i64 %counts_of_row, %head
 %counts = getelementptr float, ptr %of_row, i64 %counts_i
{loop("h", "%heads", 1, settle)}
 br label %end
end:
 ret void
}}"""
