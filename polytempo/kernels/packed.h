// Weights as checkpoints store them: decoded by the dot product, or expanded a panel of rows at a time.
// Twin: checkpoint/quant.py. A value is code * scale in float32, then rounded to the compute dtype: the same numbers as
// loading them expanded, so that the products behind have the same bits.
#pragma once

#include <type_traits>

#include "args.h"
#include "dots.h"

namespace pt {

constexpr int64_t PLAIN = 0, FP8 = 1, FP4 = 2;  // PtMatrix::kind; kernels/structs.py says the same
constexpr long FP8_BLOCK = 128;                 // rows and columns of one scale
constexpr long FP4_RUN = 32;                    // columns of one scale; K is a multiple

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

#if defined(__AVX512VBMI__)
// In bfloat16 both formats are looked up: for every scale the sixteen values of fp4, and the 128 of fp8 without a sign.
struct Bf16Tables {
    alignas(64) uint16_t fp4[256][16];
    alignas(64) uint8_t fp8[256][2][128];  // low bytes, high bytes

    Bf16Tables() {
        uint8_t codes[128], pairs[FP4_RUN / 2] = {0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe};
        for (int i = 0; i < 128; i++) codes[i] = i;
        bf16 values[128];
        for (int scale = 0; scale < 256; scale++) {
            expand_run<bf16>(pairs, scale, values);
            memcpy(fp4[scale], values, sizeof fp4[scale]);
            expand_block<bf16>(codes, scale, 128, values);
            for (int i = 0; i < 128; i++) {
                fp8[scale][0][i] = values[i].bits & 255;
                fp8[scale][1][i] = values[i].bits >> 8;
            }
        }
    }
};

inline const Bf16Tables bf16_tables;

// A run of fp4 values: one word per code, of whose bits 0 to 3 are its own. Bit 4 is the next one's, so the table is
// there twice.
inline Chunk<bf16> decode_run(const uint8_t* codes, uint8_t scale) {
    const __m512i table = _mm512_broadcast_i64x4(_mm256_load_si256((const __m256i*)bf16_tables.fp4[scale]));
    const __m512i quads = _mm512_cvtepu16_epi64(_mm_loadu_si128((const __m128i*)codes));
    const __m512i indices = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x000c000800040000), quads);
    return {(u16x)_mm512_permutexvar_epi16(indices, table)};
}

// Sixty-four fp8 values at a time, all of one scale.
struct Fp8Decoder {
    __m512i low_first, low_last, high_first, high_last;

    explicit Fp8Decoder(uint8_t scale) {
        const uint8_t(*tables)[128] = bf16_tables.fp8[scale];
        low_first = _mm512_load_si512(tables[0]), low_last = _mm512_load_si512(tables[0] + 64);
        high_first = _mm512_load_si512(tables[1]), high_last = _mm512_load_si512(tables[1] + 64);
    }

    struct Values {
        Chunk<bf16> first, second;
    };
    Values decode(__m512i codes) const {
        // Interleaving works within 128 bits: the first 32 columns go to the lower halves of these.
        codes = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), codes);
        const __m512i low = _mm512_permutex2var_epi8(low_first, codes, low_last);
        const __m512i unsigned_high = _mm512_permutex2var_epi8(high_first, codes, high_last);
        // 0xf8: unsigned_high | codes & the sign.
        const __m512i high = _mm512_ternarylogic_epi32(unsigned_high, codes, _mm512_set1_epi8(-128), 0xf8);
        return {{(u16x)_mm512_unpacklo_epi8(low, high)}, {(u16x)_mm512_unpackhi_epi8(low, high)}};
    }
};

inline void expand_run(const uint8_t* codes, uint8_t scale, bf16* to) {
    const Chunk<bf16> run = decode_run(codes, scale);
    memcpy(to, &run, sizeof run);
}

inline void expand_block(const uint8_t* codes, uint8_t scale, long count, bf16* to) {
    const Fp8Decoder decoder(scale);
    for (long i = 0; i < count; i += 64) {
        const __mmask64 present = count - i < 64 ? (1ull << (count - i)) - 1 : ~0ull;
        const Fp8Decoder::Values values = decoder.decode(_mm512_maskz_loadu_epi8(present, codes + i));
        _mm512_mask_storeu_epi16(to + i, (__mmask32)present, (__m512i)values.first.value);
        _mm512_mask_storeu_epi16(to + i + 32, (__mmask32)(present >> 32), (__m512i)values.second.value);
    }
}

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
    Fp8Decoder shared(long k) const { return Fp8Decoder(scales[k / FP8_BLOCK]); }
    template <int I>
    Fp8Decoder::Values read(const Fp8Decoder& decoder, long k, long count) const {
        const __mmask64 present = count < 64 ? (1ull << count) - 1 : ~0ull;
        return decoder.decode(_mm512_maskz_loadu_epi8(present, codes + I * code_stride + k));
    }
};
#endif

// Whether dot products can read packed columns of this type as they are stored.
#if defined(__AVX512VBMI__)
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
#if defined(__AVX512VBMI__)
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
