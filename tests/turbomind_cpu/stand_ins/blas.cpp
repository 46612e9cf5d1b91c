// cuBLAS: the one product that the engine asks for.
#include <string>

#include "bfloat16.h"
#include "launch.h"
#include "matmul.h"

namespace {

constexpr int kOk = 0, kTransposed = 1, kFloat = 0, kBF16 = 14, kChunk = 512;

}  // namespace

extern "C" {

int cublasCreate_v2(void** handle) {
    static char anything;
    *handle = &anything;
    return kOk;
}

int cublasDestroy_v2(void*) { return kOk; }
int cublasSetStream_v2(void*, void*) { return kOk; }
int cublasSetWorkspace_v2(void*, void*, size_t) { return kOk; }

int cublasGetMathMode(void*, int* mode) {
    *mode = 0;
    return kOk;
}

// C[m, n] = alpha * op(A)[m, k] * op(B)[k, n] + beta * C, all by columns; A and B in bfloat16, C in it or in float
int cublasGemmEx(void*, int op_a, int op_b, int m, int n, int k, const void* alpha, const void* a, int type_a, int lda,
                 const void* b, int type_b, int ldb, const void* beta, void* c, int type_c, int ldc, int, int) {
    require(type_a == kBF16 && type_b == kBF16 && (type_c == kBF16 || type_c == kFloat), "no CPU product into the type",
            std::to_string(type_c).c_str());
    const float factor = *static_cast<const float*>(alpha), kept = *static_cast<const float*>(beta);

    std::vector<float> right(size_t(n) * k), left(size_t(kChunk) * k), products(size_t(n) * kChunk);
    unpack(static_cast<const bf16*>(b), n, k, op_b == kTransposed ? 1 : ldb, op_b == kTransposed ? ldb : 1,
           right.data());

    for (int begin = 0; begin < m; begin += kChunk) {  // a vocabulary's rows would fill the memory as floats
        const int rows = m - begin < kChunk ? m - begin : kChunk;
        const size_t step = op_a == kTransposed ? lda : 1;
        unpack(static_cast<const bf16*>(a) + begin * step, rows, k, step, op_a == kTransposed ? 1 : lda, left.data());
        product_of_rows({right.data(), size_t(k)}, {left.data(), size_t(k)}, n, rows, k, products.data(), kChunk);
        for (int j = 0; j < n; ++j) {
            for (int i = 0; i < rows; ++i) {
                const size_t at = size_t(j) * ldc + begin + i;
                const float value = factor * products[size_t(j) * kChunk + i];
                if (type_c == kBF16) {
                    bf16* out = static_cast<bf16*>(c) + at;
                    *out = kept == 0 ? value : value + kept * float(*out);
                } else {
                    float* out = static_cast<float*>(c) + at;
                    *out = kept == 0 ? value : value + kept * *out;
                }
            }
        }
    }
    return kOk;
}

}  // extern "C"
