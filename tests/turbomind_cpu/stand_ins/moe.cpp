// Mixture of experts: choosing, the experts' own products, and adding up what they give.
//
// Chosen tokens are listed flat, expert after expert, tokens ascending: f2n names a flat row's token, f2E its expert,
// en2f[slot * tokens + token] the flat row of a token's slot-th expert, with its weight in `scales` likewise.
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

#include "kernels.h"
#include "layouts.h"
#include "matmul.h"

#define LINEAR_FORWARD \
    "_ZN9turbomind11LlamaLinear7ForwardERKNS_4core6TensorERKNS_12LinearWeightERKNS1_7Buffer_IiEESB_NS1_3RefIS2_EE"

extern "C" int cudaMalloc(void**, size_t);
extern "C" int cudaFree(void*);

namespace {

struct Routing {
    int *f2n, *f2E, *en2f, *offsets;  // offsets: [local experts + 1]
    float* scales;
};

struct Choice {
    int expert;
    float weight;
};

// `choose(row of logits)` gives a token's experts and their weights.
template <class Choose>
void route(const Routing& to, const float* logits, const bool* token_mask, int tokens, int experts, int slots,
           int first, int count, Choose choose) {
    std::vector<std::vector<std::pair<int, int>>> chosen_by(count);  // an expert's (token, slot)
    std::fill_n(to.en2f, size_t(slots) * tokens, -1);
    std::fill_n(to.scales, size_t(slots) * tokens, 0.f);
    for (int token = 0; token < tokens; ++token) {
        if (token_mask && !token_mask[token]) {
            continue;
        }
        const std::vector<Choice> choices = choose(logits + size_t(token) * experts);
        for (int slot = 0; slot < slots; ++slot) {
            const int local = choices[slot].expert - first;
            to.scales[slot * tokens + token] = choices[slot].weight;
            if (local >= 0 && local < count) {
                chosen_by[local].emplace_back(token, slot);
            }
        }
    }
    int flat = 0;
    for (int local = 0; local < count; ++local) {
        to.offsets[local] = flat;
        for (const auto& [token, slot] : chosen_by[local]) {
            to.f2n[flat] = token;
            to.f2E[flat] = local;
            to.en2f[slot * tokens + token] = flat++;
        }
    }
    to.offsets[count] = flat;
}

// The `slots` experts of the highest keys, weighted by `weights`; the first of equals.
std::vector<Choice> best(const std::vector<float>& keys, const std::vector<float>& weights, int slots) {
    std::vector<int> order(keys.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return keys[a] > keys[b]; });
    std::vector<Choice> choices;
    for (int slot = 0; slot < slots; ++slot) {
        choices.push_back({order[slot], weights[order[slot]]});
    }
    return choices;
}

void scale(std::vector<Choice>& choices, bool to_sum_one, float small, float factor) {
    float sum = small;
    for (const Choice& choice : choices) {
        sum += choice.weight;
    }
    for (Choice& choice : choices) {
        choice.weight = choice.weight * factor / (to_sum_one ? sum : 1);
    }
}

std::vector<float> softmax(const float* logits, int n) {
    std::vector<float> weights(n);
    const float top = *std::max_element(logits, logits + n);
    float sum = 0;
    for (int i = 0; i < n; ++i) {
        sum += weights[i] = std::exp(logits[i] - top);
    }
    for (float& weight : weights) {
        weight /= sum;
    }
    return weights;
}

std::vector<float> sigmoids(const float* logits, int n) {
    std::vector<float> weights(n);
    std::transform(logits, logits + n, weights.begin(), [](float x) { return 1 / (1 + std::exp(-x)); });
    return weights;
}

// The engine's own function of a name that this library takes.
template <class Function>
Function original(const char* symbol) {
    static void* const engine = [] {
        std::ifstream maps("/proc/self/maps");
        for (std::string line; std::getline(maps, line);) {
            const auto path = line.find('/');
            if (path != line.npos && line.find("/_turbomind.") != line.npos) {
                return dlopen(line.c_str() + path, RTLD_LAZY | RTLD_NOLOAD);
            }
        }
        refuse("the engine is not loaded", "_turbomind");
    }();
    void* const function = dlsym(engine, symbol);
    require(function, "the engine lacks the function", symbol);
    return reinterpret_cast<Function>(function);
}

// An engine-owned tensor [rows][columns] in bfloat16.
Tensor device_tensor(int64_t rows, int64_t columns) {
    void* memory;
    cudaMalloc(&memory, rows * columns * sizeof(bf16));
    return {
        {rows, columns}, {columns, 1}, rows * columns, {{memory, cudaFree}, 0, rows * columns, kDeviceType, 0, kBF16}};
}

}  // namespace

