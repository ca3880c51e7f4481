// Compressed entries: pooling the spans that a forward completes, and the indexer's choice among them.
#pragma once

#include "linear.h"

namespace pt {

constexpr long ENTRY_BLOCK = 64;
constexpr long OVERLAP_RATIO = 4;

// Row of entry `entry` of a slot.
template <class T>
inline T* entry_row(const PtPool& pool, int64_t slot, int64_t entry, long dim) {
    int64_t block = pool.table[slot * pool.table_width + entry / ENTRY_BLOCK];
    return (T*)pool.entries + (block * ENTRY_BLOCK + entry % ENTRY_BLOCK) * dim;
}

// Cell of a position in a ring of compressor inputs.
template <class T>
inline T* input_row(const void* ring, const PtPool& pool, int64_t slot, int64_t position, long width) {
    return (T*)ring + (slot * pool.cells + position % pool.cells) * width;
}

// Make the entry that ends at `position` from the inputs of its span (and, at ratio 4, of the span before).
template <class T>
inline void pool_entry(const PtLayer& layer, const PtCompressor& compressor, const PtPool& pool,
                       const PtTokens& tokens, long token, long dim) {
    const long ratio = layer.ratio;
    const bool overlap = ratio == OVERLAP_RATIO;
    const long width = overlap ? 2 * dim : dim;
    const int64_t slot = tokens.slots[token], entry = tokens.positions[token] / ratio;
    // With overlap the first `ratio` inputs are the previous span's first half-series; entry 0 has none.
    const long inputs = overlap && entry ? 2 * ratio : ratio;
    const int64_t first = tokens.positions[token] + 1 - inputs;
    const T** kv = PT_SCRATCH(const T*, 2 * ratio);
    const T** gate = PT_SCRATCH(const T*, 2 * ratio);
    const float** ape = PT_SCRATCH(const float*, 2 * ratio);
    for (long i = 0; i < inputs; i++) {
        long half = overlap && i >= inputs - ratio ? dim : 0;
        kv[i] = input_row<T>(pool.kv, pool, slot, first + i, width) + half;
        gate[i] = input_row<T>(pool.gate, pool, slot, first + i, width) + half;
        ape[i] = compressor.ape + i % ratio * width + half;
    }
    float* pooled = PT_SCRATCH(float, dim);
    for (long c = 0; c < dim; c += LANES) {
        v16 highest = load(gate[0] + c, dim - c) + load(ape[0] + c, dim - c), weights = {}, values = {};
        for (long i = 1; i < inputs; i++)
            highest = max16(load(gate[i] + c, dim - c) + load(ape[i] + c, dim - c), highest);
        for (long i = 0; i < inputs; i++) {
            v16 weight = exp16(load(gate[i] + c, dim - c) + load(ape[i] + c, dim - c) - highest);
            weights += weight;
            values += weight * load(kv[i] + c, dim - c);
        }
        store(pooled + c, values / weights, dim - c);
    }
    rms_norm(pooled, pooled, compressor.norm, dim, layer.norm_eps);
    const int64_t angle = entry * ratio * layer.rope_pairs;
    rotate(pooled, dim, tokens.cos + angle, tokens.sin + angle, layer.rope_pairs, 1.0f);
    T* to = entry_row<T>(pool, slot, entry, dim);
    for (long c = 0; c < dim; c += LANES) store(to + c, load(pooled + c, dim - c), dim - c);
}

// Every entry whose last token is in this forward, of one compressor.
template <class T>
inline void pool_entries(const PtLayer& layer, const PtCompressor& compressor, const PtPool& pool,
                         const PtTokens& tokens, long dim) {
    Timed timed(ENTRIES);
    long* ending = PT_SCRATCH(long, tokens.count);
    long count = 0;
    for (long token = 0; token < tokens.count; token++)
        if ((tokens.positions[token] + 1) % layer.ratio == 0) ending[count++] = token;
    share(count, tokens.threads, [&](long i) { pool_entry<T>(layer, compressor, pool, tokens, ending[i], dim); });
}

// Ascending ids of the index_top_k entries with the highest scores; of equals the lowest entry, NaN above all.
inline void choose_entries(const float* scores, long visible, long top_k, int64_t* kept) {
    uint64_t* keys = PT_SCRATCH(uint64_t, visible);
    for (long entry = 0; entry < visible; entry++) {
        float score = scores[entry] + 0.0f;  // -0 counts as 0
        uint32_t bits;
        memcpy(&bits, &score, sizeof bits);
        bits = score != score ? 0xffffffffu : (bits >> 31 ? ~bits : bits | 0x80000000u);
        keys[entry] = uint64_t(~bits) << 32 | uint64_t(entry);
    }
    std::nth_element(keys, keys + top_k, keys + visible);
    for (long i = 0; i < top_k; i++) kept[i] = int64_t(keys[i] & 0xffffffffu);
    std::sort(kept, kept + top_k);
}

// Scores of a query's visible entries: sum over heads, first to last, of weight * ReLU(query . key).
template <class T>
inline void index_scores(const PtLayer& layer, const PtPool& pool, int64_t slot, long first, long last,
                         const T* queries, const float* weights, float* scores) {
    const long dim = layer.index_dim;
    for (long entry = first; entry < last; entry += 4) {
        const T* keys[4];
        const long count = std::min(4L, last - entry);
        for (long i = 0; i < 4; i++) keys[i] = entry_row<T>(pool, slot, entry + std::min(i, count - 1), dim);
        float sums[4] = {};
        long head = 0;
        auto add = [&](v16 out, long heads) {
            out = select(out < 0.0f, v16{}, out);
            for (long r = 0; r < heads; r++)
                for (long i = 0; i < 4; i++) sums[i] += out[4 * r + i] * weights[head + r];
            head += heads;
        };
        while (head + 4 <= layer.index_heads) {
            const T* rows[4];
            for (long r = 0; r < 4; r++) rows[r] = queries + (head + r) * dim;
            add(dots<T, 4, 4>(rows, keys, dim), 4);
        }
        while (head < layer.index_heads) {
            const T* row = queries + head * dim;
            add(dots<T, 1, 4>(&row, keys, dim), 1);
        }
        for (long i = 0; i < count; i++) scores[entry + i] = sums[i];
    }
}

}  // namespace pt
