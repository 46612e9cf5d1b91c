// Rotary embedding of one head's row: neighbouring values (2i, 2i + 1) turn together.
#pragma once
#include <algorithm>
#include <cmath>
#include <string>

#include "launch.h"
#include "layouts.h"

inline void rotate(float* row, int position, const RopeParam& rope)
{
    if (rope.type == kNoRope) {
        return;
    }
    const bool yarn = rope.type == kYarnRope;
    require(yarn || rope.type == kDefaultRope || rope.type == kLinearRope, "no CPU version of the rope of type",
            std::to_string(rope.type).c_str());
    require(rope.mrope_mode == 0 && !rope.mrope_ids, "no CPU version of mrope, section mode",
            std::to_string(rope.mrope_mode).c_str());
    const float factor = yarn ? rope.yarn.attention_factor : 1;
    for (int i = 0; i < rope.dim; i += 2) {
        float frequency = std::exp2(i * rope.scale_factor);
        if (yarn) {
            const float ramp = std::clamp(i * rope.yarn.ramp_div2 - rope.yarn.ramp_mul_min, 0.f, 1.f);
            frequency *= 1 - ramp * (1 - rope.inv_factor);
        }
        else {
            frequency *= rope.inv_factor;
        }
        const float cosine = std::cos(position * frequency) * factor, sine = std::sin(position * frequency) * factor;
        const float even = row[i], odd = row[i + 1];
        row[i]     = even * cosine - odd * sine;
        row[i + 1] = odd * cosine + even * sine;
    }
}
