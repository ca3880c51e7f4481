// Dot products: how columns are read, and the order in which the products of a pair are added, which is always the same.
#pragma once

#include "vector.h"

namespace pt {

// Products of 64 bytes of two rows, added lane by lane: 32 bfloat16 in pairs, or 16 floats.
template <class T>
struct Chunk;

template <>
struct Chunk<float> {
    static constexpr long SIZE = 16;
    v16 value;
    static Chunk read(const float* from) { return {load(from)}; }
    static v16 dot(v16 sum, Chunk a, Chunk b) { return fma(a.value, b.value, sum); }
};

template <>
struct Chunk<bf16> {
    static constexpr long SIZE = 32;
    u16x value;
    static Chunk read(const bf16* from) { return {read_lanes<u16x>(from)}; }
    static v16 dot(v16 sum, Chunk a, Chunk b) {
#if defined(__AVX512BF16__)
        return _mm512_dpbf16_ps(sum, (__m512bh)a.value, (__m512bh)b.value);
#else
        sum = fma(cast<v16>(a.value << 16), cast<v16>(b.value << 16), sum);
        return fma(cast<v16>(a.value & 0xffff0000u), cast<v16>(b.value & 0xffff0000u), sum);
#endif
    }
};

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

#else

// Half of a chunk, as what is multiplied. Kept in registers: with twice the loads products have half the speed.
template <class T>
struct HalfChunk;

template <>
struct HalfChunk<float> {
    f8 value;
    explicit HalfChunk(f8 half) : value(half) { keep(value); }
    static f8 dot(f8 sum, HalfChunk a, HalfChunk b) { return fma(a.value, b.value, sum); }
};

template <>
struct HalfChunk<bf16> {
    f8 even, odd;
    explicit HalfChunk(u8x half) : even(cast<f8>(half << 16)), odd(cast<f8>(half & 0xffff0000u)) { keep(even), keep(odd); }
    static f8 dot(f8 sum, HalfChunk a, HalfChunk b) { return fma(a.odd, b.odd, fma(a.even, b.even, sum)); }
};

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
            typedef HalfChunk<T> Part;
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
