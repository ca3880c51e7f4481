// Sixteen lanes of 32 bits: one register where there is AVX-512, two with AVX2, four elsewhere. Arithmetic is that of GNU
// vectors, so that the compiler maps it to whatever the machine has; the only intrinsics, each with a plain twin, are
// fused multiply-add, the square root and shuffles.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace pt {

constexpr long LANES = 16;

// What registers do not hold is kept apart: compilers leave GNU vectors that are too long for them in memory.
template <class Half>
struct Halves {
    typedef std::remove_cv_t<std::remove_reference_t<decltype(Half()[0])>> Lane;
    Half low, high;
    Lane& operator[](long lane) { return ((Lane*)this)[lane]; }
    Lane operator[](long lane) const { return ((const Lane*)this)[lane]; }
};

#define PT_OPERATOR(op)                                                            \
    template <class H>                                                             \
    inline auto operator op(Halves<H> a, Halves<H> b) {                            \
        return Halves<decltype(a.low op b.low)>{a.low op b.low, a.high op b.high}; \
    }                                                                              \
    template <class H>                                                             \
    inline auto operator op(Halves<H> a, typename Halves<H>::Lane b) {             \
        return Halves<decltype(a.low op b)>{a.low op b, a.high op b};              \
    }                                                                              \
    template <class H>                                                             \
    inline auto operator op(typename Halves<H>::Lane a, Halves<H> b) {             \
        return Halves<decltype(a op b.low)>{a op b.low, a op b.high};              \
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

#define PT_ASSIGNMENT(op)                                 \
    template <class H, class B>                           \
    inline Halves<H>& operator op##=(Halves<H>& a, B b) { \
        return a = a op b;                                \
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

// `count` lanes of a type: a GNU vector if lanes of 32 bits fit a register in that number.
#if defined(__AVX512F__)
constexpr long REGISTER_LANES = 16;
#elif defined(__AVX2__)
constexpr long REGISTER_LANES = 8;
#else
constexpr long REGISTER_LANES = 4;
#endif

template <class T>
struct IsHalves : std::false_type {};
template <class H>
struct IsHalves<Halves<H>> : std::true_type {};

template <class Lane>
struct Vectors;  // of 4, 8 and 16 lanes

#define PT_VECTORS(Name)                                                                    \
    template <>                                                                             \
    struct Vectors<Name> {                                                                  \
        typedef Name four __attribute__((vector_size(4 * sizeof(Name)), may_alias));        \
        typedef Name eight_here __attribute__((vector_size(8 * sizeof(Name)), may_alias));  \
        typedef Name all_here __attribute__((vector_size(16 * sizeof(Name)), may_alias));   \
        typedef std::conditional_t<REGISTER_LANES >= 8, eight_here, Halves<four>> eight;    \
        typedef std::conditional_t<REGISTER_LANES == 16, all_here, Halves<eight>> sixteen;  \
    };
PT_VECTORS(float)
PT_VECTORS(int32_t)
PT_VECTORS(uint32_t)
PT_VECTORS(uint16_t)
PT_VECTORS(uint8_t)
PT_VECTORS(uint64_t)
#undef PT_VECTORS

typedef Vectors<float>::sixteen v16;
typedef Vectors<int32_t>::sixteen i16x;
typedef Vectors<uint32_t>::sixteen u16x;
typedef Vectors<uint16_t>::sixteen h16;
typedef Vectors<uint8_t>::sixteen b16;
typedef Vectors<uint64_t>::sixteen l16x;
typedef Vectors<float>::eight f8;
typedef Vectors<uint32_t>::eight u8x;

template <class V>
inline V read_lanes(const void* from) {
    V value;
    if constexpr (IsHalves<V>()) {
        value.low = read_lanes<decltype(value.low)>(from);
        value.high = read_lanes<decltype(value.low)>((const char*)from + sizeof value.low);
    } else {
        memcpy(&value, from, sizeof value);
    }
    return value;
}

template <class V>
inline void write_lanes(void* to, V value) {
    if constexpr (IsHalves<V>()) {
        write_lanes(to, value.low);
        write_lanes((char*)to + sizeof value.low, value.high);
    } else {
        memcpy(to, &value, sizeof value);
    }
}

// Lanes of `a` where the comparison held, of `b` elsewhere.
template <class Mask, class V>
inline V select(Mask mask, V a, V b) {
    if constexpr (IsHalves<V>())
        return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
    else
        return mask ? a : b;
}

// The same bits.
template <class To, class V>
inline To cast(V value) {
    if constexpr (IsHalves<To>())
        return {cast<decltype(To::low)>(value.low), cast<decltype(To::high)>(value.high)};
    else
        return (To)value;
}

// The same numbers; to fewer bits, the lowest of them.
template <class To, class V>
inline To convert(V value) {
    if constexpr (IsHalves<To>())
        return {convert<decltype(To::low)>(value.low), convert<decltype(To::high)>(value.high)};
    else
        return __builtin_convertvector(value, To);
}

// a * b + c. One rounding where the machine has the instruction, two elsewhere; never a mixture within one build.
template <class V>
inline V fma(V a, V b, V c) {
    if constexpr (IsHalves<V>()) {
        return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)};
    } else {
#if defined(__AVX512F__)
        return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__) && defined(__FMA__)
        return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
        return (V)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
        return a * b + c;
#endif
    }
}

// Has a value in registers from here on: gcc would rather read it from memory for each use.
template <class V>
inline void keep(V& value) {
    if constexpr (IsHalves<V>()) {
        keep(value.low), keep(value.high);
    } else {
#if defined(__AVX2__) && !defined(__AVX512F__)
        asm("" : "+x"(value));
#endif
    }
}

template <class V>
inline V root(V x) {
    if constexpr (IsHalves<V>()) {
        return {root(x.low), root(x.high)};
    } else {
#if defined(__AVX512F__)
        return _mm512_sqrt_ps(x);
#elif defined(__AVX2__)
        return _mm256_sqrt_ps(x);
#else
        for (unsigned long lane = 0; lane < sizeof(V) / sizeof(float); lane++) x[lane] = std::sqrt(x[lane]);
        return x;
#endif
    }
}

// Lanes 0 0 1 1 … 7 7.
inline v16 first_lanes_twice(v16 x) {
#if defined(__AVX512F__)
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7), x);
#elif defined(__AVX2__)
    return {_mm256_permutevar8x32_ps(x.low, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)),
            _mm256_permutevar8x32_ps(x.low, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7))};
#else
    v16 result;
    for (long lane = 0; lane < LANES; lane++) result[lane] = x[lane / 2];
    return result;
#endif
}

// Lanes 1 0 3 2 … 15 14.
inline v16 swap_pairs(v16 x) {
#if defined(__AVX512F__)
    return _mm512_permute_ps(x, 0xB1);
#elif defined(__AVX2__)
    return {_mm256_permute_ps(x.low, 0xB1), _mm256_permute_ps(x.high, 0xB1)};
#else
    v16 result;
    for (long lane = 0; lane < LANES; lane++) result[lane] = x[lane ^ 1];
    return result;
#endif
}

inline v16 splat(float value) { return v16{} + value; }

inline v16 max16(v16 a, v16 b) { return select(a > b, a, b); }

}  // namespace pt
