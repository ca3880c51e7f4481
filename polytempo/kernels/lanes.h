// Sixteen lanes of 32 bits: one register where there is AVX-512, else two halves, which are a register each with AVX2.
// Arithmetic is that of GNU vectors on both, so that the compiler maps it to whatever the machine has; the only
// intrinsics, each with a plain twin, are fused multiply-add, the square root and shuffles.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace pt {

constexpr long LANES = 16;

#if defined(__AVX512F__)

constexpr bool IS_WIDE = true;

typedef float v16 __attribute__((vector_size(64), may_alias));
typedef int32_t i16x __attribute__((vector_size(64), may_alias));
typedef uint32_t u16x __attribute__((vector_size(64), may_alias));
typedef uint16_t h16 __attribute__((vector_size(32), may_alias));
typedef uint8_t b16 __attribute__((vector_size(16), may_alias));
typedef uint64_t l16x __attribute__((vector_size(128), may_alias));

template <class V>
inline V read_lanes(const void* from) {
    V value;
    memcpy(&value, from, sizeof value);
    return value;
}

template <class V>
inline void write_lanes(void* to, V value) {
    memcpy(to, &value, sizeof value);
}

// Lanes of `a` where the comparison held, of `b` elsewhere.
template <class V>
inline V select(i16x mask, V a, V b) {
    return mask ? a : b;
}

// The same bits.
inline u16x as_bits(v16 value) { return (u16x)value; }
inline v16 as_floats(u16x bits) { return (v16)bits; }
inline v16 as_floats(i16x bits) { return (v16)bits; }

// The same numbers; to fewer bits, the lowest of them.
template <class To, class V>
inline To convert(V value) {
    return __builtin_convertvector(value, To);
}

inline v16 fma16(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(a, b, c); }

inline void keep(v16&) {}  // here the compiler does that

inline v16 sqrt16(v16 x) { return _mm512_sqrt_ps(x); }

// Lanes 0 0 1 1 … 7 7.
inline v16 first_lanes_twice(v16 x) {
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7), x);
}

// Lanes 1 0 3 2 … 15 14.
inline v16 swap_pairs(v16 x) { return _mm512_permute_ps(x, 0xB1); }

#else

constexpr bool IS_WIDE = false;

typedef float f8 __attribute__((vector_size(32), may_alias));
typedef int32_t i8x __attribute__((vector_size(32), may_alias));
typedef uint32_t u8x __attribute__((vector_size(32), may_alias));
typedef uint16_t h8 __attribute__((vector_size(16), may_alias));
typedef uint8_t b8 __attribute__((vector_size(8), may_alias));
typedef uint64_t l8x __attribute__((vector_size(64), may_alias));

// Kept apart, since compilers leave in memory what no register holds.
template <class Half>
struct Halves {
    typedef std::remove_cv_t<std::remove_reference_t<decltype(Half()[0])>> Lane;
    Half low, high;
    Lane& operator[](long lane) { return ((Lane*)this)[lane]; }
    Lane operator[](long lane) const { return lane < LANES / 2 ? low[lane] : high[lane - LANES / 2]; }
};

typedef Halves<f8> v16;
typedef Halves<i8x> i16x;
typedef Halves<u8x> u16x;
typedef Halves<h8> h16;
typedef Halves<b8> b16;
typedef Halves<l8x> l16x;

#define PT_OPERATOR(op)                                                                 \
    template <class H>                                                                  \
    inline auto operator op(Halves<H> a, Halves<H> b) {                                 \
        return Halves<decltype(a.low op b.low)>{a.low op b.low, a.high op b.high};      \
    }                                                                                   \
    template <class H>                                                                  \
    inline auto operator op(Halves<H> a, typename Halves<H>::Lane b) {                  \
        return a op Halves<H>{H{} + b, H{} + b};                                        \
    }                                                                                   \
    template <class H>                                                                  \
    inline auto operator op(typename Halves<H>::Lane a, Halves<H> b) {                  \
        return Halves<H>{H{} + a, H{} + a} op b;                                        \
    }
