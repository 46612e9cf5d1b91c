// The launchers of attention, in the engine's place: the cache's blocks, rope, and causal softmax.
//
// A cache block holds, from a layer's offset on, [kv head][k, then v][token][D]. Heads of 576 are MLA's latents, whose
// values are the keys: there is no v part, neither in a block nor in the flattened cache.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"
#include "layouts.h"
#include "matmul.h"
#include "rope.h"

namespace {

constexpr int kLatentHead = 576, kQueryBlock = 64;

bool has_values(int head_dim) { return head_dim != kLatentHead; }

struct Cache {
    char** blocks;
    const int* first_block;  // [sequences + 1]
    int layer_offset, block_len, kv_heads, head_dim;

    bf16* key(int sequence, int head, int token) const {
        char* const block = blocks[first_block[sequence] + token / block_len] + layer_offset;
        const int parts = has_values(head_dim) ? 2 : 1;
        return reinterpret_cast<bf16*>(block) + (size_t(head) * parts * block_len + token % block_len) * head_dim;
    }

    bf16* value(int sequence, int head, int token) const {
        return key(sequence, head, token) + (has_values(head_dim) ? size_t(block_len) * head_dim : 0);
    }
};

void check_writable(const int* readonly_blocks, int batch_size) {
    const bool none = std::all_of(readonly_blocks, readonly_blocks + batch_size, [](int n) { return n == 0; });
    require(none, "no CPU version of a cache", "shared by prompts");
}

std::vector<float> with_bias(const bf16* row, const bf16* bias, int dim) {
    std::vector<float> sum(row, row + dim);
    for (int i = 0; bias && i < dim; ++i) {
        sum[i] = rounded(sum[i] + bias[i]);
    }
    return sum;
}

void store_key_and_value(const Cache& cache, int sequence, int head, int token, const bf16* k, const bf16* k_bias,
                         const bf16* v, const bf16* v_bias, const RopeParam& rope) {
    std::vector<float> key = with_bias(k, k_bias ? k_bias + head * cache.head_dim : nullptr, cache.head_dim);
    rotate(key.data(), token, rope);
    std::copy(key.begin(), key.end(), cache.key(sequence, head, token));
    if (has_values(cache.head_dim)) {
        const auto value = with_bias(v, v_bias ? v_bias + head * cache.head_dim : nullptr, cache.head_dim);
        std::copy(value.begin(), value.end(), cache.value(sequence, head, token));
    }
}

// The queries of one head and sequence, the last of which stands at the last of `tokens` keys.
void attend(const AttentionParams& p, int first_row, int queries, int head, const std::vector<float>& keys,
            const std::vector<float>& values_by_column, int tokens) {
    const int dim = p.head_dim;
    for (int begin = 0; begin < queries; begin += kQueryBlock) {
        const int rows = std::min(kQueryBlock, queries - begin);
        const int seen = tokens - (queries - begin - rows);  // of the block's last query
        std::vector<float> q, scores(size_t(rows) * seen), sums(rows), out(size_t(rows) * dim);
        for (int i = 0; i < rows; ++i) {
            const int row = first_row + begin + i;
            auto query = with_bias(p.q + row * p.stride + head * dim, p.q_bias ? p.q_bias + head * dim : nullptr, dim);
            rotate(query.data(), seen - rows + i, p.rope);
            std::transform(query.begin(), query.end(), std::back_inserter(q), rounded);
        }
        product_of_rows({q.data(), size_t(dim)}, {keys.data(), size_t(dim)}, rows, seen, dim, scores.data(), seen);
        for (int i = 0; i < rows; ++i) {
            float* const row = scores.data() + size_t(i) * seen;
            const int end = seen - rows + i + 1;
            const float top = *std::max_element(row, row + end);
            std::fill(row + end, row + seen, 0.f);
            for (int t = 0; t < end; ++t) {
                const float weight = std::exp2((row[t] - top) * p.scale);
                sums[i] += weight;
                row[t] = rounded(weight);
            }
        }
        product_of_rows({scores.data(), size_t(seen)}, {values_by_column.data(), size_t(tokens)}, rows, dim, seen,
                        out.data(), dim);
        for (int i = 0; i < rows; ++i) {
            bf16* const to = p.out + (size_t(first_row + begin + i) * p.heads + head) * dim;
            std::transform(out.begin() + i * dim, out.begin() + (i + 1) * dim, to,
                           [&](float x) { return x / sums[i]; });
        }
    }
}

// Attention of one sequence, its keys and values got by `key(head, token)` and `value(head, token)`.
template <class Key, class Value>
void attend_sequence(const AttentionParams& p, int sequence, Key key, Value value) {
    const int first_row = p.cu_q_len[sequence], queries = p.cu_q_len[sequence + 1] - first_row;
    const int tokens = p.cu_k_len[sequence + 1] - p.cu_k_len[sequence], dim = p.head_dim;
    const int group = p.heads / p.kv_heads;
    for (int kv_head = 0; kv_head < p.kv_heads; ++kv_head) {
        std::vector<float> keys(size_t(tokens) * dim), values(size_t(tokens) * dim);
        for (int t = 0; t < tokens; ++t) {
            std::copy_n(key(kv_head, t), dim, keys.data() + size_t(t) * dim);
            unpack(value(kv_head, t), dim, 1, 1, 1, values.data() + size_t(t) * dim);
        }
        std::vector<float> by_column(values.size());
        unpack(values.data(), dim, tokens, 1, dim, by_column.data());
        for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
            attend(p, first_row, queries, head, keys, by_column, tokens);
        }
    }
}

