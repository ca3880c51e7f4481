// Sixteen float lanes, the two storage types, and arithmetic whose result for one element never depends on the
// elements beside it. Plain GNU vectors: the compiler maps them to whatever the machine has; the only intrinsics, each
// with a plain twin, are the bfloat16 dot product, fused multiply-add, the square root and shuffles.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace pt {

constexpr long LANES = 16;

typedef float v16 __attribute__((vector_size(64), may_alias));
typedef int32_t i16x __attribute__((vector_size(64), may_alias));
typedef uint32_t u16x __attribute__((vector_size(64), may_alias));
typedef uint16_t h16 __attribute__((vector_size(32), may_alias));

struct bf16 {
    uint16_t bits;
};

inline v16 splat(float value) { return v16{} + value; }

inline v16 max16(v16 a, v16 b) { return a > b ? a : b; }

// One rounding where the machine has the instruction, two elsewhere; never a mixture within one build.
inline v16 fma16(v16 a, v16 b, v16 c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

inline v16 widen(h16 bits) { return (v16)(__builtin_convertvector(bits, u16x) << 16); }

// Round to nearest even as torch does; every NaN becomes the same quiet one.
inline h16 narrow(v16 value) {
    u16x bits = (u16x)value;
    u16x rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    u16x nan = u16x{} + 0x7fc0u;
    rounded = (bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded;
    return __builtin_convertvector(rounded, h16);
}

// load and store move `count` lanes, all of them if count >= LANES; missing lanes read as 0.
inline v16 load(const float* from, long count = LANES) {
    v16 value = {};
    if (count >= LANES)
        memcpy(&value, from, sizeof value);
    else
        memcpy(&value, from, count * sizeof(float));
    return value;
}

inline v16 load(const bf16* from, long count = LANES) {
    h16 bits = {};
    if (count >= LANES)
        memcpy(&bits, from, sizeof bits);
    else
        memcpy(&bits, from, count * sizeof(bf16));
    return widen(bits);
}

inline void store(float* to, v16 value, long count = LANES) {
    memcpy(to, &value, (count >= LANES ? LANES : count) * sizeof(float));
}

inline void store(bf16* to, v16 value, long count = LANES) {
    h16 bits = narrow(value);
    if (count >= LANES)
        memcpy(to, &bits, sizeof bits);
    else
        memcpy(to, &bits, count * sizeof(bf16));
}

// exp by 2^n * P(r), |r| <= ln(2)/2. Below -87 the result is 0, above 88 that of 88. NaN stays NaN.
inline v16 exp16(v16 x) {
    const v16 lowest = splat(-87.0f), highest = splat(88.0f), magic = splat(12582912.0f);
    v16 c = x < lowest ? lowest : x;
    c = c > highest ? highest : c;
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
    i16x exponent = (__builtin_convertvector(n, i16x) + 127) << 23;
    v16 result = p * (v16)exponent;
    return x < lowest ? v16{} : result;
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

inline v16 sqrt16(v16 x) {
#if defined(__AVX512F__)
    return _mm512_sqrt_ps(x);
#else
    v16 result;
    for (long lane = 0; lane < LANES; lane++) result[lane] = std::sqrt(x[lane]);
    return result;
#endif
}

// Four accumulators of one row, for four columns. Named, since gcc leaves arrays of vectors in memory.
struct Quad {
    v16 a = {}, b = {}, c = {}, d = {};
};

// Horizontal sums, all by the same tree: lanes 8 apart, then 4, 2 and 1. Column c of row r goes to lane 4 r + c.
__attribute__((always_inline)) inline v16 sum_lanes(const Quad& first, const Quad& second, const Quad& third,
                                                    const Quad& fourth) {
#if defined(__AVX512F__)
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
#else
    v16 result = {};
    const v16 all[LANES] = {first.a, first.b, first.c, first.d, second.a, second.b, second.c, second.d,
                            third.a, third.b, third.c, third.d, fourth.a, fourth.b, fourth.c, fourth.d};
    for (long i = 0; i < LANES; i++) {
        float lanes[LANES];
        memcpy(lanes, &all[i], sizeof lanes);
        for (long half = LANES / 2; half; half /= 2)
            for (long lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
        result[i] = lanes[0];
    }
    return result;
#endif
}

inline float sum_lanes(v16 x) { return sum_lanes(Quad{x}, {}, {}, {})[0]; }

// Products of 64 bytes of two rows, added lane by lane: 32 bfloat16 in pairs, or 16 floats.

template <class T>
struct Chunk;

template <>
struct Chunk<float> {
    static constexpr long SIZE = 16;
    v16 value;
    static Chunk read(const float* from) { return {load(from)}; }
    static v16 dot(v16 sum, Chunk a, Chunk b) { return fma16(a.value, b.value, sum); }
};

template <>
struct Chunk<bf16> {
    static constexpr long SIZE = 32;
    u16x value;
    static Chunk read(const bf16* from) {
        Chunk chunk;
        memcpy(&chunk.value, from, sizeof chunk.value);
        return chunk;
    }
    static v16 dot(v16 sum, Chunk a, Chunk b) {
#if defined(__AVX512BF16__)
        return _mm512_dpbf16_ps(sum, (__m512bh)a.value, (__m512bh)b.value);
#else
        sum = fma16((v16)(a.value << 16), (v16)(b.value << 16), sum);
        return fma16((v16)(a.value & 0xffff0000u), (v16)(b.value & 0xffff0000u), sum);
#endif
    }
};

// Channels 8 g … 8 g + 3 of two keys side by side in `low`, 8 g + 4 … 8 g + 7 in `high`.
inline void interleave(Chunk<bf16> a, Chunk<bf16> b, Chunk<bf16>& low, Chunk<bf16>& high) {
#if defined(__AVX512BW__)
    low.value = (u16x)_mm512_unpacklo_epi16((__m512i)a.value, (__m512i)b.value);
    high.value = (u16x)_mm512_unpackhi_epi16((__m512i)a.value, (__m512i)b.value);
#else
    uint16_t x[32], y[32], first[32], second[32];
    memcpy(x, &a, sizeof x);
    memcpy(y, &b, sizeof y);
    for (int i = 0; i < 16; i++) {
        int from = i / 4 * 8 + i % 4;
        first[2 * i] = x[from], first[2 * i + 1] = y[from];
        second[2 * i] = x[from + 4], second[2 * i + 1] = y[from + 4];
    }
    memcpy(&low, first, sizeof first);
    memcpy(&high, second, sizeof second);
#endif
}

// The reverse for sums: `low` and `high` by interleave's channels to 32 channels in order.
inline void join_quads(v16 low, v16 high, v16& first, v16& second) {
#if defined(__AVX512F__)
    const __m512i lower = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i upper = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    first = _mm512_permutex2var_ps(low, lower, high);
    second = _mm512_permutex2var_ps(low, upper, high);
#else
    float a[LANES], b[LANES], all[2 * LANES];
    memcpy(a, &low, sizeof a);
    memcpy(b, &high, sizeof b);
    for (int quad = 0; quad < 4; quad++) {
        memcpy(all + 8 * quad, a + 4 * quad, 4 * sizeof(float));
        memcpy(all + 8 * quad + 4, b + 4 * quad, 4 * sizeof(float));
    }
    memcpy(&first, all, sizeof first);
    memcpy(&second, all + LANES, sizeof second);
#endif
}

// `count` elements, all of a chunk if there are as many; missing ones read as 0.
template <class T>
__attribute__((always_inline)) inline Chunk<T> read_chunk(const T* from, long count) {
    if (count >= Chunk<T>::SIZE) return Chunk<T>::read(from);
    T padded[Chunk<T>::SIZE] = {};
    memcpy(padded, from, count * sizeof(T));
    return Chunk<T>::read(padded);
}

// One step of K of a row's dot products with C columns, to its accumulators.
template <class T, int C>
__attribute__((always_inline)) inline void add_products(Quad& sums, Chunk<T> row, Chunk<T> a, Chunk<T> b, Chunk<T> c,
                                                        Chunk<T> d) {
    sums.a = Chunk<T>::dot(sums.a, row, a);
    if (C == 1) return;
    sums.b = Chunk<T>::dot(sums.b, row, b);
    sums.c = Chunk<T>::dot(sums.c, row, c);
    sums.d = Chunk<T>::dot(sums.d, row, d);
}

struct Nothing {};

// Columns as a dot product reads them: WIDTH elements of K, which lie in BYTES, at a time, as one chunk or two, by what
// the columns share there. These lie in memory as they are.
template <class T>
struct StoredColumns {
    static constexpr long WIDTH = Chunk<T>::SIZE, BYTES = WIDTH * sizeof(T);
    struct Values {
        Chunk<T> first;
    };
    Nothing shared(long) const { return {}; }
};

// Anywhere.
template <class T>
struct PlainColumns : StoredColumns<T> {
    const T* columns[4];
    template <int I>
    typename StoredColumns<T>::Values read(Nothing, long k, long count) const {
        return {read_chunk(columns[I] + k, count)};
    }
};

// Side by side.
template <class T>
struct PanelColumns : StoredColumns<T> {
    const T* first;
    long stride;
    template <int I>
    typename StoredColumns<T>::Values read(Nothing, long k, long count) const {
        return {read_chunk(first + I * stride + k, count)};
    }
};

// Ask memory for a stretch in ascending order, into the second-level cache: the first has too few misses at once, and
// better uses. Walking four short rows side by side, the hardware foresees nothing. Inlined always: gcc takes a call for
// one without effects, and drops it.
__attribute__((always_inline)) inline void prefetch(const void* from, long bytes) {
    for (const char* line = (const char*)from; line < (const char*)from + bytes; line += 64)
        __builtin_prefetch(line, 0, 2);
}

// Lane 4 r + c = x[r] . w[c] over K elements: one accumulator per pair, K ascending, then the tree of sum_lanes.
// R and C only say how many pairs are computed together; no pair's order depends on them.
// With ASKS, memory is asked for what lies at `ahead`, as much as the columns have.
//
// Never inlined: within larger functions gcc keeps the accumulators in memory, at half the speed.
template <class T, int R, int C, bool ASKS = false, class Columns>
__attribute__((noinline)) v16 dot_columns(const T* const* x, const Columns& w, long K, const char* ahead = nullptr) {
    static_assert(R >= 1 && R <= 4 && (C == 4 || C == 1), "sixteen results fill the lanes");
    constexpr long SIZE = Chunk<T>::SIZE, WIDTH = Columns::WIDTH;
    const T *x0 = x[0], *x1 = R > 1 ? x[1] : x0, *x2 = R > 2 ? x[2] : x0, *x3 = R > 3 ? x[3] : x0;
    Quad first, second, third, fourth;
    auto add = [&](long k, long count, Chunk<T> a, Chunk<T> b, Chunk<T> c, Chunk<T> d) __attribute__((always_inline)) {
        add_products<T, C>(first, read_chunk(x0 + k, count), a, b, c, d);
        if (R > 1) add_products<T, C>(second, read_chunk(x1 + k, count), a, b, c, d);
        if (R > 2) add_products<T, C>(third, read_chunk(x2 + k, count), a, b, c, d);
        if (R > 3) add_products<T, C>(fourth, read_chunk(x3 + k, count), a, b, c, d);
    };
    auto step = [&](long k, auto count) __attribute__((always_inline)) {
        if (ASKS) prefetch(ahead + C * Columns::BYTES / WIDTH * k, C * Columns::BYTES);
        const auto shared = w.shared(k);
        const auto a = w.template read<0>(shared, k, count), b = C > 1 ? w.template read<1>(shared, k, count) : a,
                   c = C > 1 ? w.template read<2>(shared, k, count) : a,
                   d = C > 1 ? w.template read<3>(shared, k, count) : a;
        add(k, count, a.first, b.first, c.first, d.first);
        if constexpr (WIDTH > SIZE)
            if (count > SIZE) add(k + SIZE, count - SIZE, a.second, b.second, c.second, d.second);
    };
    long k = 0;
    for (; k + WIDTH <= K; k += WIDTH) step(k, std::integral_constant<long, WIDTH>());
    if (k < K) step(k, K - k);
    return sum_lanes(first, second, third, fourth);
}

// The same of columns that lie anywhere.
template <class T, int R, int C>
inline v16 dots(const T* const* x, const T* const* w, long K) {
    constexpr int MORE = C > 1;
    return dot_columns<T, R, C>(x, PlainColumns<T>{{}, {w[0], w[MORE], w[2 * MORE], w[3 * MORE]}}, K);
}

// Lanes 4 r … 4 r + C - 1 to `to[r] + at`, for every row r.
template <int R, int C, class O>
inline void store_rows(O* const* to, long at, v16 lanes) {
    O values[LANES];
    store(values, lanes);
    for (int r = 0; r < R; r++) memcpy(to[r] + at, values + 4 * r, C * sizeof(O));
}

template <class T>
inline float sum_squares(const T* x, long n) {
    v16 sum = {};
    for (long i = 0; i < n; i += LANES) {
        v16 value = load(x + i, n - i);
        sum = fma16(value, value, sum);
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

// Lanes of `x` in the order of `lanes`.
inline v16 shuffle(v16 x, i16x lanes) {
#if defined(__AVX512F__)
    return _mm512_permutexvar_ps((__m512i)lanes, x);
#else
    v16 result;
    for (long i = 0; i < LANES; i++) result[i] = x[lanes[i]];
    return result;
#endif
}

// Rotate the trailing 2 * pairs channels of a head in interleaved pairs; `sign` -1 undoes it.
template <class T>
inline void rotate(T* head, long n, const float* cos, const float* sin, long pairs, float sign) {
    const i16x twice = {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7};
    const i16x swapped = {1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14};
    const v16 signs = v16{-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1} * sign;
    T* turning = head + n - 2 * pairs;
    for (long pair = 0; pair < pairs; pair += LANES / 2) {
        const long count = pairs - pair < LANES / 2 ? pairs - pair : LANES / 2;
        v16 x = load(turning + 2 * pair, 2 * count);
        v16 c = shuffle(load(cos + pair, count), twice), s = shuffle(load(sin + pair, count), twice) * signs;
        store(turning + 2 * pair, x * c + shuffle(x, swapped) * s, 2 * count);
    }
}

}  // namespace pt
