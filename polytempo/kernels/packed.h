// Weights as checkpoints store them: decoded by the dot product, or expanded a panel of rows at a time.
// Twin: checkpoint/quant.py. A value is code * scale in float32, then rounded to the compute dtype: the same numbers as
// loading them expanded, so that the products behind have the same bits.
#pragma once

#include <type_traits>

#include "args.h"
#include "vector.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace pt {

constexpr int64_t PLAIN = 0, FP8 = 1, FP4 = 2;  // PtMatrix::kind; kernels/structs.py says the same
constexpr long FP8_BLOCK = 128;                 // rows and columns of one scale
constexpr long FP4_RUN = 32;                    // columns of one scale; K is a multiple

typedef uint8_t b16 __attribute__((vector_size(16), may_alias));

// Sixteen bytes, one per lane.
inline u16x load_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
    return (u16x)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#else
    b16 bytes;
    memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, u16x);
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
    v16 subnormal = (v16)(bits + one) - (v16)(u16x{} + smallest_normal);
    bits = magnitude < (1u << MANTISSA) ? (u16x)subnormal : bits;
    return (v16)(bits | (codes >> SIGN) << 31);
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
inline void expand_run(const uint8_t* codes, uint8_t scale, float* to) {
    const v16 values = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    const v16 scaled = values * scale_value(scale);
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

inline Bytes load_codes(const uint8_t* from, long count) {
    return (Bytes)_mm512_maskz_loadu_epi8(count < 64 ? (1ull << count) - 1 : ~0ull, from);
}
inline Bytes repeat16(const uint8_t* from) {
    return (Bytes)_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)from));
}
inline Bytes look_up(Bytes table, Bytes places) {
    return (Bytes)_mm512_shuffle_epi8((__m512i)table, (__m512i)places);
}
inline Bytes interleave_first(Bytes a, Bytes b) { return (Bytes)_mm512_unpacklo_epi8((__m512i)a, (__m512i)b); }
inline Bytes interleave_last(Bytes a, Bytes b) { return (Bytes)_mm512_unpackhi_epi8((__m512i)a, (__m512i)b); }
// The first half to the lower halves of every 128 bits, so that interleaving leaves the columns in order.
inline Bytes deal(Bytes codes) {
    return (Bytes)_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), (__m512i)codes);
}
#else
typedef uint8_t Bytes __attribute__((vector_size(32), may_alias));

inline Bytes load_codes(const uint8_t* from, long count) {
    Bytes codes = {};
    memcpy(&codes, from, sizeof codes < count ? sizeof codes : count);
    return codes;
}
inline Bytes repeat16(const uint8_t* from) {
    return (Bytes)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)from));
}
inline Bytes look_up(Bytes table, Bytes places) {
    return (Bytes)_mm256_shuffle_epi8((__m256i)table, (__m256i)places);
}
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

// The exponent of a regular fp8 scale moves that of every code that has one; no product overflows or is subnormal.
constexpr bool is_regular(uint8_t scale) { return scale >= 10 && scale <= 246; }

// In bfloat16 what a scale makes of codes is looked up: of fp4 all sixteen values, and of fp8 the 128 without a sign, or
// (without VBMI) the eight without an exponent.
struct Bf16Tables {
#if defined(__AVX512BW__)
    alignas(64) uint16_t fp4[256][16];
#else
    alignas(64) uint8_t fp4[256][2][16];  // low bytes, high bytes
#endif
#if defined(__AVX512VBMI__)
    alignas(64) uint8_t fp8[256][2][128];  // low bytes, high bytes
#else
    alignas(64) uint8_t fp8[256][2][16];  // the same; only eight are used
#endif

    Bf16Tables() {
        uint8_t codes[128], pairs[FP4_RUN / 2] = {0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe};
        for (int i = 0; i < 128; i++) codes[i] = i;
        bf16 values[128];
        for (int scale = 0; scale < 256; scale++) {
            expand_run<bf16>(pairs, scale, values);
#if defined(__AVX512BW__)
            memcpy(fp4[scale], values, sizeof fp4[scale]);
#else
            for (int i = 0; i < 16; i++) fp4[scale][0][i] = values[i].bits, fp4[scale][1][i] = values[i].bits >> 8;
#endif
            expand_block<bf16>(codes, scale, 128, values);
#if defined(__AVX512VBMI__)
            for (int i = 0; i < 128; i++) fp8[scale][0][i] = values[i].bits, fp8[scale][1][i] = values[i].bits >> 8;
#else
            for (int i = 0; i < 16; i++) fp8[scale][0][i] = values[i].bits, fp8[scale][1][i] = values[i].bits >> 8;
#endif
        }
    }
};

inline const Bf16Tables bf16_tables;

