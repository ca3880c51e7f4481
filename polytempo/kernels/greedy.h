// The greedy token of each row of logits.
#pragma once

#include "parallel.h"
#include "vector.h"

namespace pt {

constexpr long LOGITS_PER_TASK = 32768;

// Index of the highest of x [0, N), the lowest among equals; -1 if any is NaN or +inf, or none is above -inf.
template <class T>
inline int64_t greedy(const T* x, long N) {
    const v16 nothing = splat(-INFINITY);
    v16 top = nothing;
    i16x chunk_of = {}, is_nan = {};
    for (long i = 0; i < N; i += LANES) {
        v16 value = load(x + i, N - i);
        for (long lane = N - i; lane < LANES; lane++) value[lane] = -INFINITY;  // a missing lane reads as 0
        const i16x is_higher = value > top;
        is_nan |= value != value;
        top = select(is_higher, value, top);
        chunk_of = select(is_higher, i16x{} + int32_t(i / LANES), chunk_of);
    }
    float best = -INFINITY;
    int64_t index = -1;
    for (long lane = 0; lane < LANES; lane++) {
        if (is_nan[lane] || top[lane] == INFINITY) return -1;
        const int64_t own = int64_t(chunk_of[lane]) * LANES + lane;
        if (top[lane] > best || (top[lane] == best && own < index)) best = top[lane], index = own;
    }
    return index;
}

template <class T>
inline void greedy_rows(const T* x, int64_t* ids, long rows, long N, int64_t threads) {
    const long group = std::max(1L, LOGITS_PER_TASK / N);
    share((rows + group - 1) / group, threads, [&](long task) {
        for (long row = task * group; row < std::min(rows, task * group + group); row++)
            ids[row] = greedy(x + row * N, N);
    });
}

}  // namespace pt
