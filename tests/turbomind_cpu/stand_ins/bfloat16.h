// bfloat16 values: exact to float, rounded to nearest even from it, as the GPU does.
#pragma once
#include <cstdint>
#include <cstring>

struct bf16 {
    uint16_t bits;

    bf16() = default;

    bf16(float value) {
        uint32_t word;
        std::memcpy(&word, &value, sizeof word);
        if ((word & 0x7fffffff) > 0x7f800000) {
            bits = 0x7fff;  // NaN
        } else {
            bits = (word + 0x7fff + (word >> 16 & 1)) >> 16;
        }
    }

    operator float() const {
        const uint32_t word = uint32_t{bits} << 16;
        float value;
        std::memcpy(&value, &word, sizeof value);
        return value;
    }
};

static_assert(sizeof(bf16) == 2);

inline float rounded(float value) { return bf16(value); }
