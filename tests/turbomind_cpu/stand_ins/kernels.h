// The CPU versions of the kernels that arrive by name, a file a family; `kernels.cpp` is the table.
#pragma once
#include "launch.h"

// dense_kernels.cpp
void embedding_lookup(const Launch&);
void rms_norm(const Launch&);
void rms_norm_plus_one(const Launch&);
void residual_rms_norm(const Launch&);
void query_key_rms_norm(const Launch&);
void gated_silu(const Launch&);
void gated_silu_of_experts(const Launch&);
void float_to_bfloat16(const Launch&);
void bfloat16_to_float_rows(const Launch&);
void collect_hidden_states(const Launch&);

// bookkeeping_kernels.cpp
void prefix_sums(const Launch&);
void clear_token_mask(const Launch&);
void append_token_ids(const Launch&);
void length_criterion(const Launch&);
void stop_words_criterion(const Launch&);
void top_k_logits(const Launch&);
void sample_best(const Launch&);

// attention.cpp
void mla_copy(const Launch&);

// moe.cpp
void fill_strided_pointers(const Launch&);
void moe_reduce(const Launch&);
