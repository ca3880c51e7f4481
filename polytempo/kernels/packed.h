// Weights as checkpoints store them: decoded by the dot product, or expanded a panel of rows at a time.
#pragma once

#include <type_traits>

#include "args.h"
#include "decode.h"
#include "parallel.h"

namespace pt {

constexpr int64_t PLAIN = 0, FP8 = 1, FP4 = 2;  // PtMatrix::kind; kernels/structs.py says the same

#if defined(__AVX512BW__)
// Columns that a dot product reads as they are stored (see StoredColumns): the same values as expanded ones.
struct Fp4Columns {
    const uint8_t *codes, *scales;  // of the first; the others follow
    long code_stride, scale_stride;

    static constexpr long WIDTH = FP4_RUN, BYTES = FP4_RUN / 2;
#if defined(PT_WIDENED_PANELS)
    static constexpr auto* decode = decode_factor;
#else
    static constexpr auto* decode = decode_run;
#endif
    struct Values {
        decltype(decode(nullptr, 0)) first;
    };
    Nothing shared(long) const { return {}; }
    template <int I>
    Values read(Nothing, long k, long) const {
        return {decode(codes + I * code_stride + k / 2, scales[I * scale_stride + k / FP4_RUN])};
    }
};

struct Fp8Columns {
    const uint8_t *codes, *scales;  // of the first; all have the same scales
    long code_stride;

    static constexpr long WIDTH = 64, BYTES = 64;
    struct Values {
        Chunk<bf16> first, second;
    };
    struct Block {
        uint8_t scale;
        Fp8Decoder decoder;
    };
    Block shared(long k) const { return {scales[k / FP8_BLOCK], Fp8Decoder(scales[k / FP8_BLOCK])}; }
    template <int I>
    Values read(const Block& block, long k, long count) const {
        const uint8_t* from = codes + I * code_stride + k;
        if (__builtin_expect(!Fp8Decoder::can_decode(block.scale), 0)) return read_plainly(from, block.scale, count);
        const Bf16Values values = block.decoder.decode(load_codes(from, count));
        return {{(u16x)values.first}, {(u16x)values.second}};
    }
    __attribute__((noinline, cold)) static Values read_plainly(const uint8_t* from, uint8_t scale, long count) {
        bf16 to[WIDTH] = {};
        expand_block<bf16>(from, scale, count < WIDTH ? count : WIDTH, to);
        return {Chunk<bf16>::read(to), Chunk<bf16>::read(to + WIDTH / 2)};
    }
};
#endif

#if defined(__AVX512VBMI__)
constexpr long FP8_PASSES = 2;  // over fp8 that is read as it is stored
#else
constexpr long FP8_PASSES = 1;
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

    // Whether `passes` over a panel read it as it is stored; else it is expanded once for all of them. Measured: with
    // VBMI decoding fp8 twice costs less than a panel. Four rows from a multiple of 4 on have one block of scales.
    bool in_place(long passes) const {
#if defined(PT_WIDENED_PANELS)
        if (std::is_same_v<T, bf16> && passes >= WIDENED_PASSES) return false;
#endif
        if (kind == PLAIN) return true;
        return CAN_READ_STORED<T> && (kind == FP8 ? passes <= FP8_PASSES && first_row % 4 == 0 : passes <= 1);
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
        for (long row = first; row < last; row++) expand_row(row, K, panel + (row - first) * K);
        return panel;
    }

    // A row of a packed matrix, by its place in the stored one.
    void expand_row(long row, long K, T* to) const {
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

#if defined(PT_WIDENED_PANELS)
    // Rows [first, last) of bfloat16, widened.
    WidenedColumns widened_rows(long first, long last, long K, float* panel) const {
        const long width = widened_width(K);
        bf16* expanded = PT_SCRATCH(bf16, kind == FP8 ? K : 0);
        for (long row = first_row + first, end = first_row + last; row < end; row++) {
            float* to = panel + (row - first_row - first) * width;
            if (kind == PLAIN) {
                widen_row((const bf16*)values + row * K, K, to);
            } else if (kind == FP8) {
                expand_row(row, K, expanded);
                widen_row(expanded, K, to);
            } else {
                for (long k = 0; k < K; k += FP4_RUN)
                    store_factor(to + k, decode_factor(values + (row * K + k) / 2, scales[(row * K + k) / FP4_RUN]));
            }
        }
        return {panel, width};
    }
#endif
};

}  // namespace pt
