// Counter-based random numbers: Philox4x32-10 (Salmon et al. 2011), sixteen counters at a time. Twin: engine/noise.py.
#pragma once

#include <algorithm>

#include "parallel.h"
#include "vector.h"

namespace pt {

constexpr int PHILOX_ROUNDS = 10;
constexpr long GROUPS_PER_TASK = 4096;

// Halves of the 64-bit products of sixteen words and a constant.
inline void multiply(u16x words, uint32_t constant, u16x& high, u16x& low) {
    const l16x product = convert<l16x>(words) * uint64_t(constant);
    high = convert<u16x>(product >> uint64_t(32));
    low = convert<u16x>(product);
}

// Four words for each of sixteen counters, in place.
inline void philox(u16x counter[4], uint32_t key0, uint32_t key1) {
    for (int round = 0; round < PHILOX_ROUNDS; round++) {
        u16x high0, low0, high2, low2;
        multiply(counter[0], 0xD2511F53u, high0, low0);
        multiply(counter[2], 0xCD9E8D57u, high2, low2);
        counter[0] = high2 ^ counter[1] ^ key0, counter[1] = low2;
        counter[2] = high0 ^ counter[3] ^ key1, counter[3] = low0;
        key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
    }
}

// out[4 g + w] = (word w of group g + 1/2) / 2^32 of groups [first, last), exact in float64.
inline void uniform_groups(int64_t seed, int64_t choice, int64_t position, long first, long last, double* out) {
    for (long group = first; group < last; group += LANES) {
        constexpr uint32_t COUNTING[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const u16x own = read_lanes<u16x>(COUNTING) + uint32_t(group);
        u16x words[4] = {own, u16x{} + uint32_t(position), u16x{} + uint32_t(choice), u16x{}};
        philox(words, uint32_t(seed), uint32_t(uint64_t(seed) >> 32));
        for (long i = 0; i < std::min(LANES, last - group); i++)
            for (long word = 0; word < 4; word++) out[4 * (group + i) + word] = (words[word][i] + 0.5) * 0x1p-32;
    }
}

// Rows of `groups` groups, each by its own seed, choice and position.
inline void uniform_rows(const int64_t* seeds, const int64_t* choices, const int64_t* positions, double* out, long rows,
                         long groups, int64_t threads) {
    const long parts = (groups + GROUPS_PER_TASK - 1) / GROUPS_PER_TASK;
    share(rows * parts, threads, [&](long task) {
        const long row = task / parts, first = task % parts * GROUPS_PER_TASK;
        uniform_groups(seeds[row], choices[row], positions[row], first, std::min(groups, first + GROUPS_PER_TASK),
                       out + 4 * groups * row);
    });
}

}  // namespace pt