// A run of fp4 values.
#if defined(__AVX512BW__)
inline Chunk<bf16> decode_run(const uint8_t* codes, uint8_t scale) {
    const __m512i table = _mm512_broadcast_i64x4(_mm256_load_si256((const __m256i*)bf16_tables.fp4[scale]));
    // One word per code, of whose bits 0 to 3 are its own. Bit 4 may be another's, so the table is there twice.
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)codes));
    return {(u16x)_mm512_permutexvar_epi16(_mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12)), table)};
}
#else
inline Bf16Values decode_run(const uint8_t* codes, uint8_t scale) {
    // Each byte twice, in the order that interleaving wants; then its low nibble, and its high one.
    const Bytes twice = {0, 0, 1, 1, 2, 2, 3, 3, 8,  8,  9,  9,  10, 10, 11, 11,
                         4, 4, 5, 5, 6, 6, 7, 7, 12, 12, 13, 13, 14, 14, 15, 15};
    const __m256i bytes = (__m256i)look_up(repeat16(codes), twice), nibble = _mm256_set1_epi8(15);
    const __m256i even = _mm256_and_si256(bytes, nibble), odd = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble);
    const Bytes places = (Bytes)_mm256_blendv_epi8(even, odd, _mm256_set1_epi16((short)0xff00));
    const uint8_t(*tables)[16] = bf16_tables.fp4[scale];
    return interleave(look_up(repeat16(tables[0]), places), look_up(repeat16(tables[1]), places));
}
#endif

// A register of fp8 codes at a time, all of one scale.
#if defined(__AVX512VBMI__)
struct Fp8Decoder {
    __m512i low_first, low_last, high_first, high_last;

    explicit Fp8Decoder(uint8_t scale) {
        const uint8_t(*tables)[128] = bf16_tables.fp8[scale];
        low_first = _mm512_load_si512(tables[0]), low_last = _mm512_load_si512(tables[0] + 64);
        high_first = _mm512_load_si512(tables[1]), high_last = _mm512_load_si512(tables[1] + 64);
    }

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
    Bytes low_bytes, high_bytes;  // of the codes without an exponent
    uint8_t scale;

    explicit Fp8Decoder(uint8_t scale)
        : low_bytes(repeat16(bf16_tables.fp8[scale][0])), high_bytes(repeat16(bf16_tables.fp8[scale][1])), scale(scale) {}

    Bf16Values decode(Bytes codes) const {
        if (__builtin_expect(!is_regular(scale), 0)) return decode_plain(codes);
        codes = deal(codes);
        // The lowest bit of the move joins the code, so that a carry goes where it belongs.
        const uint8_t move = scale - 7;
        const Bytes magnitude = codes & 0x7f, moved = magnitude + uint8_t(move % 2 * 8);
        const auto is_subnormal = magnitude < 8;
        const Bytes low = is_subnormal ? look_up(low_bytes, magnitude) : moved << 4;
        const Bytes high = is_subnormal ? look_up(high_bytes, magnitude) : (moved >> 4) + uint8_t(move / 2);
        return interleave(low, high | (codes & 0x80));
    }

    __attribute__((noinline, cold)) Bf16Values decode_plain(Bytes codes) const {
        uint8_t from[sizeof codes];
        memcpy(from, &codes, sizeof codes);
        bf16 to[sizeof codes];
        expand_block<bf16>(from, scale, sizeof codes, to);
        Bf16Values values;
        memcpy(&values, to, sizeof values);
        return values;
    }
};
#endif

inline void expand_run(const uint8_t* codes, uint8_t scale, bf16* to) {
    const auto run = decode_run(codes, scale);
    memcpy(to, &run, sizeof run);
}

inline void expand_block(const uint8_t* codes, uint8_t scale, long count, bf16* to) {
    constexpr long WIDTH = sizeof(Bytes);
    const Fp8Decoder decoder(scale);
    long i = 0;
    for (; i + WIDTH <= count; i += WIDTH) {
        const Bf16Values values = decoder.decode(load_codes(codes + i, WIDTH));
        memcpy(to + i, &values, sizeof values);
    }
    if (i == count) return;
    const Bf16Values values = decoder.decode(load_codes(codes + i, count - i));
    memcpy(to + i, &values, (count - i) * sizeof *to);
}

#if !defined(__AVX512F__)
// bfloat16 holds every fp4 value, and every fp8 value of a regular scale.
inline void expand_run(const uint8_t* codes, uint8_t scale, float* to) {
    bf16 run[FP4_RUN];
    expand_run(codes, scale, run);
    for (long i = 0; i < FP4_RUN; i += LANES) store(to + i, load(run + i));
}

inline void expand_block(const uint8_t* codes, uint8_t scale, long count, float* to) {
    if (!is_regular(scale)) return expand_block<float>(codes, scale, count, to);
    bf16 block[FP8_BLOCK];
    expand_block(codes, scale, count, block);
    for (long i = 0; i < count; i += LANES) store(to + i, load(block + i, count - i), count - i);
}
#endif
#endif

#if defined(__AVX512BW__)
// Columns that a dot product reads as they are stored (see StoredColumns): the same values as expanded ones.
struct Fp4Columns {
    const uint8_t *codes, *scales;  // of the first; the others follow
    long code_stride, scale_stride;