void check(const AttentionParams& p) {
    require(!p.sinks, "no CPU version of attention", "with sinks");
    require(p.causal, "no CPU version of attention", "that is not causal");
    require(p.window >= p.max_k, "no CPU version of attention", "with a window");
    check_writable(p.readonly_blocks, p.batch_size);
}

}  // namespace

extern "C" {

INSTEAD_OF(
    "_ZN9turbomind18invokeProcessKV_v2I13__nv_bfloat16EEvPPcPKT_S6_S6_S6_PKiS8_S8_S8_RKNS_15RopeKernelParamElllliii"
    "N7cutlass10FastDivmodEiiiiiP11CUstream_st",
    process_kv)
INSTEAD_OF(
    "_ZN9turbomind18invokeFlattenKV_v2I13__nv_bfloat16EEvPT_S3_PPcPKiS7_RKNS_15RopeKernelParamElllliii"
    "N7cutlass10FastDivmodEiiiiiP11CUstream_st",
    flatten_kv)
INSTEAD_OF("_ZN9turbomind17dispatchAttentionI13__nv_bfloat16EEvRKNS_15AttentionParamsIT_EE", prefill)
INSTEAD_OF("_ZN9turbomind16dispatchDecodingI13__nv_bfloat16EEvRKNS_15AttentionParamsIT_EE", decode)

// New keys and values of a prefill, rotated, into the cache's blocks. Strides: sequence, first, head, token, in heads.
void process_kv(char** blocks, const bf16* k, const bf16* v, const bf16* k_bias, const bf16* v_bias,
                const int* cu_q_len, const int* cu_k_len, const int* cu_block_num, const int* readonly_blocks,
                const RopeParam& rope, int64_t stride_b, int64_t stride_c, int64_t stride_h, int64_t stride_s,
                int block_len, int layer_offset, int, Divisor cp_size, int, int kv_heads, int head_dim, int batch_size,
                int quant, void*) {
    require(cp_size.value == 1 && quant == 0, "no CPU version of a cache", "quantised or spread over GPUs");
    check_writable(readonly_blocks, batch_size);
    const Cache cache{blocks, cu_block_num, layer_offset, block_len, kv_heads, head_dim};
    for (int b = 0; b < batch_size; ++b) {
        const int queries = cu_q_len[b + 1] - cu_q_len[b], tokens = cu_k_len[b + 1] - cu_k_len[b];
        for (int s = 0; s < queries; ++s) {
            for (int h = 0; h < kv_heads; ++h) {
                const int64_t at = (b * stride_b + cu_q_len[b] * stride_c + s * stride_s + h * stride_h) * head_dim;
                store_key_and_value(cache, b, h, tokens - queries + s, k + at, k_bias, v + at, v_bias, rope);
            }
        }
    }
}

// The whole cache of a batch, side by side, for a prefill.
void flatten_kv(bf16* k, bf16* v, char** blocks, const int* cu_k_len, const int* cu_block_num, const RopeParam& rope,
                int64_t stride_b, int64_t stride_c, int64_t stride_h, int64_t stride_s, int block_len, int layer_offset,
                int, Divisor cp_size, int, int kv_heads, int head_dim, int batch_size, int quant, void*) {
    require(cp_size.value == 1 && quant == 0, "no CPU version of a cache", "quantised or spread over GPUs");
    require(rope.type == kNoRope, "no CPU version of a cache", "that is rotated when it is read");
    const Cache cache{blocks, cu_block_num, layer_offset, block_len, kv_heads, head_dim};
    for (int b = 0; b < batch_size; ++b) {
        const int first = cu_k_len[b] - cu_k_len[0], tokens = cu_k_len[b + 1] - cu_k_len[b];
        for (int s = 0; s < tokens; ++s) {
            for (int h = 0; h < kv_heads; ++h) {
                const int64_t at = (b * stride_b + first * stride_c + s * stride_s + h * stride_h) * head_dim;
                std::copy_n(cache.key(b, h, s), head_dim, k + at);
                if (has_values(head_dim)) {
                    std::copy_n(cache.value(b, h, s), head_dim, v + at);
                }
            }
        }
    }
}

// The queries of prompts, or of parts of them, over the flattened cache.
void prefill(const AttentionParams& p) {
    check(p);
    for (int b = 0; b < p.batch_size; ++b) {
        const auto key = [&](int head, int token) {
            return p.kv_cache + int64_t{head} * p.stride_h +
                   int64_t{p.cu_k_len[b] - p.cu_k_len[0] + token} * p.head_dim;
        };
        attend_sequence(p, b, key, [&](int head, int token) { return key(head, token) + p.key_to_val; });
    }
}

// One query a sequence, over the cache's blocks, once its own key and value are there.
void decode(const AttentionParams& p) {
    check(p);
    const Cache cache{p.block_ptrs, p.cu_block_nums, p.layer_offset, p.block_len, p.kv_heads, p.head_dim};
    for (int b = 0; b < p.batch_size; ++b) {
        const int row = p.cu_q_len[b];
        require(p.cu_q_len[b + 1] - row == 1, "no CPU version of decoding", "more than one token a sequence");
        if (p.finished[b]) {
            std::fill_n(p.out + size_t(row) * p.heads * p.head_dim, p.heads * p.head_dim, bf16(0.f));
            continue;
        }
        const int last = p.cu_k_len[b + 1] - p.cu_k_len[b] - 1;
        for (int h = 0; h < p.kv_heads; ++h) {
            const int64_t at = row * p.stride + h * p.head_dim;
            store_key_and_value(cache, b, h, last, p.k + at, p.k_bias, p.v + at, p.v_bias, p.rope);
        }
        attend_sequence(
            p, b, [&](int head, int token) { return cache.key(b, head, token); },
            [&](int head, int token) { return cache.value(b, head, token); });
    }
}

}  // extern "C"

// q, k and v as projected, with latents last, become queries and one key with what is rotated first:
// qkv, q, kv, heads, head dim, latents, rotated
void mla_copy(const Launch& call) {
    const int heads = call.arg<int>(3), dim = call.arg<int>(4), latents = call.arg<int>(5), turned = call.arg<int>(6);
    for (unsigned token = 0; token < call.grid.x; ++token) {
        for (int head = 0; head <= heads; ++head) {
            const bf16* const from = head < heads ? call.arg<const bf16*>(1) + (size_t(token) * heads + head) * dim
                                                  : call.arg<const bf16*>(2) + size_t(token) * dim;
            bf16* const to = call.arg<bf16*>(0) + (size_t(token) * (heads + 1) + head) * dim;
            std::copy_n(from + latents, turned, to);
            std::copy_n(from, latents, to + turned);
        }
    }
}