extern "C" {

INSTEAD_OF("_ZN9turbomind16invokeMoeGate_V2EPiS0_S0_S0_PfPvS0_PKfPKbiiiiiibbfP11CUstream_st", gate_by_logit)
INSTEAD_OF("_ZN9turbomind21invokeMoeGate_NoAuxTCEPiS0_S0_S0_PfPvS0_PKfPKbS4_iiiiiibfbP11CUstream_st", gate_by_score)
INSTEAD_OF("_ZN9turbomind4gemm10PackWeightERNS_12LinearWeightERKNS0_15LayoutConverterEP11CUstream_st", pack_weight)
INSTEAD_OF(LINEAR_FORWARD, linear_forward)

// A softmax over all experts gives the weights; the highest logits choose.
void gate_by_logit(int* f2n, int* f2E, int* en2f, int* offsets, float* scales, void*, int*, const float* logits,
                   const bool* token_mask, int tokens, int, int experts, int slots, int first, int count,
                   bool softmaxed, bool to_sum_one, float factor, void*) {
    require(softmaxed, "no CPU version of routing", "without a softmax over all experts");
    route({f2n, f2E, en2f, offsets, scales}, logits, token_mask, tokens, experts, slots, first, count,
          [&](const float* row) {
              auto choices = best({row, row + experts}, softmax(row, experts), slots);
              scale(choices, to_sum_one, 0, factor);
              return choices;
          });
}

// Scores with a correction bias choose; the scores without it are the weights.
void gate_by_score(int* f2n, int* f2E, int* en2f, int* offsets, float* scales, void*, int*, const float* logits,
                   const bool* token_mask, const float* bias, int tokens, int, int experts, int slots, int first,
                   int count, bool to_sum_one, float factor, bool sigmoid, void*) {
    route({f2n, f2E, en2f, offsets, scales}, logits, token_mask, tokens, experts, slots, first, count,
          [&](const float* row) {
              const std::vector<float> scores = sigmoid ? sigmoids(row, experts) : softmax(row, experts);
              std::vector<float> keys = scores;
              for (int i = 0; bias && i < experts; ++i) {
                  keys[i] += bias[i];
              }
              auto choices = best(keys, scores, slots);
              scale(choices, to_sum_one, 1e-20f, factor);
              return choices;
          });
}

// Expert weights stay [input][output], row after row: no GPU layout.
void pack_weight(LinearWeight&, const void*, void*) {}

// Experts' products; a plain layer's goes on to the engine, which asks cuBLAS.
void linear_forward(void* self, const Tensor& input, const LinearWeight& weight, const Buffer& indices,
                    const Buffer& offsets, Tensor* output) {
    if (!offsets.data) {
        return original<decltype(&linear_forward)>(LINEAR_FORWARD)(self, input, weight, indices, offsets, output);
    }
    require(weight.epilogue == kNoEpilogue, "no CPU version of experts' products", "with a fused activation");
    require(input.buffer.dtype == kBF16, "no CPU version of experts' products", "in another dtype than bfloat16");
    const int inputs = weight.input_dim, outputs = weight.output_dim;
    const int* row_of = indices.data ? indices.as<const int>() : nullptr;
    if (!output->buffer.data) {
        *output = device_tensor(row_of ? indices.size : input.shape[0], outputs);
    }
    const auto* const experts = weight.weight.buffer.as<const StridedPointer>();
    const int* const ends = offsets.as<const int>();
    const size_t out_step = output->strides[0];

    for (int expert = 0; expert < weight.weight.buffer.size; ++expert) {
        const int begin = ends[expert], rows = ends[expert + 1] - begin;
        if (rows == 0) {
            continue;
        }
        std::vector<float> given(size_t(rows) * inputs), columns(size_t(outputs) * inputs),
            products(size_t(rows) * outputs);
        for (int j = 0; j < rows; ++j) {
            const int row = row_of ? row_of[begin + j] : begin + j;
            std::copy_n(input.buffer.as<const bf16>() + row * input.strides[0], inputs,
                        given.data() + size_t(j) * inputs);
        }
        unpack(static_cast<const bf16*>(experts[expert].data), outputs, inputs, 1, outputs, columns.data());
        product_of_rows({given.data(), size_t(inputs)}, {columns.data(), size_t(inputs)}, rows, outputs, inputs,
                        products.data(), outputs);
        for (int j = 0; j < rows; ++j) {
            std::copy_n(products.data() + size_t(j) * outputs, outputs,
                        output->buffer.as<bf16>() + (begin + j) * out_step);
        }
    }
}

}  // extern "C"

// by value: 64 strided pointers, where to write them, how many
void fill_strided_pointers(const Launch& call) {
    struct Pointers {
        StridedPointer values[64];
        StridedPointer* to;
        int n;
    };
    const auto pointers = call.arg<Pointers>(0);
    std::copy_n(pointers.values, pointers.n, pointers.to);
}

// dst, rows of experts, bias, weights, en2f, f2E, shared expert's gate, shared expert's rows, 2 ints, dim, tokens,
// factor
void moe_reduce(const Launch& call) {
    const bool plain = !call.arg<const void*>(2) && !call.arg<const void*>(6) && call.arg<bf16>(12) == 1.f;
    require(plain, "no CPU version of adding up experts", "with a bias, a gate or a factor");
    const int slots = std::atoi(std::strstr(call.name, "ILi8ELi") + 7);
    const int dim = call.arg<int>(10), tokens = call.arg<int>(11);
    const bf16* const rows = call.arg<const bf16*>(1);
    const bf16* const shared = call.arg<const bf16*>(7);
    std::vector<float> sum(dim);
    for (int token = 0; token < tokens; ++token) {
        std::fill(sum.begin(), sum.end(), 0.f);
        if (shared) {
            std::copy_n(shared + int64_t{token} * dim, dim, sum.data());
        }
        for (int slot = 0; slot < slots; ++slot) {
            const int flat = call.arg<const int*>(4)[slot * tokens + token];
            if (flat >= 0) {
                const float weight = call.arg<const float*>(3)[slot * tokens + token];
                for (int i = 0; i < dim; ++i) {
                    sum[i] += weight * rows[int64_t{flat} * dim + i];
                }
            }
        }
        std::copy(sum.begin(), sum.end(), call.arg<bf16*>(0) + int64_t{token} * dim);
    }
}
