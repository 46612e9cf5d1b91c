// The engine's own records, as its binary lays them out (LMDeploy 0.18.0; the rig checks the binary's sha256).
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "bfloat16.h"

constexpr int kDeviceType = 2;
constexpr int kBF16 = 67591;

struct Buffer {
    std::shared_ptr<void> data;
    int64_t base;  // elements
    int64_t size;  // elements
    int device_type, device_id;
    int dtype;

    template <class T>
    T* as() const {
        return static_cast<T*>(data.get()) + base;
    }
};
static_assert(sizeof(Buffer) == 48 && offsetof(Buffer, device_type) == 32 && offsetof(Buffer, dtype) == 40);

struct Tensor {
    std::vector<int64_t> shape, strides;
    int64_t size;
    Buffer buffer;
};
static_assert(sizeof(Tensor) == 104 && offsetof(Tensor, buffer) == 56);

struct StridedPointer {
    void* data;
    int stride;
};
static_assert(sizeof(StridedPointer) == 16);

enum Epilogue { kNoEpilogue = 0, kGatedSilu = 2 };

// A linear layer, or all experts' of one: then `weight` holds a StridedPointer an expert.
struct LinearWeight {
    char before[176];
    int input_dim, output_dim;
    int unread;
    int epilogue;
    char between[96];
    Tensor weight;
};
static_assert(offsetof(LinearWeight, epilogue) == 188 && offsetof(LinearWeight, weight) == 288);

enum RopeType { kNoRope, kDefaultRope, kLinearRope, kDynamicRope, kYarnRope, kLlama3Rope };

struct RopeParam {
    int type;
    float* base;  // a sequence, of dynamic ropes
    int dim;
    float scale_factor;  // -log2(theta) / dim
    float inv_factor;
    struct {
        float scale, attention_factor, ramp_div2, ramp_mul_min;
    } yarn;
    struct {
        float scale, alpha, beta;
    } llama3;
    int mrope_mode;
    int unread;
    int mrope_section[3];
    int* mrope_ids;
    int* mrope_delta;
    int* mrope_offsets;
    int* mrope_length;
};
static_assert(sizeof(RopeParam) == 112 && offsetof(RopeParam, yarn) == 28 && offsetof(RopeParam, llama3) == 44);
static_assert(offsetof(RopeParam, mrope_mode) == 56 && offsetof(RopeParam, mrope_ids) == 80);

struct AttentionParams {
    bf16* out;
    const bf16 *q, *k, *v;
    int64_t stride;  // of a token's q, k and v, elements
    const bf16 *q_bias, *k_bias, *v_bias;
    const int *cu_q_len, *cu_k_len;
    const int* readonly_blocks;
    const bool* finished;
    const float* rope_theta;
    const void* token_mask;
    const bf16* sinks;
    float scale_sinks;
    const bf16* kv_cache;      // flattened: [kv head][k, v][tokens][D]
    int stride_h, key_to_val;  // elements
    char** block_ptrs;
    const int* cu_block_nums;
    int layer_offset;  // bytes into a block
    int block_len;     // tokens
    int token_num, batch_size, max_q, max_k;
    int heads, kv_heads, head_dim;
    float scale;  // times log2(e)
    int window;
    bool causal;
    int layer;
    RopeParam rope;
    char after[112];
};
static_assert(sizeof(AttentionParams) == 440 && offsetof(AttentionParams, cu_q_len) == 64);
static_assert(offsetof(AttentionParams, sinks) == 112 && offsetof(AttentionParams, kv_cache) == 128);
static_assert(offsetof(AttentionParams, block_ptrs) == 144 && offsetof(AttentionParams, head_dim) == 192);
static_assert(offsetof(AttentionParams, causal) == 204 && offsetof(AttentionParams, rope) == 216);

// cutlass::FastDivmod
struct Divisor {
    int value;
    unsigned multiplier, shift;
};
static_assert(sizeof(Divisor) == 12);