PT_OPERATOR(+)
PT_OPERATOR(-)
PT_OPERATOR(*)
PT_OPERATOR(/)
PT_OPERATOR(&)
PT_OPERATOR(|)
PT_OPERATOR(^)
PT_OPERATOR(<<)
PT_OPERATOR(>>)
PT_OPERATOR(<)
PT_OPERATOR(>)
PT_OPERATOR(!=)
#undef PT_OPERATOR

#define PT_ASSIGNMENT(op)                             \
    template <class H, class B>                       \
    inline Halves<H>& operator op##=(Halves<H>& a, B b) { \
        return a = a op b;                            \
    }
PT_ASSIGNMENT(+)
PT_ASSIGNMENT(*)
PT_ASSIGNMENT(/)
PT_ASSIGNMENT(|)
#undef PT_ASSIGNMENT

template <class H>
inline Halves<H> operator-(Halves<H> a) {
    return {-a.low, -a.high};
}

template <class V>
inline V read_lanes(const void* from) {
    V value;
    memcpy(&value.low, from, sizeof value.low);
    memcpy(&value.high, (const char*)from + sizeof value.low, sizeof value.high);
    return value;
}

template <class V>
inline void write_lanes(void* to, V value) {
    memcpy(to, &value.low, sizeof value.low);
    memcpy((char*)to + sizeof value.low, &value.high, sizeof value.high);
}

template <class H>
inline Halves<H> select(i16x mask, Halves<H> a, Halves<H> b) {
    return {mask.low ? a.low : b.low, mask.high ? a.high : b.high};
}

inline u16x as_bits(v16 value) { return {(u8x)value.low, (u8x)value.high}; }
inline v16 as_floats(u16x bits) { return {(f8)bits.low, (f8)bits.high}; }
inline v16 as_floats(i16x bits) { return {(f8)bits.low, (f8)bits.high}; }

template <class To, class H>
inline To convert(Halves<H> value) {
    typedef decltype(To::low) Half;
    return {__builtin_convertvector(value.low, Half), __builtin_convertvector(value.high, Half)};
}

// One rounding where the machine has the instruction, two elsewhere; never a mixture within one build.
#if defined(__FMA__)
inline f8 fma8(f8 a, f8 b, f8 c) { return _mm256_fmadd_ps(a, b, c); }
#else
inline f8 fma8(f8 a, f8 b, f8 c) { return a * b + c; }
#endif

inline v16 fma16(v16 a, v16 b, v16 c) { return {fma8(a.low, b.low, c.low), fma8(a.high, b.high, c.high)}; }

// Has a value in a register from here on: gcc would rather read it from memory for each use.
inline void keep(f8& value) {
#if defined(__AVX__)
    asm("" : "+x"(value));
#endif
}

inline void keep(v16& value) { keep(value.low), keep(value.high); }

#if defined(__AVX2__)
inline v16 sqrt16(v16 x) { return {_mm256_sqrt_ps(x.low), _mm256_sqrt_ps(x.high)}; }

inline v16 first_lanes_twice(v16 x) {
    return {_mm256_permutevar8x32_ps(x.low, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)),
            _mm256_permutevar8x32_ps(x.low, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7))};
}

inline v16 swap_pairs(v16 x) { return {_mm256_permute_ps(x.low, 0xB1), _mm256_permute_ps(x.high, 0xB1)}; }
#else
inline v16 sqrt16(v16 x) {
    for (long lane = 0; lane < LANES; lane++) x[lane] = std::sqrt(x[lane]);
    return x;
}

inline v16 first_lanes_twice(v16 x) {
    v16 result;
    for (long lane = 0; lane < LANES; lane++) result[lane] = x[lane / 2];
    return result;
}

inline v16 swap_pairs(v16 x) {
    v16 result;
    for (long lane = 0; lane < LANES; lane++) result[lane] = x[lane ^ 1];
    return result;
}
#endif

#endif

inline v16 splat(float value) { return v16{} + value; }

inline v16 max16(v16 a, v16 b) { return select(a > b, a, b); }

}  // namespace pt
