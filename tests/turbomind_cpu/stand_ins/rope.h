// Rotary embedding of one head's row: neighbouring values (2i, 2i + 1) turn together.
#pragma once
#include <algorithm>
#include <cmath>

#include "launch.h"
#include "layouts.h"

// A pair's frequency as a kind of rope changes it for contexts longer than those of the training.
inline float scaled(float frequency, int i, const RopeParam& rope) {
    if (rope.type == kYarnRope) {
        const float ramp = std::clamp(i * rope.yarn.ramp_div2 - rope.yarn.ramp_mul_min, 0.f, 1.f);
        return frequency * (1 - ramp * (1 - rope.inv_factor));
    }
    if (rope.type == kLlama3Rope) {
        const float kept = std::clamp(rope.llama3.alpha * frequency - rope.llama3.beta, 0.f, 1.f);
        return frequency * (kept + (1 - kept) * rope.inv_factor);
    }
    return frequency * rope.inv_factor;
}

inline void rotate(float* row, int position, const RopeParam& rope) {
    if (rope.type == kNoRope) {
        return;
    }
    require(rope.type != kDynamicRope, "no CPU version of the rope of type", "dynamic");
    require(rope.mrope_mode == 0 && !rope.mrope_ids, "no CPU version of", "mrope");
    const float factor = rope.type == kYarnRope ? rope.yarn.attention_factor : 1;
    for (int i = 0; i < rope.dim; i += 2) {
        const float angle = position * scaled(std::exp2(i * rope.scale_factor), i, rope);
        const float cosine = std::cos(angle) * factor, sine = std::sin(angle) * factor;
        const float even = row[i], odd = row[i + 1];
        row[i] = even * cosine - odd * sine;
        row[i + 1] = odd * cosine + even * sine;
    }
}
