// Sixteen float lanes, the two storage types, and arithmetic whose result for one element never depends on the
// elements beside it.
#pragma once

#include "lanes.h"

namespace pt {

struct bf16 {
    uint16_t bits;
};

inline v16 widen(h16 bits) { return cast<v16>(convert<u16x>(bits) << 16); }

// Round to nearest even as torch does; every NaN becomes the same quiet one.
inline h16 narrow(v16 value) {
    u16x bits = cast<u16x>(value);
    u16x rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    u16x nan = u16x{} + 0x7fc0u;
    return convert<h16>(select((bits & 0x7fffffffu) > 0x7f800000u, nan, rounded));
}

// load and store move `count` lanes, all of them if count >= LANES; missing lanes read as 0.
inline v16 load(const float* from, long count = LANES) {
    if (count >= LANES) return read_lanes<v16>(from);
    float padded[LANES] = {};
    memcpy(padded, from, count * sizeof(float));
    return read_lanes<v16>(padded);
}

inline v16 load(const bf16* from, long count = LANES) {
    if (count >= LANES) return widen(read_lanes<h16>(from));
    bf16 padded[LANES] = {};
    memcpy(padded, from, count * sizeof(bf16));
    return widen(read_lanes<h16>(padded));
}

inline void store(float* to, v16 value, long count = LANES) {
    if (count >= LANES) return write_lanes(to, value);
    float all[LANES];
    write_lanes(all, value);
    memcpy(to, all, count * sizeof(float));
}

inline void store(bf16* to, v16 value, long count = LANES) {
    if (count >= LANES) return write_lanes(to, narrow(value));
    bf16 all[LANES];
    write_lanes(all, narrow(value));
    memcpy(to, all, count * sizeof(bf16));
}

// exp by 2^n * P(r), |r| <= ln(2)/2. Below -87 the result is 0, above 88 that of 88. NaN stays NaN.
inline v16 exp16(v16 x) {
    const v16 lowest = splat(-87.0f), highest = splat(88.0f), magic = splat(12582912.0f);
    v16 c = select(x < lowest, lowest, x);
    c = select(c > highest, highest, c);
    v16 n = (c * 1.44269504088896341f + magic) - magic;
    v16 r = c - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    v16 p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    i16x exponent = (convert<i16x>(n) + 127) << 23;
    return select(x < lowest, v16{}, p * cast<v16>(exponent));
}

inline v16 sigmoid16(v16 x) { return 1.0f / (1.0f + exp16(-x)); }

// log(1 + t) for t in [0, 1], as 2 atanh(t / (2 + t)); the series' rest is below 2^-25.
inline v16 log1p16(v16 t) {
    v16 s = t / (t + 2.0f), q = s * s;
    v16 p = splat(1.0f / 15);
    p = p * q + 1.0f / 13;
    p = p * q + 1.0f / 11;
    p = p * q + 1.0f / 9;
    p = p * q + 1.0f / 7;
    p = p * q + 1.0f / 5;
    p = p * q + 1.0f / 3;
    return 2.0f * (s + s * q * p);
}

// Four accumulators of one row, for four columns. Named, since gcc leaves arrays of vectors in memory.
struct Quad {
    v16 a = {}, b = {}, c = {}, d = {};
};

// Horizontal sums are all by the same tree: lanes 8 apart, then 4, 2 and 1.
#if defined(__AVX512F__)
// Column c of row r goes to lane 4 r + c.
__attribute__((always_inline)) inline v16 sum_lanes(const Quad& first, const Quad& second, const Quad& third,
                                                    const Quad& fourth) {
    // A row's four partial sums of every column, one column per 128 bits.
    auto halve = [](const Quad& row) {
        __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(row.a, row.b, 0x44), _mm512_shuffle_f32x4(row.a, row.b, 0xEE));
        __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(row.c, row.d, 0x44), _mm512_shuffle_f32x4(row.c, row.d, 0xEE));
        return _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
    };
    auto pair = [](__m512 x, __m512 y) {
        return _mm512_add_ps(_mm512_shuffle_ps(x, y, 0x44), _mm512_shuffle_ps(x, y, 0xEE));
    };
    __m512 low = pair(halve(first), halve(second)), high = pair(halve(third), halve(fourth));
    __m512 columns = _mm512_add_ps(_mm512_shuffle_ps(low, high, 0x88), _mm512_shuffle_ps(low, high, 0xDD));
    const __m512i by_row = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_ps(by_row, columns);
}

inline float sum_lanes(v16 x) { return sum_lanes(Quad{x}, {}, {}, {})[0]; }
#else
inline float sum_lanes(v16 x) {
    float lanes[LANES];
    write_lanes(lanes, x);
    for (long half = LANES / 2; half; half /= 2)
        for (long lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

// Of each of the four, to to[0 … 3].
__attribute__((always_inline)) inline void sum_four(const Quad& sums, float* to) {
#if defined(__AVX2__)
    auto quarter = [](v16 x) {
        const __m256 half = x.low + x.high;
        return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    };
    auto pair = [](__m128 x, __m128 y) { return _mm_add_ps(_mm_movelh_ps(x, y), _mm_movehl_ps(y, x)); };
    const __m128 low = pair(quarter(sums.a), quarter(sums.b)), high = pair(quarter(sums.c), quarter(sums.d));
    _mm_storeu_ps(to, _mm_add_ps(_mm_shuffle_ps(low, high, 0x88), _mm_shuffle_ps(low, high, 0xDD)));
#else
    to[0] = sum_lanes(sums.a), to[1] = sum_lanes(sums.b), to[2] = sum_lanes(sums.c), to[3] = sum_lanes(sums.d);
#endif
}
#endif

template <class T>
inline float sum_squares(const T* x, long n) {
    v16 sum = {};
    for (long i = 0; i < n; i += LANES) {
        v16 value = load(x + i, n - i);
        sum = fma(value, value, sum);
    }
    return sum_lanes(sum);
}

// to = weight * from / rms(from); weight may be null (all ones); to may be from.
template <class A, class B>
inline void rms_norm(const A* from, B* to, const float* weight, long n, float eps) {
    float scale = 1.0f / std::sqrt(sum_squares(from, n) / float(n) + eps);
    for (long i = 0; i < n; i += LANES) {
        v16 value = load(from + i, n - i) * scale;
        store(to + i, weight ? load(weight + i, n - i) * value : value, n - i);
    }
}

// Rotate the trailing 2 * pairs channels of a head in interleaved pairs; `sign` -1 undoes it.
template <class T>
inline void rotate(T* head, long n, const float* cos, const float* sin, long pairs, float sign) {
    constexpr float ALTERNATING[LANES] = {-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1};
    const v16 signs = load(ALTERNATING) * sign;
    T* turning = head + n - 2 * pairs;
    for (long pair = 0; pair < pairs; pair += LANES / 2) {
        const long count = pairs - pair < LANES / 2 ? pairs - pair : LANES / 2;
        v16 x = load(turning + 2 * pair, 2 * count);
        v16 c = first_lanes_twice(load(cos + pair, count)), s = first_lanes_twice(load(sin + pair, count)) * signs;
        store(turning + 2 * pair, x * c + swap_pairs(x) * s, 2 * count);
    }
}

}  // namespace pt
