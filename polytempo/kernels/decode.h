// Codes of small float formats to values of the compute dtype, a run or a block at a time.
// Twin: checkpoint/quant.py. A value is code * scale in float32, then rounded to the compute dtype: the same numbers as
// loading them expanded, so that the products behind have the same bits. The templates say so plainly, and are what
// machines without the instructions below use.
#pragma once

#include "dots.h"

namespace pt {

constexpr long FP8_BLOCK = 128;  // rows and columns of one scale
constexpr long FP4_RUN = 32;     // columns of one scale; K is a multiple

// Sixteen bytes, one per lane.
inline u16x load_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
    return (u16x)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#else
    return convert<u16x>(read_lanes<b16>(from));
#endif
}

// 2^(byte - 127); the byte 0 is a subnormal, and 0xFF (NaN) is refused when a checkpoint is read.
inline float scale_value(uint8_t byte) {
    const uint32_t bits = byte ? uint32_t(byte) << 23 : 0x00400000u;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Sixteen codes of a small float format: sign, exponent, mantissa, no infinity.
template <int EXPONENT, int MANTISSA>
inline v16 decode16(u16x codes) {
    constexpr int SIGN = EXPONENT + MANTISSA, BIAS = (1 << (EXPONENT - 1)) - 1;
    const uint32_t one = 1u << 23, rebias = uint32_t(127 - BIAS) << 23, smallest_normal = uint32_t(128 - BIAS) << 23;
    u16x magnitude = codes & ((1u << SIGN) - 1), bits = (magnitude << (23 - MANTISSA)) + rebias;
    // Without an exponent the mantissa has no leading one: read it with one, and take that away again.
    v16 subnormal = cast<v16>(bits + one) - cast<v16>(u16x{} + smallest_normal);
    bits = select(magnitude < (1u << MANTISSA), cast<u16x>(subnormal), bits);
    return cast<v16>(bits | (codes >> SIGN) << 31);
}

// A run of FP4_RUN columns: two codes per byte, the even column in the low nibble.
template <class T>
inline void expand_run(const uint8_t* codes, uint8_t scale, T* to) {
    uint8_t nibbles[FP4_RUN];
    for (long i = 0; i < FP4_RUN / 2; i++) nibbles[2 * i] = codes[i] & 15, nibbles[2 * i + 1] = codes[i] >> 4;
    for (long i = 0; i < FP4_RUN; i += LANES)
        store(to + i, decode16<2, 1>(load_bytes(nibbles + i)) * scale_value(scale));
}

// `count` columns, at most FP8_BLOCK, that share a scale.
template <class T>
inline void expand_block(const uint8_t* codes, uint8_t scale, long count, T* to) {
    const float factor = scale_value(scale);
    long i = 0;
    for (; i + LANES <= count; i += LANES) store(to + i, decode16<4, 3>(load_bytes(codes + i)) * factor);
    if (i == count) return;
    uint8_t tail[LANES] = {};
    memcpy(tail, codes + i, count - i);
    store(to + i, decode16<4, 3>(load_bytes(tail)) * factor, count - i);
}

#if defined(__AVX512F__)
// What a scale makes of the sixteen codes of fp4; exact in bfloat16 too.
inline v16 fp4_values(uint8_t scale) {
    const v16 values = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    return values * scale_value(scale);
}

#if defined(PT_WIDENED_PANELS)
// Of every scale: products of few rows took longer where they were multiplied anew.
struct Fp4Tables {
    alignas(64) float values[256][LANES];
    Fp4Tables() {
        for (int scale = 0; scale < 256; scale++) store(values[scale], fp4_values(scale));
    }
};

inline const Fp4Tables fp4_tables;

// A run of fp4 values as it is multiplied: a byte holds an even column and the odd one behind it.
inline ChunkFactor<bf16> decode_factor(const uint8_t* codes, uint8_t scale) {
    const v16 scaled = load(fp4_tables.values[scale]);
    const u16x bytes = load_bytes(codes);  // permuting looks at four bits of each
    return {_mm512_permutexvar_ps((__m512i)bytes, scaled), _mm512_permutexvar_ps((__m512i)(bytes >> 4), scaled)};
}
#endif

inline void expand_run(const uint8_t* codes, uint8_t scale, float* to) {
    const v16 scaled = fp4_values(scale);
    for (long i = 0; i < FP4_RUN; i += LANES, codes += LANES / 2) {
        const __m512i bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i*)codes));
        const __m512i indices = _mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 28));  // low nibble, high nibble
        _mm512_storeu_ps(to + i, _mm512_permutexvar_ps(indices, scaled));
    }
}
#endif

#if defined(__AVX512BW__) || defined(__AVX2__)
// A register of bytes, and what GNU vectors cannot say of it. Looking up and interleaving work within 128 bits.
#if defined(__AVX512BW__)
typedef uint8_t Bytes __attribute__((vector_size(64), may_alias));
typedef uint16_t Words __attribute__((vector_size(64), may_alias));
typedef int8_t SignedBytes __attribute__((vector_size(64), may_alias));

