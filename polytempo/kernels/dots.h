// Dot products: how columns are read, and the order in which the products of a pair are added, which is always the same.
#pragma once

#include "vector.h"

// bfloat16 is multiplied by the instruction for dot products of it, or, where there is none or it is slow (build.py),
// as floats. With AVX-512, columns that many rows pass by are then widened once for all.
#if defined(__AVX512BF16__) && !defined(PT_SLOW_BF16_DOT)
#define PT_BF16_DOT
#elif defined(__AVX512F__)
#define PT_WIDENED_PANELS
#endif

namespace pt {

// 64 bytes of a row as they lie: 16 floats, or 32 bfloat16 in pairs.
template <class T>
struct Chunk;

template <>
struct Chunk<float> {
    static constexpr long SIZE = 16;
    v16 value;
    static Chunk read(const float* from) { return {load(from)}; }
};

template <>
struct Chunk<bf16> {
    static constexpr long SIZE = 32;
    u16x value;
    static Chunk read(const bf16* from) { return {read_lanes<u16x>(from)}; }
};

// Lanes as they are multiplied, of a chunk or of half of one, kept in registers: with twice the loads products have half
// the speed.
template <class T, class Lanes>
struct Factor;

template <class Lanes>
struct Factor<float, Lanes> {
    Lanes value;
    explicit Factor(Lanes lanes) : value(lanes) { keep(value); }
    static Lanes dot(Lanes sum, Factor a, Factor b) { return fma(a.value, b.value, sum); }
};

#if defined(PT_BF16_DOT)
template <class Lanes>
struct Factor<bf16, Lanes> {
    Lanes pairs;
    explicit Factor(Lanes pairs) : pairs(pairs) {}
    static v16 dot(v16 sum, Factor a, Factor b) {
        return _mm512_dpbf16_ps(sum, (__m512bh)a.pairs, (__m512bh)b.pairs);
    }
};
#else
// Of every pair the even element is multiplied first.
template <class Lanes>
struct Factor<bf16, Lanes> {
    typedef std::conditional_t<sizeof(Lanes) == sizeof(v16), v16, f8> Floats;
    Floats even, odd;
    Factor(Floats even, Floats odd) : even(even), odd(odd) {}
    explicit Factor(Lanes pairs) : even(cast<Floats>(pairs << 16)), odd(cast<Floats>(pairs & 0xffff0000u)) {
        keep(even), keep(odd);
    }
    static Floats dot(Floats sum, Factor a, Factor b) { return fma(a.odd, b.odd, fma(a.even, b.even, sum)); }
};
#endif

// `count` elements, all of a chunk if there are as many; missing ones read as 0.
template <class T>
__attribute__((always_inline)) inline Chunk<T> read_chunk(const T* from, long count) {
    if (count >= Chunk<T>::SIZE) return Chunk<T>::read(from);
    T padded[Chunk<T>::SIZE] = {};
    memcpy(padded, from, count * sizeof(T));
    return Chunk<T>::read(padded);
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

#if defined(__AVX512F__)

template <class T>
using ChunkFactor = Factor<T, decltype(Chunk<T>::value)>;

#if defined(PT_WIDENED_PANELS)
constexpr long WIDENED_PASSES = 2;  // of four rows each over a panel, from which on it is widened: measured

inline long widened_width(long K) { return (K + Chunk<bf16>::SIZE - 1) / Chunk<bf16>::SIZE * Chunk<bf16>::SIZE; }

inline void store_factor(float* to, ChunkFactor<bf16> factor) {
    store(to, factor.even), store(to + LANES, factor.odd);
}

// Elements of bfloat16 as floats in the order in which they are multiplied: of every chunk the even ones, then the odd.
inline void widen_row(const bf16* from, long count, float* to) {
    constexpr long SIZE = Chunk<bf16>::SIZE;
    for (long k = 0; k < count; k += SIZE)
        store_factor(to + k, ChunkFactor<bf16>(read_chunk(from + k, count - k).value));
}

// Side by side, widened, each of a whole number of chunks.
struct WidenedColumns {
    const float* first;
    long stride;
    static constexpr long WIDTH = Chunk<bf16>::SIZE, BYTES = WIDTH * sizeof(float);
    struct Values {
        ChunkFactor<bf16> first;
    };
    Nothing shared(long) const { return {}; }
    template <int I>
    Values read(Nothing, long k, long) const {
        const float* from = first + I * stride + k;
        return {{load(from), load(from + LANES)}};
    }
    WidenedColumns from(long column) const { return {first + column * stride, stride}; }
};
#endif

template <class T>
__attribute__((always_inline)) inline ChunkFactor<T> to_factor(Chunk<T> chunk) {
    return ChunkFactor<T>(chunk.value);
}
template <class T>
__attribute__((always_inline)) inline ChunkFactor<T> to_factor(ChunkFactor<T> factor) {
    return factor;
}

// One step of K of a row's dot products with C columns, to its accumulators.
template <class T, int C, class F = ChunkFactor<T>>
__attribute__((always_inline)) inline void add_products(Quad& sums, F row, F a, F b, F c, F d) {
    sums.a = F::dot(sums.a, row, a);
    if (C == 1) return;
    sums.b = F::dot(sums.b, row, b);
    sums.c = F::dot(sums.c, row, c);
    sums.d = F::dot(sums.d, row, d);
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
    typedef ChunkFactor<T> F;
    auto add = [&](long k, long count, F a, F b, F c, F d) __attribute__((always_inline)) {
        add_products<T, C>(first, F(read_chunk(x0 + k, count).value), a, b, c, d);
        if (R > 1) add_products<T, C>(second, F(read_chunk(x1 + k, count).value), a, b, c, d);
        if (R > 2) add_products<T, C>(third, F(read_chunk(x2 + k, count).value), a, b, c, d);
        if (R > 3) add_products<T, C>(fourth, F(read_chunk(x3 + k, count).value), a, b, c, d);
    };
    auto step = [&](long k, auto count) __attribute__((always_inline)) {
        if (ASKS) prefetch(ahead + C * Columns::BYTES / WIDTH * k, C * Columns::BYTES);
        const auto shared = w.shared(k);
        const auto a = w.template read<0>(shared, k, count), b = C > 1 ? w.template read<1>(shared, k, count) : a,
                   c = C > 1 ? w.template read<2>(shared, k, count) : a,
                   d = C > 1 ? w.template read<3>(shared, k, count) : a;
        add(k, count, to_factor<T>(a.first), to_factor<T>(b.first), to_factor<T>(c.first), to_factor<T>(d.first));
        if constexpr (WIDTH > SIZE)
            if (count > SIZE)
                add(k + SIZE, count - SIZE, to_factor<T>(a.second), to_factor<T>(b.second), to_factor<T>(c.second),
                    to_factor<T>(d.second));
    };
    long k = 0;
    for (; k + WIDTH <= K; k += WIDTH) step(k, std::integral_constant<long, WIDTH>());
    if (k < K) step(k, K - k);
    return sum_lanes(first, second, third, fourth);
}

#else

// As many pairs as sixteen registers have room for: of one row, of two rows and two columns, or of one column. The sum
// of row r and the column FIRST + c goes to to[4 r + c].
template <class T, int R, int C, int FIRST, bool ASKS, class Columns>
__attribute__((noinline)) void dot_tile(const T* const* x, const Columns& w, long K, const char* ahead, float* to) {
    static_assert((R == 1 && C == 4) || (R == 2 && C == 2) || (R <= 4 && C == 1), "four accumulators");
    constexpr long SIZE = Chunk<T>::SIZE;
    static_assert(Columns::WIDTH == SIZE, "one chunk at a time");
    const T *x0 = x[0], *x1 = R > 1 ? x[1] : x0, *x2 = R > 2 ? x[2] : x0, *x3 = R > 3 ? x[3] : x0;
    Quad sums;
    auto step = [&](long k, auto count) __attribute__((always_inline)) {
        if (ASKS) prefetch(ahead + 4 * Columns::BYTES / SIZE * k, 4 * Columns::BYTES);
        const auto shared = w.shared(k);
        auto add = [&](auto half) __attribute__((always_inline)) {
            typedef Factor<T, std::conditional_t<std::is_same_v<T, float>, f8, u8x>> Part;
            auto row = [&](const T* from) __attribute__((always_inline)) {
                return Part(half(read_chunk(from + k, count).value));
            };
            auto column = [&](auto index) __attribute__((always_inline)) {
                return Part(half(w.template read<FIRST + decltype(index)::value>(shared, k, count).first.value));
            };
            const Part r0 = row(x0), c0 = column(std::integral_constant<int, 0>());
            f8 &a = half(sums.a), &b = half(sums.b), &c = half(sums.c), &d = half(sums.d);
            a = Part::dot(a, r0, c0);
            if constexpr (C == 1) {
                if (R > 1) b = Part::dot(b, row(x1), c0);
                if (R > 2) c = Part::dot(c, row(x2), c0);
                if (R > 3) d = Part::dot(d, row(x3), c0);
            } else {
                const Part c1 = column(std::integral_constant<int, 1>());
                b = Part::dot(b, r0, c1);
                if constexpr (C == 2) {
                    const Part r1 = row(x1);
                    c = Part::dot(c, r1, c0), d = Part::dot(d, r1, c1);
                } else {
                    c = Part::dot(c, r0, column(std::integral_constant<int, 2>()));
                    d = Part::dot(d, r0, column(std::integral_constant<int, 3>()));
                }
            }
        };
        add([](auto&& lanes) -> auto& { return lanes.low; });
        add([](auto&& lanes) -> auto& { return lanes.high; });
    };
    long k = 0;
    for (; k + SIZE <= K; k += SIZE) step(k, std::integral_constant<long, SIZE>());
    if (k < K) step(k, K - k);
    float totals[4];
    sum_four(sums, totals);
    for (int pair = 0; pair < R * C; pair++) to[pair / C * 4 + pair % C] = totals[pair];
}

// As above, in several passes over the rows, which stay in the first-level cache.
template <class T, int R, int C, bool ASKS = false, class Columns>
inline v16 dot_columns(const T* const* x, const Columns& w, long K, const char* ahead = nullptr) {
    static_assert(R >= 1 && R <= 4 && (C == 4 || C == 1), "sixteen results fill the lanes");
    float out[LANES] = {};
    if constexpr (R == 1 || C == 1) {
        dot_tile<T, R, C, 0, ASKS>(x, w, K, ahead, out);
    } else {
        dot_tile<T, 2, 2, 0, ASKS>(x, w, K, ahead, out);
        dot_tile<T, 2, 2, 2, false>(x, w, K, ahead, out + 2);
    }
    if constexpr (R == 3 && C == 4) dot_tile<T, 1, 4, 0, false>(x + 2, w, K, ahead, out + 8);
    if constexpr (R == 4 && C == 4) {
        dot_tile<T, 2, 2, 0, false>(x + 2, w, K, ahead, out + 8);
        dot_tile<T, 2, 2, 2, false>(x + 2, w, K, ahead, out + 10);
    }
    return load(out);
}

#endif

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

}  // namespace pt
