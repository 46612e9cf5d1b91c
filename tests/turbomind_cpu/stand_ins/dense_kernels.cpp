// Embeddings, norms, activations and copies. Norms round as the GPU does: sums in float, each stored value in bfloat16.
#include <cmath>
#include <cstdint>
#include <utility>

#include "bfloat16.h"
#include "kernels.h"

namespace {

struct NormWeight {
    const bf16* values;
    float plus;

    float operator[](int i) const { return plus == 0 ? float(values[i]) : rounded(values[i] + plus); }
};

void normalise(const bf16* from, NormWeight weight, int dim, float eps, bf16* to) {
    float squares = 0;
    for (int i = 0; i < dim; ++i) {
        squares += float(from[i]) * float(from[i]);
    }
    const float scale = 1 / std::sqrt(squares / dim + eps);
    for (int i = 0; i < dim; ++i) {
        to[i] = rounded(from[i] * scale) * weight[i];
    }
}

// dst, its row length, src, its row length, weight, dim, rows, eps
void norm_of_rows(const Launch& call, float plus) {
    bf16* const to = call.arg<bf16*>(0);
    const bf16* const from = call.arg<const bf16*>(2);
    const NormWeight weight{call.arg<const bf16*>(4), plus};
    for (int row = 0; row < call.arg<int>(6); ++row) {
        normalise(from + int64_t{row} * call.arg<int>(3), weight, call.arg<int>(5), call.arg<float>(7),
                  to + int64_t{row} * call.arg<int>(1));
    }
}

// gate (in and out), up, functor, row length, rows, dim
void gate_rows(const Launch& call, int rows) {
    bf16* const gate = call.arg<bf16*>(0);
    const bf16* const up = call.arg<const bf16*>(1);
    const int64_t stride = call.arg<int64_t>(3);
    for (int row = 0; row < rows; ++row) {
        for (int i = 0; i < call.arg<int>(5); ++i) {
            bf16& value = gate[row * stride + i];
            const float x = value;
            value = rounded(x / (1 + std::exp(-x))) * up[row * stride + i];
        }
    }
}

// Of the type that a kernel copies by.
size_t unit_bytes(const char* name) {
    for (const auto& [type, bytes] : {std::pair{"5uint4", 16}, {"5uint2", 8}, {"5uint1", 4}}) {
        if (std::strstr(name, type)) {
            return bytes;
        }
    }
    return sizeof(bf16);
}

}  // namespace

// dst, its row length, table, its row length, ids, rows, dim
void embedding_lookup(const Launch& call) {
    const int* const ids = call.arg<const int*>(4);
    for (int row = 0; row < call.arg<int>(5); ++row) {
        std::memcpy(call.arg<bf16*>(0) + int64_t{row} * call.arg<int>(1),
                    call.arg<const bf16*>(2) + int64_t{ids[row]} * call.arg<int>(3), sizeof(bf16) * call.arg<int>(6));
    }
}

void rms_norm(const Launch& call) { norm_of_rows(call, 0); }

void rms_norm_plus_one(const Launch& call) { norm_of_rows(call, 1); }

// residual (in and out), hidden (in and out), weight, bias or null, dim, rows, eps
void residual_rms_norm(const Launch& call) {
    const bf16* const bias = call.arg<const bf16*>(3);
    const int dim = call.arg<int>(4);
    for (int row = 0; row < call.arg<int>(5); ++row) {
        bf16* const residual = call.arg<bf16*>(0) + int64_t{row} * dim;
        bf16* const hidden = call.arg<bf16*>(1) + int64_t{row} * dim;
        for (int i = 0; i < dim; ++i) {
            residual[i] = residual[i] + hidden[i] + (bias ? float(bias[i]) : 0);
        }
        normalise(residual, {call.arg<const bf16*>(2), 0}, dim, call.arg<float>(6), hidden);
    }
}

// x (in and out), its row length, query weight, key weight, head dim, query heads, key heads, rows, blocks, eps
void query_key_rms_norm(const Launch& call) {
    const int dim = call.arg<int>(4), queries = call.arg<int>(5), keys = call.arg<int>(6);
    for (int row = 0; row < call.arg<int>(7); ++row) {
        bf16* const x = call.arg<bf16*>(0) + int64_t{row} * call.arg<int>(1);
        for (int head = 0; head < queries + keys; ++head) {
            const bf16* const weight = call.arg<const bf16*>(head < queries ? 2 : 3);
            normalise(x + head * dim, {weight, 0}, dim, call.arg<float>(9), x + head * dim);
        }
    }
}

void gated_silu(const Launch& call) { gate_rows(call, call.arg<int>(4)); }

// Only the rows that experts were given; their number lies on the device.
void gated_silu_of_experts(const Launch& call) { gate_rows(call, *call.arg<const int*>(6)); }

// dst, src, values
void float_to_bfloat16(const Launch& call) {
    for (size_t i = 0; i < call.arg<size_t>(2); ++i) {
        call.arg<bf16*>(0)[i] = call.arg<const float*>(1)[i];
    }
}

// src, dst, columns
void bfloat16_to_float_rows(const Launch& call) {
    const int64_t values = int64_t{call.grid.y} * call.arg<int>(2);
    for (int64_t i = 0; i < values; ++i) {
        call.arg<float*>(1)[i] = call.arg<const bf16*>(0)[i];
    }
}

// src, row ids (negative: none), dst, row length in units of the template's type
void collect_hidden_states(const Launch& call) {
    const size_t bytes = size_t(call.arg<int>(3)) * unit_bytes(call.name);
    for (unsigned row = 0; row < call.grid.x; ++row) {
        const int id = call.arg<const int*>(1)[row];
        if (id >= 0) {
            std::memcpy(call.arg<char*>(2) + row * bytes, call.arg<const char*>(0) + id * bytes, bytes);
        }
    }
}
