// Weights as checkpoints store them, expanded a panel of rows at a time to what products read.
// Twin: checkpoint/quant.py. A value is code * scale in float32, then rounded to the compute dtype: the same numbers as
// loading them expanded, so that the products behind have the same bits.
#pragma once

#include "args.h"
#include "vector.h"

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

#if defined(__AVX512BW__)
// In bfloat16 both formats are a look-up or a shift, and the scale is added to the exponent: exact while no result is
// subnormal; one too large is refused when a checkpoint is read. Lower scales, which no trained weight has, take the
// float32 way above.
constexpr uint8_t LOWEST_PLAIN_SCALE = 16;

inline bool is_plain_scale(uint8_t scale) { return scale >= LOWEST_PLAIN_SCALE; }

inline void expand_run(const uint8_t* codes, uint8_t scale, bf16* to) {
    if (!is_plain_scale(scale)) return expand_run<bf16>(codes, scale, to);
    alignas(64) static const uint16_t values[32] = {
        0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,                      // 0, .5, 1, 1.5, 2, 3, 4, 6
        0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,                 // and negative
        0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,                      // again: bit 4 of an index
        0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};                // is the next code's
    const __m512i table = _mm512_load_si512(values);
    const __m512i scaled = _mm512_mask_add_epi16(table, 0xfefefefe, table, _mm512_set1_epi16((scale - 127) * 128));
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)codes));
    const __m512i indices = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));  // low nibble, high nibble
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(indices, scaled));
}

inline void expand_block(const uint8_t* codes, uint8_t scale, long count, bf16* to) {
    if (!is_plain_scale(scale)) return expand_block<bf16>(codes, scale, count, to);
    alignas(64) static const uint16_t mantissas[32] = {0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    const __m512i table = _mm512_load_si512(mantissas);  // 0 … 7, the codes without an exponent, times 2^9
    const __m512i subnormals = _mm512_mask_add_epi16(table, 0xfe, table, _mm512_set1_epi16((scale - 136) * 128));
    const __m512i rebias = _mm512_set1_epi16((scale - 7) * 128), sign = _mm512_set1_epi16((short)0x8000);
    for (long i = 0; i < count; i += 32) {
        const __mmask32 present = count - i < 32 ? (1u << (count - i)) - 1 : 0xffffffffu;
        const __m512i code = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(present, codes + i));
        const __m512i magnitude = _mm512_and_si512(code, _mm512_set1_epi16(0x7f));
        const __mmask32 is_subnormal = _mm512_cmplt_epi16_mask(magnitude, _mm512_set1_epi16(8));
        __m512i bits = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), rebias);
        bits = _mm512_mask_permutexvar_epi16(bits, is_subnormal, code, subnormals);
        bits = _mm512_or_si512(bits, _mm512_and_si512(_mm512_slli_epi16(code, 8), sign));
        _mm512_mask_storeu_epi16(to + i, present, bits);
    }
}
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
