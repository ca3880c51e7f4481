// A block's attention: projections into the row state, then one softmax over [window ++ entries] with a sink.
// A query walks its own keys in ascending order, whichever chunk or batch it is in.
#pragma once

#include "entries.h"

namespace pt {

constexpr long HEADS_PER_PASS = 4;

template <class T>
struct AttentionBuffers {
    T *q_residual, *q, *index_q, *index_weights, *grouped;
};

template <class T>
inline T* window_row(const PtLayer& layer, const PtState& state, int64_t slot, int64_t position) {
    return (T*)state.window + (slot * state.window_cells + position % state.window_cells) * layer.head_dim;
}

// Everything that reads x: low-rank queries, the key-value vector into its cell, compressor inputs into theirs.
template <class T>
inline void project_inputs(const PtLayer& layer, const PtState& state, const PtTokens& tokens, const T* x,
                           bool only_kv, AttentionBuffers<T>& to) {
    const long count = tokens.count, hidden = layer.hidden;
    const long input_width = layer.head_dim * (layer.ratio == OVERLAP_RATIO ? 2 : 1);
    T** x_rows = row_pointers(PT_SCRATCH(T*, count), (T*)x, count, hidden);
    constexpr long MOST = 7;  // kv, wq_a, two inputs each of compressor and indexer, index weights
    T** y = PT_SCRATCH(T*, MOST * count);
    Product<T> products[MOST];
    long used = 0;
    auto add = [&](const Weights<T>& w, long width) {
        products[used] = {x_rows, y + used * count, w, count, hidden, width};
        used++;
    };
    for (long t = 0; t < count; t++) y[t] = window_row<T>(layer, state, tokens.slots[t], tokens.positions[t]);
    add(layer.wkv, layer.head_dim);
    if (!only_kv) {
        row_pointers(y + used * count, to.q_residual, count, layer.q_rank);
        add(layer.wq_a, layer.q_rank);
        auto add_inputs = [&](const PtCompressor& compressor, const PtPool& pool, long width) {
            for (int part = 0; part < 2; part++) {
                for (long t = 0; t < count; t++)
                    y[used * count + t] = input_row<T>(part ? pool.gate : pool.kv, pool, tokens.slots[t],
                                                       tokens.positions[t], width);
                add((const T*)(part ? compressor.wgate : compressor.wkv), width);
            }
        };
        if (layer.ratio) add_inputs(layer.compressor, state.pool, input_width);
        if (layer.index_heads) {
            add_inputs(layer.index_compressor, state.index_pool, 2 * layer.index_dim);
            row_pointers(y + used * count, to.index_weights, count, layer.index_heads);
            add((const T*)layer.index_weights, layer.index_heads);
        }
    }
    run(products, used, tokens.threads);
}

// Norms and rotations of the keys just written, and of the low-rank queries.
template <class T>
inline void finish_inputs(const PtLayer& layer, const PtState& state, const PtTokens& tokens, bool only_kv,
                          AttentionBuffers<T>& to) {
    const long group = 8;
    share((tokens.count + group - 1) / group, tokens.threads, [&](long task) {
        for (long t = task * group; t < std::min(tokens.count, task * group + group); t++) {
            const int64_t position = tokens.positions[t], angle = position * layer.rope_pairs;
            T* kv = window_row<T>(layer, state, tokens.slots[t], position);
            rms_norm(kv, kv, layer.kv_norm, layer.head_dim, layer.norm_eps);
            rotate(kv, layer.head_dim, tokens.cos + angle, tokens.sin + angle, layer.rope_pairs, 1.0f);
            if (only_kv) continue;
            T* q = to.q_residual + t * layer.q_rank;
            rms_norm(q, q, layer.q_norm, layer.q_rank, layer.norm_eps);
        }
    });
}

// Queries of all heads, and of the indexer, from the low-rank ones.
template <class T>
inline void project_queries(const PtLayer& layer, const PtTokens& tokens, AttentionBuffers<T>& to) {
    const long count = tokens.count, width = layer.heads * layer.head_dim;
    const long index_width = layer.index_heads * layer.index_dim;
    T** x_rows = row_pointers(PT_SCRATCH(T*, count), to.q_residual, count, layer.q_rank);
    T** q_rows = row_pointers(PT_SCRATCH(T*, count), to.q, count, width);
    T** index_rows = row_pointers(PT_SCRATCH(T*, count), to.index_q, count, index_width);
    Product<T> products[2] = {{x_rows, q_rows, layer.wq_b, count, layer.q_rank, width},
                              {x_rows, index_rows, layer.index_wq_b, count, layer.q_rank, index_width}};
    run(products, layer.index_heads ? 2 : 1, tokens.threads);
    const long group = 4;
    share((count + group - 1) / group, tokens.threads, [&](long task) {
        for (long t = task * group; t < std::min(count, task * group + group); t++) {
            const int64_t angle = tokens.positions[t] * layer.rope_pairs;
            const float *cos = tokens.cos + angle, *sin = tokens.sin + angle;
            for (long head = 0; head < layer.heads; head++) {
                T* q = to.q + t * width + head * layer.head_dim;
                rms_norm(q, q, nullptr, layer.head_dim, layer.norm_eps);
                rotate(q, layer.head_dim, cos, sin, layer.rope_pairs, 1.0f);
            }
            for (long head = 0; head < layer.index_heads; head++)
                rotate(to.index_q + t * index_width + head * layer.index_dim, layer.index_dim, cos, sin,
                       layer.rope_pairs, 1.0f);
        }
    });
}

// Pointers to the keys that a query sees, in the order in which it adds them; returns how many.
template <class T>
inline long list_keys(const PtLayer& layer, const PtState& state, int64_t slot, int64_t position,
                      const int64_t* chosen, const T** keys) {
    long count = 0;
    for (int64_t p = std::max<int64_t>(0, position - layer.window + 1); p <= position; p++)
        keys[count++] = window_row<T>(layer, state, slot, p);
    const long visible = layer.ratio ? (position + 1) / layer.ratio : 0;
    const long kept = chosen ? layer.index_top_k : visible;
    for (long i = 0; i < kept; i++)
        keys[count++] = entry_row<T>(state.pool, slot, chosen ? chosen[i] : i, layer.head_dim);
    return count;
}

// Unnormalised weights of R heads over keys [first, last): scores[r][j] = q[r] . key[j] * scale.
template <class T, int R>
inline void score_keys(const T* const* q, const T* const* keys, long first, long last, long dim, float scale,
                       float* const* scores) {
    long j = first;
    for (; j + 4 <= last; j += 4) {
        for (long next = j + 8; next < std::min(j + 12, last); next++) prefetch(keys[next], dim * sizeof(T));
        store_rows<R, 4>(scores, j, dots<T, R, 4>(q, keys + j, dim) * scale);
    }
    for (; j < last; j++) store_rows<R, 1>(scores, j, dots<T, R, 1>(q, keys + j, dim) * scale);
}

// Scores to weights, in place; the denominator starts from the sink. Returns it.
inline float softmax_sink(float* scores, long count, float sink) {
    v16 top = splat(sink);
    for (long i = 0; i < count; i += LANES) {
        v16 score = load(scores + i, count - i);
        if (count - i < LANES)  // a missing lane reads as 0, which may not become the maximum
            for (long lane = count - i; lane < LANES; lane++) score[lane] = sink;
        top = max16(score, top);
    }
    float highest = sink;
    for (long lane = 0; lane < LANES; lane++) highest = top[lane] > highest ? top[lane] : highest;
    v16 sum = {};
    for (long i = 0; i < count; i += LANES) {
        store(scores + i, exp16(load(scores + i, count - i) - highest), count - i);
        sum += load(scores + i, count - i);
    }
    return exp16(splat(sink - highest))[0] + sum_lanes(sum);
}

// out[r][c] = sum over keys, ascending, of weights[r][j] * key[j][c], over totals[r]. V vectors of channels at once.
template <int R, int V>
inline void add_channels(const float* const* weights, const float* const* keys, long count, long c, long channels,
                         const float* totals, float* const* out) {
    v16 sums[R][V] = {};
    for (long j = 0; j < count; j++) {
        v16 values[V];
        for (int i = 0; i < V; i++) values[i] = load(keys[j] + c + i * LANES, channels - i * LANES);
        for (int r = 0; r < R; r++)
            for (int i = 0; i < V; i++) sums[r][i] = fma16(splat(weights[r][j]), values[i], sums[r][i]);
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < V; i++) store(out[r] + c + i * LANES, sums[r][i] / totals[r], channels - i * LANES);
}

template <int R>
inline void add_values(const float* const* weights, const float* const* keys, long count, long dim,
                       const float* totals, float* const* out) {
    long c = 0;
    for (; c + 4 * LANES <= dim; c += 4 * LANES)
        add_channels<R, 4>(weights, keys, count, c, 4 * LANES, totals, out);
    for (; c < dim; c += LANES) add_channels<R, 1>(weights, keys, count, c, std::min(LANES, dim - c), totals, out);
}

// In bfloat16 two keys are added at once: weights are rounded as the keys are, and packed in pairs of keys.
template <int R, int V>
inline void add_channels(const uint32_t* const* pairs, const bf16* const* keys, long count, long c, long channels,
                         const float* totals, bf16* const* out) {
    v16 even[R][V] = {}, odd[R][V] = {};  // channels 8 g … 8 g + 3 and 8 g + 4 … 8 g + 7 of a chunk of 32
    for (long j = 0; j < count; j += 2) {
        for (int i = 0; i < V; i++) {
            const long left = channels - i * 32;
            Chunk<bf16> a = left >= 32 ? Chunk<bf16>::read(keys[j] + c + i * 32) : read_tail(keys[j] + c + i * 32, left);
            Chunk<bf16> b = {};
            if (j + 1 < count)
                b = left >= 32 ? Chunk<bf16>::read(keys[j + 1] + c + i * 32) : read_tail(keys[j + 1] + c + i * 32, left);
            Chunk<bf16> low, high;
            interleave(a, b, low, high);
            for (int r = 0; r < R; r++) {
                Chunk<bf16> weight = {u16x{} + pairs[r][j / 2]};
                even[r][i] = Chunk<bf16>::dot(even[r][i], low, weight);
                odd[r][i] = Chunk<bf16>::dot(odd[r][i], high, weight);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < V; i++) {
            v16 first, second;
            join_quads(even[r][i] / totals[r], odd[r][i] / totals[r], first, second);
            store(out[r] + c + i * 32, first, std::min(LANES, channels - i * 32));
            if (channels - i * 32 > LANES) store(out[r] + c + i * 32 + LANES, second, channels - i * 32 - LANES);
        }
}

template <int R>
inline void add_values(const float* const* weights, const bf16* const* keys, long count, long dim,
                       const float* totals, bf16* const* out) {
    const long num_pairs = (count + 1) / 2, stride = num_pairs + LANES;
    uint32_t* packed = PT_SCRATCH(uint32_t, R * stride);
    const uint32_t* pairs[R];
    for (int r = 0; r < R; r++) {
        bf16* own = (bf16*)(packed + r * stride);
        for (long j = 0; j < count; j += LANES) store(own + j, load(weights[r] + j, count - j));
        if (count % 2) own[count] = bf16{0};
        pairs[r] = packed + r * stride;
    }
    long c = 0;
    for (; c + 64 <= dim; c += 64) add_channels<R, 2>(pairs, keys, count, c, 64, totals, out);
    for (; c < dim; c += 32) add_channels<R, 1>(pairs, keys, count, c, std::min(32L, dim - c), totals, out);
}

// R heads of one query; the result replaces the query.
template <class T, int R>
inline void attend_heads(const PtLayer& layer, T* q, const float* sink, const T* const* keys, long count,
                         float* scores) {
    const long dim = layer.head_dim, stride = (count + LANES - 1) / LANES * LANES;
    T* rows[R];
    float *score_rows[R], totals[R];
    for (int r = 0; r < R; r++) rows[r] = q + r * dim, score_rows[r] = scores + r * stride;
    score_keys<T, R>(rows, keys, 0, count, dim, layer.attn_scale, score_rows);
    for (int r = 0; r < R; r++) totals[r] = softmax_sink(score_rows[r], count, sink[r]);
    add_values<R>(score_rows, keys, count, dim, totals, rows);
}

// One query: choose entries, attend with every head in place of its query, undo the values' rotation.
template <class T>
inline void attend_token(const PtLayer& layer, const PtState& state, const PtTokens& tokens, long token,
                         AttentionBuffers<T>& work) {
    const int64_t slot = tokens.slots[token], position = tokens.positions[token];
    const long dim = layer.head_dim, visible = layer.ratio ? (position + 1) / layer.ratio : 0;
    const int64_t* chosen = nullptr;
    if (layer.index_heads && visible > layer.index_top_k) {
        float* scores = PT_SCRATCH(float, visible);
        float* weights = PT_SCRATCH(float, layer.index_heads);
        const T* own = work.index_weights + token * layer.index_heads;
        for (long head = 0; head < layer.index_heads; head++)
            weights[head] = load(own + head, 1)[0] * float(layer.index_scale);
        index_scores(layer, state.index_pool, slot, 0, visible,
                     work.index_q + token * layer.index_heads * layer.index_dim, weights, scores);
        int64_t* kept = PT_SCRATCH(int64_t, layer.index_top_k);
        choose_entries(scores, visible, layer.index_top_k, kept);
        chosen = kept;
    }
    const T** keys = PT_SCRATCH(const T*, layer.window + visible + 1);
    const long count = list_keys(layer, state, slot, position, chosen, keys);
    float* scores = PT_SCRATCH(float, HEADS_PER_PASS * (count + LANES));
    const int64_t angle = position * layer.rope_pairs;
    for (long head = 0; head < layer.heads; head += HEADS_PER_PASS) {
        T* q = work.q + (token * layer.heads + head) * dim;
        const long heads = std::min(HEADS_PER_PASS, layer.heads - head);
        const float* sink = layer.sink + head;
        if (heads == 4) attend_heads<T, 4>(layer, q, sink, keys, count, scores);
        if (heads == 3) attend_heads<T, 3>(layer, q, sink, keys, count, scores);
        if (heads == 2) attend_heads<T, 2>(layer, q, sink, keys, count, scores);
        if (heads == 1) attend_heads<T, 1>(layer, q, sink, keys, count, scores);
        for (long i = 0; i < heads; i++)
            rotate(q + i * dim, dim, tokens.cos + angle, tokens.sin + angle, layer.rope_pairs, -1.0f);
    }
}

// Grouped low-rank output projection: heads [T, H * dim] to y [T, D].
template <class T>
inline void project_output(const PtLayer& layer, const PtTokens& tokens, AttentionBuffers<T>& work, T* y) {
    const long count = tokens.count, groups = layer.groups, rank = layer.o_rank;
    const long all = layer.heads * layer.head_dim, K = all / groups;
    Product<T>* products = PT_SCRATCH(Product<T>, groups);
    T** x_rows = PT_SCRATCH(T*, groups * count);
    T** y_rows = PT_SCRATCH(T*, groups * count);
    for (long group = 0; group < groups; group++) {
        row_pointers(x_rows + group * count, work.q + group * K, count, all);
        row_pointers(y_rows + group * count, work.grouped + group * rank, count, groups * rank);
        products[group] = {x_rows + group * count, y_rows + group * count,
                           Weights<T>(layer.wo_a).rows_from(group * rank), count, K, rank};
    }
    run(products, groups, tokens.threads);
    Product<T> last{row_pointers(PT_SCRATCH(T*, count), work.grouped, count, groups * rank),
                    row_pointers(PT_SCRATCH(T*, count), y, count, layer.hidden), layer.wo_b, count,
                    groups * rank, layer.hidden};
    run(&last, 1, tokens.threads);
}

// x [T, D], normalised, to y [T, D]; with only_kv just the tokens' keys are written.
template <class T>
inline void attention(const PtLayer& layer, const PtState& state, const PtTokens& tokens, const T* x, T* y,
                      bool only_kv) {
    const long count = tokens.count;
    AttentionBuffers<T> work;
    work.q_residual = PT_SCRATCH(T, count * layer.q_rank);
    work.q = PT_SCRATCH(T, count * layer.heads * layer.head_dim);
    work.index_q = PT_SCRATCH(T, count * layer.index_heads * layer.index_dim);
    work.index_weights = PT_SCRATCH(T, count * layer.index_heads);
    work.grouped = PT_SCRATCH(T, count * layer.groups * layer.o_rank);
    project_inputs(layer, state, tokens, x, only_kv, work);
    finish_inputs(layer, state, tokens, only_kv, work);
    if (only_kv) return;
    project_queries(layer, tokens, work);
    if (layer.ratio) pool_entries<T>(layer, layer.compressor, state.pool, tokens, layer.head_dim);
    if (layer.index_heads)
        pool_entries<T>(layer, layer.index_compressor, state.index_pool, tokens, layer.index_dim);
    share(count, tokens.threads, [&](long token) { attend_token(layer, state, tokens, token, work); });
    project_output(layer, tokens, work, y);
}

}  // namespace pt
