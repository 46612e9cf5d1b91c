// What becomes of chosen tokens: greedy choice, appending, the rules that end a request; offsets of a batch.
#include <algorithm>
#include <cstdint>

#include "kernels.h"

namespace {

// `sampling` gets candidates sorted; the best of them is the best of the logits that were to be sorted.
struct Candidates {
    const float* logits;
    int vocabulary, row_length;
};
thread_local Candidates candidates;

}  // namespace

// logits, 2 buffers, the largest k, each row's k, vocabulary, row length
void top_k_logits(const Launch& call) {
    require(call.arg<int>(3) <= 1, "no CPU version of sampling, ask for top_k=1", call.name);
    candidates = {call.arg<const float*>(0), call.arg<int>(5), call.arg<int>(6)};
}

// logits, row length, indices, kept, random states, an int a row, ids (out), lengths (in and out), 3 of log
// probabilities
void sample_best(const Launch& call) {
    require(!call.arg<const void*>(8), "no CPU version of log probabilities", call.name);
    for (unsigned row = 0; row < call.grid.x; ++row) {
        const float* const logits = candidates.logits + size_t{row} * candidates.row_length;
        int best = 0;
        for (int id = 1; id < candidates.vocabulary; ++id) {
            if (logits[id] > logits[best]) {
                best = id;
            }
        }
        call.arg<int*>(6)[row] = best;
        call.arg<int*>(7)[row] += 1;
    }
}

// rows, ids, positions, sequences
void append_token_ids(const Launch& call) {
    for (int i = 0; i < call.arg<int>(3); ++i) {
        call.arg<int**>(0)[i][call.arg<const int*>(2)[i]] = call.arg<const int*>(1)[i];
    }
}

// finished, lengths, limits, sequences
void length_criterion(const Launch& call) {
    for (int i = 0; i < call.arg<int>(3); ++i) {
        call.arg<bool*>(0)[i] |= call.arg<const int*>(1)[i] >= call.arg<const int*>(2)[i];
    }
}

// token ids, lengths, stop words [sequences][2][n]: their tokens, then the end of each or -1, finished, n, sequences
void stop_words_criterion(const Launch& call) {
    const int n = call.arg<int>(4);
    for (int i = 0; i < call.arg<int>(5); ++i) {
        const int* const ids = call.arg<const int* const*>(0)[i];
        const int length = call.arg<const int*>(1)[i];
        const int* const words = call.arg<const int*>(2) + size_t(i) * 2 * n;
        const int* const ends = words + n;
        for (int word = 0, begin = 0; word < n && ends[word] >= 0; begin = ends[word++]) {
            const int size = ends[word] - begin;
            if (length >= size && !std::memcmp(ids + length - size, words + begin, size * sizeof(int))) {
                call.arg<bool*>(3)[i] = true;
            }
        }
    }
}

template <class T>
struct ArrayOf64 {
    T values[64];
};

// Finished sequences' tokens: mask, finished, token offsets, ranks' stride, ranks' first sequences
void clear_token_mask(const Launch& call) {
    require(call.grid.y == 1 && call.arg<ArrayOf64<int>>(4).values[0] == 0, "no CPU version of masks",
            "of several ranks");
    const int* const offsets = call.arg<const int*>(2);
    for (unsigned i = 0; i < call.grid.x; ++i) {
        if (call.arg<const bool*>(1)[i]) {
            std::fill(call.arg<bool*>(0) + offsets[i], call.arg<bool*>(0) + offsets[i + 1], false);
        }
    }
}

// by value: sources, counts, destinations, one each a block: exclusive sums, the total last
void prefix_sums(const Launch& call) {
    require(std::strstr(call.name, "ELi1EE"), "no CPU version of several prefix sums at once", call.name);
    const int* const from = call.arg<const int*>(0);
    int* const to = call.arg<int*>(2);
    int sum = 0;
    for (int i = 0; i < call.arg<int>(1); ++i) {
        const int value = from[i];
        to[i] = sum;
        sum += value;
    }
    to[call.arg<int>(1)] = sum;
}