inline Bytes load_codes(const uint8_t* from, long count) {
    return (Bytes)_mm512_maskz_loadu_epi8(count < 64 ? (1ull << count) - 1 : ~0ull, from);
}
inline Bytes repeat16(const uint8_t* from) {
    return (Bytes)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)from));
}
inline Bytes look_up(Bytes table, Bytes places) { return (Bytes)_mm512_shuffle_epi8((__m512i)table, (__m512i)places); }
inline Bytes interleave_first(Bytes a, Bytes b) { return (Bytes)_mm512_unpacklo_epi8((__m512i)a, (__m512i)b); }
inline Bytes interleave_last(Bytes a, Bytes b) { return (Bytes)_mm512_unpackhi_epi8((__m512i)a, (__m512i)b); }
// The first half to the lower halves of every 128 bits: interleaving then leaves the columns in order.
inline Bytes deal(Bytes codes) {
    return (Bytes)_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), (__m512i)codes);
}
#else
typedef uint8_t Bytes __attribute__((vector_size(32), may_alias));
typedef uint16_t Words __attribute__((vector_size(32), may_alias));
typedef int8_t SignedBytes __attribute__((vector_size(32), may_alias));

inline Bytes load_codes(const uint8_t* from, long count) {
    Bytes codes = {};
    memcpy(&codes, from, count < 32 ? count : 32);
    return codes;
}
inline Bytes repeat16(const uint8_t* from) {
    return (Bytes)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)from));
}
inline Bytes look_up(Bytes table, Bytes places) { return (Bytes)_mm256_shuffle_epi8((__m256i)table, (__m256i)places); }
inline Bytes interleave_first(Bytes a, Bytes b) { return (Bytes)_mm256_unpacklo_epi8((__m256i)a, (__m256i)b); }
inline Bytes interleave_last(Bytes a, Bytes b) { return (Bytes)_mm256_unpackhi_epi8((__m256i)a, (__m256i)b); }
inline Bytes deal(Bytes codes) { return (Bytes)_mm256_permute4x64_epi64((__m256i)codes, 0xd8); }
#endif

// As many bfloat16 values as a register has bytes.
struct Bf16Values {
    Bytes first, second;
};

inline Bf16Values interleave(Bytes low, Bytes high) {
    return {interleave_first(low, high), interleave_last(low, high)};
}

// Register by register: gcc copies the whole by way of the stack.
inline void store(bf16* to, Bf16Values values) {
    memcpy(to, &values.first, sizeof values.first);
    memcpy(to + sizeof(Bytes) / 2, &values.second, sizeof values.second);
}

inline void store(bf16* to, Chunk<bf16> run) { memcpy(to, &run, sizeof run); }

// Values by their low and their high bytes.
template <int N>
struct SplitValues {
    alignas(N < 64 ? N : 64) uint8_t low[N], high[N];

    void set(const bf16* values) {
        for (int i = 0; i < N; i++) low[i] = values[i].bits, high[i] = values[i].bits >> 8;
    }
};

// What every scale makes of codes in bfloat16: of fp4 all sixteen values; of fp8 the 128 without a sign with VBMI, else
// (of sixteen) the eight without an exponent.
struct Bf16Tables {
#if defined(__AVX512BW__)
    struct {
        alignas(32) bf16 values[16];
        void set(const bf16* from) { memcpy(values, from, sizeof values); }
    } fp4[256];
#else
    SplitValues<16> fp4[256];
#endif
#if defined(__AVX512VBMI__)
    SplitValues<128> fp8[256];
#else
    SplitValues<16> fp8[256];
#endif

    Bf16Tables() {
        uint8_t codes[128], pairs[FP4_RUN / 2] = {0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe};
        for (int i = 0; i < 128; i++) codes[i] = i;
        bf16 values[128];
        for (int scale = 0; scale < 256; scale++) {
            expand_run<bf16>(pairs, scale, values);
            fp4[scale].set(values);
            expand_block<bf16>(codes, scale, 128, values);
            fp8[scale].set(values);
        }
    }
};

inline const Bf16Tables bf16_tables;

// A run of fp4 values.
#if defined(__AVX512BW__)
inline Chunk<bf16> decode_run(const uint8_t* codes, uint8_t scale) {
    const __m512i table = _mm512_broadcast_i64x4(_mm256_load_si256((const __m256i*)bf16_tables.fp4[scale].values));
    // One word per code, of whose bits 0 to 3 are its own. Bit 4 may be the next one's, so the table is there twice.
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)codes));
    const __m512i places = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
    return {(u16x)_mm512_permutexvar_epi16(places, table)};
}
#else
inline Bf16Values decode_run(const uint8_t* codes, uint8_t scale) {
    // Each byte twice, in the order that interleaving wants: once for its low code, once for its high one.
    const Bytes twice = {0, 0, 1, 1, 2, 2, 3, 3, 8,  8,  9,  9,  10, 10, 11, 11,
                         4, 4, 5, 5, 6, 6, 7, 7, 12, 12, 13, 13, 14, 14, 15, 15};
    const Words pairs = (Words)look_up(repeat16(codes), twice);
    const Bytes places = (Bytes)((pairs & 0x000f) | (pairs >> 4 & 0x0f00));
    const auto& table = bf16_tables.fp4[scale];
    return interleave(look_up(repeat16(table.low), places), look_up(repeat16(table.high), places));
}
#endif

