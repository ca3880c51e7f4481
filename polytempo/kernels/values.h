// Attention's second product: the values of a query's keys, weighted and added in ascending order, for some heads at a
// time. Values are the keys themselves.
#pragma once

#include "linear.h"

namespace pt {

constexpr long HEADS_PER_PASS = 8;

// Thirty-two channels of a head's sum over keys.
struct ChannelSums {
    v16 low = {}, high = {};
};

// As many keys as one product adds, the same channels of each; a head's weights of them are a Weight. One key, in float32:
template <class T>
struct SingleKey {
    static constexpr long COUNT = 1;
    typedef float Weight;
    v16 low, high;
    SingleKey(const T* const* keys, long j, long, long c, long channels) {
        low = load(keys[j] + c, channels);
        high = channels > LANES ? load(keys[j] + c + LANES, channels - LANES) : v16{};
        keep(low), keep(high);
    }
    void add(ChannelSums& sums, float weight) const {
        sums.low = fma(splat(weight), low, sums.low);
        sums.high = fma(splat(weight), high, sums.high);
    }
    static void finish(ChannelSums&) {}
};

#if defined(__AVX512BF16__)
// Two keys by the bfloat16 dot product, which takes weights in pairs too: faster than one after the other, even where
// the instruction is slow, for half as much is read.
struct KeyPair {
    static constexpr long COUNT = 2;
    typedef uint32_t Weight;
    Chunk<bf16> low, high;  // channels 8 g … 8 g + 3 and 8 g + 4 … 8 g + 7 of both keys, side by side
    KeyPair(const bf16* const* keys, long j, long count, long c, long channels) {
        const Chunk<bf16> first = read_chunk(keys[j] + c, channels);
        const Chunk<bf16> second = j + 1 < count ? read_chunk(keys[j + 1] + c, channels) : Chunk<bf16>{};
        low.value = (u16x)_mm512_unpacklo_epi16((__m512i)first.value, (__m512i)second.value);
        high.value = (u16x)_mm512_unpackhi_epi16((__m512i)first.value, (__m512i)second.value);
    }
    void add(ChannelSums& sums, uint32_t weights) const {
        const __m512bh both = (__m512bh)(u16x{} + weights);
        sums.low = _mm512_dpbf16_ps(sums.low, (__m512bh)low.value, both);
        sums.high = _mm512_dpbf16_ps(sums.high, (__m512bh)high.value, both);
    }
    // Channels in order again.
    static void finish(ChannelSums& sums) {
        const __m512i lower = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i upper = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        sums = {_mm512_permutex2var_ps(sums.low, lower, sums.high),
                _mm512_permutex2var_ps(sums.low, upper, sums.high)};
    }
};
#endif

// out[r][c …] = sum over keys, ascending, of weights[r][j] * key[j][c …], over totals[r], of up to 32 channels.
// Never inlined, and sums by name: otherwise gcc keeps them in memory.
template <class Keys, class T, int R>
__attribute__((noinline)) void add_channels(const typename Keys::Weight* const* weights, const T* const* keys,
                                            long count, long c, long channels, const float* totals, T* const* out) {
    static_assert(R == 1 || R == 2 || R == 4 || R == 8, "sums are named");
    ChannelSums first, second, third, fourth, fifth, sixth, seventh, eighth;
    for (long j = 0; j < count; j += Keys::COUNT) {
        const Keys values(keys, j, count, c, channels);
        const long at = j / Keys::COUNT;
        values.add(first, weights[0][at]);
        if (R >= 2) values.add(second, weights[1][at]);
        if (R >= 4) values.add(third, weights[2][at]), values.add(fourth, weights[3][at]);
        if (R >= 8) {
            values.add(fifth, weights[4][at]), values.add(sixth, weights[5][at]);
            values.add(seventh, weights[6][at]), values.add(eighth, weights[7][at]);
        }
    }
    auto write = [&](ChannelSums& sums, int r) __attribute__((always_inline)) {
        sums.low /= totals[r], sums.high /= totals[r];
        Keys::finish(sums);
        store(out[r] + c, sums.low, channels);
        if (channels > LANES) store(out[r] + c + LANES, sums.high, channels - LANES);
    };
    write(first, 0);
    if (R >= 2) write(second, 1);
    if (R >= 4) write(third, 2), write(fourth, 3);
    if (R >= 8) write(fifth, 4), write(sixth, 5), write(seventh, 6), write(eighth, 7);
}

template <class Keys, class T>
inline void add_all_channels(const typename Keys::Weight* const* weights, long heads, const T* const* keys, long count,
                             long dim, const float* totals, T* const* out) {
    // As many heads at once as there are registers for their sums.
    constexpr int MOST = REGISTER_LANES == LANES ? 8 : 2, SOME = REGISTER_LANES == LANES ? 4 : 2;
    for (long c = 0; c < dim; c += 32) {
        const long channels = std::min(32L, dim - c);
        long r = 0;
        for (; r + MOST <= heads; r += MOST)
            add_channels<Keys, T, MOST>(weights + r, keys, count, c, channels, totals + r, out + r);
        for (; r + SOME <= heads; r += SOME)
            add_channels<Keys, T, SOME>(weights + r, keys, count, c, channels, totals + r, out + r);
        for (; r < heads; r++)
            add_channels<Keys, T, 1>(weights + r, keys, count, c, channels, totals + r, out + r);
    }
}

// out[r] = sum over keys of weights[r][j] * key[j], over totals[r].
inline void add_values(float* const* weights, long heads, const float* const* keys, long count, long dim,
                       const float* totals, float* const* out) {
    add_all_channels<SingleKey<float>>(weights, heads, keys, count, dim, totals, out);
}

// In bfloat16 weights are rounded as the keys are.
inline void add_values(float* const* weights, long heads, const bf16* const* keys, long count, long dim,
                       const float* totals, bf16* const* out) {
#if defined(__AVX512BF16__)
    const long stride = (count + 1) / 2 + LANES;
    uint32_t* packed = PT_SCRATCH(uint32_t, heads * stride);
    const uint32_t* pairs[HEADS_PER_PASS];
    for (long r = 0; r < heads; r++) {
        bf16* own = (bf16*)(packed + r * stride);
        for (long j = 0; j < count; j += LANES) store(own + j, load(weights[r] + j, count - j));
        if (count % 2) own[count] = bf16{0};
        pairs[r] = packed + r * stride;
    }
    add_all_channels<KeyPair>(pairs, heads, keys, count, dim, totals, out);
#else
    for (long r = 0; r < heads; r++)
        for (long j = 0; j < count; j += LANES)
            store(weights[r] + j, widen(narrow(load(weights[r] + j, count - j))), count - j);
    add_all_channels<SingleKey<bf16>>(weights, heads, keys, count, dim, totals, out);
#endif
}

}  // namespace pt
