#include "matmul.h"

namespace {

constexpr int kLanes = 16, kTile = 4;
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));

// Up to kTile x kTile sums. Compiled for several processors and chosen where it runs: the library travels.
template <int rows, int columns>
__attribute__((always_inline)) inline void sums_of(Rows a, Rows b, int k, float* out, size_t stride) {
    Lanes sums[rows][columns] = {};
    int at = 0;
    for (; at + kLanes <= k; at += kLanes) {
        for (int i = 0; i < rows; ++i) {
            const Lanes left = *reinterpret_cast<const Lanes*>(a.values + i * a.stride + at);
            for (int j = 0; j < columns; ++j) {
                sums[i][j] += left * *reinterpret_cast<const Lanes*>(b.values + j * b.stride + at);
            }
        }
    }
    for (int i = 0; i < rows; ++i) {
        for (int j = 0; j < columns; ++j) {
            float sum = 0;
            for (int lane = 0; lane < kLanes; ++lane) {
                sum += sums[i][j][lane];
            }
            for (int rest = at; rest < k; ++rest) {
                sum += a.values[i * a.stride + rest] * b.values[j * b.stride + rest];
            }
            out[i * stride + j] = sum;
        }
    }
}

#define FOR_SEVERAL_PROCESSORS __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))

FOR_SEVERAL_PROCESSORS void tile(Rows a, Rows b, int k, float* out, size_t stride) {
    sums_of<kTile, kTile>(a, b, k, out, stride);
}

FOR_SEVERAL_PROCESSORS void single(Rows a, Rows b, int k, float* out, size_t stride) {
    sums_of<1, 1>(a, b, k, out, stride);
}

Rows from(Rows rows, int first) { return {rows.values + first * rows.stride, rows.stride}; }

}  // namespace

void product_of_rows(Rows a, Rows b, int m, int n, int k, float* out, size_t stride) {
    const int whole_m = m / kTile * kTile, whole_n = n / kTile * kTile;
    for (int i = 0; i < whole_m; i += kTile) {
        for (int j = 0; j < whole_n; j += kTile) {
            tile(from(a, i), from(b, j), k, out + i * stride + j, stride);
        }
    }
    for (int i = 0; i < m; ++i) {
        for (int j = i < whole_m ? whole_n : 0; j < n; ++j) {
            single(from(a, i), from(b, j), k, out + i * stride + j, stride);
        }
    }
}