// Scales that give every code with an exponent a normal and finite value, whose exponent is the code's, moved.
constexpr bool is_regular(uint8_t scale) { return scale >= 7 && scale <= 246; }

// A register of fp8 codes at a time, all of one scale.
#if defined(__AVX512VBMI__)
struct Fp8Decoder {
    __m512i low_first, low_last, high_first, high_last;

    explicit Fp8Decoder(uint8_t scale) {
        const auto& table = bf16_tables.fp8[scale];
        low_first = _mm512_load_si512(table.low), low_last = _mm512_load_si512(table.low + 64);
        high_first = _mm512_load_si512(table.high), high_last = _mm512_load_si512(table.high + 64);
    }

    static constexpr bool can_decode(uint8_t) { return true; }

    Bf16Values decode(Bytes codes) const {
        const __m512i places = (__m512i)deal(codes);
        const __m512i low = _mm512_permutex2var_epi8(low_first, places, low_last);
        const __m512i unsigned_high = _mm512_permutex2var_epi8(high_first, places, high_last);
        // 0xf8: unsigned_high | places & the sign.
        const __m512i high = _mm512_ternarylogic_epi32(unsigned_high, places, _mm512_set1_epi8(-128), 0xf8);
        return interleave((Bytes)low, (Bytes)high);
    }
};
#else
struct Fp8Decoder {
    Bytes low, high;  // of the codes without an exponent
    uint8_t move;     // of the exponent

    explicit Fp8Decoder(uint8_t scale)
        : low(repeat16(bf16_tables.fp8[scale].low)), high(repeat16(bf16_tables.fp8[scale].high)), move(scale - 7) {}

    static constexpr bool can_decode(uint8_t scale) { return is_regular(scale); }

    Bf16Values decode(Bytes codes) const {
        codes = deal(codes);
        // Exponent and mantissa begin 4 bits lower than in a value. The lowest bit of the move is added there, where it
        // can carry, and the others in the high byte. (To the left by words: gcc shifts bytes by adding.)
        const Bytes magnitude = codes & 0x7f, moved = magnitude + uint8_t(move % 2 * 8);
        const auto has_no_exponent = (SignedBytes)magnitude < 8;
        const Bytes low_bytes = has_no_exponent ? look_up(low, magnitude) : (Bytes)((Words)moved << 4) & 0xf0;
        const Bytes high_bytes = has_no_exponent ? look_up(high, magnitude) : (moved >> 4) + uint8_t(move / 2);
        return interleave(low_bytes, high_bytes | (codes & 0x80));
    }
};
#endif

inline void expand_run(const uint8_t* codes, uint8_t scale, bf16* to) { store(to, decode_run(codes, scale)); }

// Fewer columns than a register has.
__attribute__((noinline)) inline void expand_tail(const uint8_t* codes, uint8_t scale, long count, bf16* to) {
    bf16 tail[sizeof(Bytes)];
    store(tail, Fp8Decoder(scale).decode(load_codes(codes, count)));
    memcpy(to, tail, count * sizeof *to);
}

// Inlined always: a call takes as long as half a block.
__attribute__((always_inline)) inline void expand_block(const uint8_t* codes, uint8_t scale, long count, bf16* to) {
    constexpr long WIDTH = sizeof(Bytes);
    if (!Fp8Decoder::can_decode(scale)) return expand_block<bf16>(codes, scale, count, to);
    const Fp8Decoder decoder(scale);
    long i = 0;
    for (; i + WIDTH <= count; i += WIDTH) store(to + i, decoder.decode(load_codes(codes + i, WIDTH)));
    if (i < count) expand_tail(codes + i, scale, count - i, to + i);
}

// float32 by bfloat16, which holds every fp4 value, and every fp8 value of a regular scale. A scalar loop, since
// compilers put it on vectors, and better than they do vectors of 64 bytes.
inline void widen_all(const bf16* from, long count, float* to) {
    for (long i = 0; i < count; i++) {
        const uint32_t bits = uint32_t(from[i].bits) << 16;
        memcpy(to + i, &bits, sizeof bits);
    }
}

#if !defined(__AVX512F__)
inline void expand_run(const uint8_t* codes, uint8_t scale, float* to) {
    bf16 run[FP4_RUN];
    expand_run(codes, scale, run);
    widen_all(run, FP4_RUN, to);
}
#endif

inline void expand_block(const uint8_t* codes, uint8_t scale, long count, float* to) {
    if (!is_regular(scale)) return expand_block<float>(codes, scale, count, to);
    bf16 block[FP8_BLOCK];
    expand_block(codes, scale, count, block);
    widen_all(block, count, to);
}
#endif

}  // namespace pt
