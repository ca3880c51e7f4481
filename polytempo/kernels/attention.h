// A block's attention: projections into the row state, then one softmax over [window ++ entries] with a sink.
// A query walks its own keys in ascending order, whichever chunk or batch it is in.
#pragma once

#include "entries.h"
#include "values.h"

namespace pt {

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
inline void project_inputs(const PtLayer& layer, const PtState& state, const PtTokens& tokens, const PtTokens& queries,
                           const T* x, AttentionBuffers<T>& to) {
    Timed timed(INPUTS);
    const long count = tokens.count, hidden = layer.hidden;
    const long input_width = layer.head_dim * (layer.ratio == OVERLAP_RATIO ? 2 : 1);
    T** x_rows = row_pointers(PT_SCRATCH(T*, count), (T*)x, count, hidden);
    constexpr long MOST = 7;  // kv, wq_a, two inputs each of compressor and indexer, index weights
    T** y = PT_SCRATCH(T*, MOST * count);
    Product<T> products[MOST];
    long used = 0;
    auto add = [&](const PtTokens& of, const Weights<T>& w, long width) {
        products[used] = {x_rows + (count - of.count), y + used * count, w, of.count, hidden, width};
        used++;
    };
    for (long t = 0; t < count; t++) y[t] = window_row<T>(layer, state, tokens.slots[t], tokens.positions[t]);
    add(tokens, layer.wkv, layer.head_dim);
    if (queries.count) {
        row_pointers(y + used * count, to.q_residual, queries.count, layer.q_rank);
        add(queries, layer.wq_a, layer.q_rank);
        auto add_inputs = [&](const PtCompressor& compressor, const PtPool& pool, long width) {
            for (int part = 0; part < 2; part++) {
                for (long t = 0; t < queries.count; t++)
                    y[used * count + t] = input_row<T>(part ? pool.gate : pool.kv, pool, queries.slots[t],
                                                       queries.positions[t], width);
                add(queries, (const T*)(part ? compressor.wgate : compressor.wkv), width);
            }
        };
        if (layer.ratio) add_inputs(layer.compressor, state.pool, input_width);
        if (layer.index_heads) {
            add_inputs(layer.index_compressor, state.index_pool, 2 * layer.index_dim);
            row_pointers(y + used * count, to.index_weights, queries.count, layer.index_heads);
            add(queries, (const T*)layer.index_weights, layer.index_heads);
        }
    }
    run(products, used, tokens.threads);
}

// Norms and rotations of the keys just written, and of the low-rank queries.
template <class T>
inline void finish_inputs(const PtLayer& layer, const PtState& state, const PtTokens& tokens, const PtTokens& queries,
                          AttentionBuffers<T>& to) {
    Timed timed(INPUTS);
    const long group = 8, first = tokens.count - queries.count;
    share((tokens.count + group - 1) / group, tokens.threads, [&](long task) {
        for (long t = task * group; t < std::min(tokens.count, task * group + group); t++) {
            const int64_t position = tokens.positions[t], angle = position * layer.rope_pairs;
            T* kv = window_row<T>(layer, state, tokens.slots[t], position);
            rms_norm(kv, kv, layer.kv_norm, layer.head_dim, layer.norm_eps);
            rotate(kv, layer.head_dim, tokens.cos + angle, tokens.sin + angle, layer.rope_pairs, 1.0f);
            if (t < first) continue;
            T* q = to.q_residual + (t - first) * layer.q_rank;
            rms_norm(q, q, layer.q_norm, layer.q_rank, layer.norm_eps);
        }
    });
}

// Queries of all heads, and of the indexer, from the low-rank ones.
template <class T>
inline void project_queries(const PtLayer& layer, const PtTokens& tokens, AttentionBuffers<T>& to) {
    Timed timed(QUERIES);
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

// scores[h][j] = q[h] . key[j] * scale, for every head and key: a key is read once for all heads.
template <class T>
inline void score_keys(const T* const* q, long heads, const T* const* keys, long count, long dim, float scale,
                       float* const* scores) {
    auto score = [&](auto columns, long j) __attribute__((always_inline)) {
        constexpr int C = decltype(columns)::value;
        long head = 0;
        for (; head + 4 <= heads; head += 4)
            store_rows<4, C>(scores + head, j, dots<T, 4, C>(q + head, keys + j, dim) * scale);
        for (; head < heads; head++)
            store_rows<1, C>(scores + head, j, dots<T, 1, C>(q + head, keys + j, dim) * scale);
    };
    long j = 0;
    for (; j + 4 <= count; j += 4) {
        for (long next = j + 8; next < std::min(j + 12, count); next++) prefetch(keys[next], dim * sizeof(T));
        score(std::integral_constant<int, 4>(), j);
    }
    for (; j < count; j++) score(std::integral_constant<int, 1>(), j);
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

// Some heads of one query; the result replaces the query.
template <class T>
inline void attend_heads(const PtLayer& layer, T* q, long heads, const float* sink, const T* const* keys, long count,
                         float* scores) {
    const long dim = layer.head_dim, stride = (count + LANES - 1) / LANES * LANES;
    T* rows[HEADS_PER_PASS];
    float *score_rows[HEADS_PER_PASS], totals[HEADS_PER_PASS];
    for (long r = 0; r < heads; r++) rows[r] = q + r * dim, score_rows[r] = scores + r * stride;
    score_keys<T>(rows, heads, keys, count, dim, layer.attn_scale, score_rows);
    for (long r = 0; r < heads; r++) totals[r] = softmax_sink(score_rows[r], count, sink[r]);
    add_values(score_rows, heads, keys, count, dim, totals, rows);
}

// What the indexer keeps of a query's visible entries, ascending ids [index_top_k]; by up to `threads` threads.
template <class T>
inline void choose_for(const PtLayer& layer, const PtState& state, const PtTokens& tokens, long token, int64_t threads,
                       const AttentionBuffers<T>& work, int64_t* chosen) {
    const long visible = (tokens.positions[token] + 1) / layer.ratio, stretch = ENTRY_BLOCK;
    float* scores = PT_SCRATCH(float, visible);
    float* weights = PT_SCRATCH(float, layer.index_heads);
    const T* own = work.index_weights + token * layer.index_heads;
    for (long head = 0; head < layer.index_heads; head++)
        weights[head] = load(own + head, 1)[0] * float(layer.index_scale);
    share((visible + stretch - 1) / stretch, threads, [&](long task) {
        index_scores(layer, state.index_pool, tokens.slots[token], task * stretch,
                     std::min(visible, task * stretch + stretch),
                     work.index_q + token * layer.index_heads * layer.index_dim, weights, scores);
    });
    choose_entries(scores, visible, layer.index_top_k, chosen);
}

// One query: `heads` heads from `first` on, in place of the query's own; then their values' rotation is undone.
template <class T>
inline void attend_token(const PtLayer& layer, const PtState& state, const PtTokens& tokens, long token, long first,
                         long heads, const int64_t* chosen, AttentionBuffers<T>& work) {
    const int64_t slot = tokens.slots[token], position = tokens.positions[token];
    const long dim = layer.head_dim, visible = layer.ratio ? (position + 1) / layer.ratio : 0;
    const T** keys = PT_SCRATCH(const T*, layer.window + visible + 1);
    const long count = list_keys(layer, state, slot, position, chosen, keys);
    float* scores = PT_SCRATCH(float, HEADS_PER_PASS * (count + LANES));
    const int64_t angle = position * layer.rope_pairs;
    for (long head = first; head < first + heads; head += HEADS_PER_PASS) {
        T* q = work.q + (token * layer.heads + head) * dim;
        const long pass = std::min(HEADS_PER_PASS, first + heads - head);
        attend_heads<T>(layer, q, pass, layer.sink + head, keys, count, scores);
        for (long i = 0; i < pass; i++)
            rotate(q + i * dim, dim, tokens.cos + angle, tokens.sin + angle, layer.rope_pairs, -1.0f);
    }
}

// A query is one thread's, unless queries are few: then threads share its entries, and its heads.
template <class T>
inline void attend(const PtLayer& layer, const PtState& state, const PtTokens& tokens, AttentionBuffers<T>& work) {
    Timed timed(ATTENTION);
    const long count = tokens.count, threads = tokens.threads, top_k = layer.index_top_k;
    const bool is_few = threads > 1 && count < 2 * threads;
    auto has_choice = [&](long token) {
        return layer.index_heads && (tokens.positions[token] + 1) / layer.ratio > top_k;
    };
    int64_t* all_chosen = PT_SCRATCH(int64_t, is_few && layer.index_heads ? count * top_k : 0);
    for (long token = 0; is_few && token < count; token++)
        if (has_choice(token)) choose_for(layer, state, tokens, token, threads, work, all_chosen + token * top_k);
    const long quads = std::max(1L, layer.heads / threads / 4);
    const long heads = is_few ? std::min(HEADS_PER_PASS, 4 * quads) : layer.heads;
    const long parts = (layer.heads + heads - 1) / heads;
    share(count * parts, threads, [&](long task) {
        const long token = task / parts, first = task % parts * heads;
        int64_t* chosen = nullptr;
        if (has_choice(token)) {
            chosen = is_few ? all_chosen + token * top_k : PT_SCRATCH(int64_t, top_k);
            if (!is_few) choose_for(layer, state, tokens, token, 1, work, chosen);
        }
        attend_token(layer, state, tokens, token, first, std::min(heads, layer.heads - first), chosen, work);
    });
}

// Grouped low-rank output projection: heads [T, H * dim] to y [T, D].
template <class T>
inline void project_output(const PtLayer& layer, const PtTokens& tokens, AttentionBuffers<T>& work, T* y) {
    Timed timed(OUTPUT);
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

// x [T, D], normalised, to y [Q, D] for the queries, the last Q of the tokens; of those before, only keys are written,
// which is all that a layer without a compressor keeps of a token.
template <class T>
inline void attention(const PtLayer& layer, const PtState& state, const PtTokens& tokens, const PtTokens& queries,
                      const T* x, T* y) {
    const long count = queries.count;
    AttentionBuffers<T> work;
    work.q_residual = PT_SCRATCH(T, count * layer.q_rank);
    work.q = PT_SCRATCH(T, count * layer.heads * layer.head_dim);
    work.index_q = PT_SCRATCH(T, count * layer.index_heads * layer.index_dim);
    work.index_weights = PT_SCRATCH(T, count * layer.index_heads);
    work.grouped = PT_SCRATCH(T, count * layer.groups * layer.o_rank);
    project_inputs(layer, state, tokens, queries, x, work);
    finish_inputs(layer, state, tokens, queries, work);
    if (!count) return;
    project_queries(layer, queries, work);
    if (layer.ratio) pool_entries<T>(layer, layer.compressor, state.pool, queries, layer.head_dim);
    if (layer.index_heads)
        pool_entries<T>(layer, layer.index_compressor, state.index_pool, queries, layer.index_dim);
    attend(layer, state, queries, work);
    project_output(layer, queries, work, y);
}

}  // namespace pt