    static constexpr long WIDTH = FP4_RUN, BYTES = FP4_RUN / 2;
    struct Values {
        Chunk<bf16> first;
    };
    Nothing shared(long) const { return {}; }
    template <int I>
    Values read(Nothing, long k, long) const {
        return {decode_run(codes + I * code_stride + k / 2, scales[I * scale_stride + k / FP4_RUN])};
    }
};

struct Fp8Columns {
    const uint8_t *codes, *scales;  // of the first; all have the same scales
    long code_stride;

    static constexpr long WIDTH = 64, BYTES = 64;
    struct Values {
        Chunk<bf16> first, second;
    };
    Fp8Decoder shared(long k) const { return Fp8Decoder(scales[k / FP8_BLOCK]); }
    template <int I>
    Values read(const Fp8Decoder& decoder, long k, long count) const {
        const Bf16Values values = decoder.decode(load_codes(codes + I * code_stride + k, count));
        return {{(u16x)values.first}, {(u16x)values.second}};
    }
};
#endif

// Whether dot products can read packed columns of this type as they are stored.
#if defined(__AVX512BW__)
template <class T>
constexpr bool CAN_READ_STORED = std::is_same_v<T, bf16>;
#else
template <class T>
constexpr bool CAN_READ_STORED = false;
#endif

// A matrix [N, K] of any kind, as a product reads it.
template <class T>
struct Weights {
    const uint8_t *values = nullptr, *scales = nullptr;
    int64_t kind = PLAIN;
    long first_row = 0;  // of the stored matrix, whose blocks of scales begin at its own row 0

    Weights() = default;
    Weights(const T* plain) : values((const uint8_t*)plain) {}
    Weights(const PtMatrix& matrix)
        : values((const uint8_t*)matrix.values), scales((const uint8_t*)matrix.scales), kind(matrix.kind) {}

    bool is_plain() const { return kind == PLAIN; }
    long row_bytes(long K) const { return kind == PLAIN ? K * long(sizeof(T)) : kind == FP8 ? K : K / 2; }
    long row_scales(long K) const { return kind == FP8 ? (K + FP8_BLOCK - 1) / FP8_BLOCK : K / FP4_RUN; }

    // Whether `passes` over a panel read it as it is stored; else it is expanded once for all of them. Measured:
    // decoding fp8 twice costs less than a panel. Four rows from a multiple of 4 on have one block of scales.
    bool in_place(long passes) const {
        if (kind == PLAIN) return true;
        return CAN_READ_STORED<T> && (kind == FP8 ? passes <= 2 && first_row % 4 == 0 : passes <= 1);
    }

    // Calls `use` with a function from column c to what reads up to four columns from c on as they are stored.
    template <class Use>
    void read_stored(long K, const Use& use) const {
#if defined(__AVX512BW__)
        if constexpr (CAN_READ_STORED<T>) {
            const uint8_t* codes = values + first_row * row_bytes(K);
            const long code_stride = row_bytes(K), scale_stride = row_scales(K);
            if (kind == FP4)
                use([=](long c) {
                    return Fp4Columns{codes + c * code_stride, scales + (first_row + c) * scale_stride, code_stride,
                                      scale_stride};
                });
            else
                use([=](long c) {
                    return Fp8Columns{codes + c * code_stride, scales + (first_row + c) / FP8_BLOCK * scale_stride,
                                      code_stride};
                });
        }
#endif
    }

    // Where a row lies as it is stored.
    const uint8_t* stored(long row, long K) const { return values + (first_row + row) * row_bytes(K); }

    // Matrix `index` of a stack of [rows, K], each with scales of its own.
    Weights part(long index, long rows, long K) const {
        Weights own = *this;
        own.values += index * rows * row_bytes(K);
        if (kind == FP8) own.scales += index * ((rows + FP8_BLOCK - 1) / FP8_BLOCK) * row_scales(K);
        if (kind == FP4) own.scales += index * rows * row_scales(K);
        return own;
    }

    // The same matrix without its first rows.
    Weights rows_from(long row) const {
        Weights own = *this;
        own.first_row += row;
        return own;
    }

    // Rows [first, last) side by side: in place if they are plain, else expanded to `panel`.
    const T* rows(long first, long last, long K, T* panel) const {
        first += first_row, last += first_row;
        if (kind == PLAIN) return (const T*)values + first * K;
        for (long row = first; row < last; row++) {
            T* to = panel + (row - first) * K;
            const uint8_t* codes = values + row * row_bytes(K);
            if (kind == FP4) {
                const uint8_t* own = scales + row * row_scales(K);
                for (long k = 0; k < K; k += FP4_RUN) expand_run(codes + k / 2, own[k / FP4_RUN], to + k);
            } else {
                const uint8_t* own = scales + row / FP8_BLOCK * row_scales(K);
                for (long k = 0; k < K; k += FP8_BLOCK)
                    expand_block(codes + k, own[k / FP8_BLOCK], K - k < FP8_BLOCK ? K - k : FP8_BLOCK, to + k);
            }
        }
        return panel;
    }
};

}  // namespace pt
