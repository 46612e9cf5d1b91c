// The one matrix product: bfloat16 or float rows unpacked to float, sums in float.
#pragma once
#include <cstddef>
#include <vector>

struct Rows {
    const float* values;
    size_t stride;  // floats from row to row
};

// out[m][n] = sum over k of a[m][k] * b[n][k], with `stride` floats from row to row of out
void product_of_rows(Rows a, Rows b, int m, int n, int k, float* out, size_t stride);

// [rows][columns] floats of a matrix whose element (r, c) lies at r * row_step + c * column_step
template <class T>
void unpack(const T* matrix, int rows, int columns, size_t row_step, size_t column_step, float* out) {
    for (int r = 0; r < rows; ++r) {
        for (int c = 0; c < columns; ++c) {
            out[size_t(r) * columns + c] = matrix[r * row_step + c * column_step];
        }
    }
}
