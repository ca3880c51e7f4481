// Mixture of experts: route, run each chosen expert over its own tokens, add a token's experts in its own order.
#pragma once

#include "linear.h"

namespace pt {

constexpr long ROWS_PER_EXPERT_TASK = 32;

// Scores sqrt(softplus(logit)), in place.
inline void router_scores(float* logits, long count) {
    for (long i = 0; i < count; i += LANES) {
        v16 x = load(logits + i, count - i), negative = select(x < 0.0f, x, -x);
        v16 positive = select(x < 0.0f, v16{}, x);
        store(logits + i, root(positive + log1p16(exp16(negative))), count - i);
    }
}

// The top_k highest of scores + bias, highest first; of equals the lowest expert, NaN above all numbers.
inline void choose_experts(const float* scores, const float* bias, long experts, long top_k, int64_t* chosen) {
    for (long place = 0; place < top_k; place++) {
        long best = -1;
        float highest = 0.0f;
        for (long expert = 0; expert < experts; expert++) {
            float score = scores[expert] + bias[expert];
            if (best >= 0 && !(score > highest || (score != score && highest == highest))) continue;
            bool taken = false;
            for (long i = 0; i < place; i++) taken |= chosen[i] == expert;
            if (!taken) best = expert, highest = score;
        }
        chosen[place] = best;
    }
}

// Experts and weights of every token: ids [T, top_k], weights [T, top_k], which sum to the routed scale.
template <class T>
inline void route(const PtLayer& layer, const PtTokens& tokens, const T* x, int64_t* ids, float* weights) {
    Timed timed(ROUTER);
    const long count = tokens.count, hidden = layer.hidden, experts = layer.experts, top_k = layer.top_k;
    float* wide = PT_SCRATCH(float, count * hidden);
    float* logits = PT_SCRATCH(float, count * experts);
    for (long i = 0; i < count * hidden; i += LANES)
        store(wide + i, load(x + i, count * hidden - i), count * hidden - i);
    float** x_rows = row_pointers(PT_SCRATCH(float*, count), wide, count, hidden);
    float** y_rows = row_pointers(PT_SCRATCH(float*, count), logits, count, experts);
    Product<float> product{x_rows, y_rows, layer.gate_weight, count, hidden, experts};
    run(&product, 1, tokens.threads);
    const long group = 8;
    share((count + group - 1) / group, tokens.threads, [&](long task) {
        for (long token = task * group; token < std::min(count, task * group + group); token++) {
            float* scores = logits + token * experts;
            int64_t* chosen = ids + token * top_k;
            router_scores(scores, experts);
            if (layer.gate_table)
                memcpy(chosen, layer.gate_table + tokens.ids[token] * top_k, top_k * sizeof *chosen);
            else
                choose_experts(scores, layer.gate_bias, experts, top_k, chosen);
            float total = 0.0f, *own = weights + token * top_k;
            for (long i = 0; i < top_k; i++) total += scores[chosen[i]];
            total += 1e-20f;  // transformers' guard against a token whose scores are all 0
            for (long i = 0; i < top_k; i++) own[i] = scores[chosen[i]] / total * float(layer.route_scale);
        }
    });
}

// to = silu(gate) * up in float32, gate clamped above, up on both sides.
template <class T>
inline void swiglu(const float* gate, const float* up, long n, float limit, T* to) {
    const v16 high = splat(limit), low = splat(-limit);
    for (long i = 0; i < n; i += LANES) {
        v16 g = load(gate + i, n - i), u = load(up + i, n - i);
        g = select(g > high, high, g);
        u = select(u > high, high, u);
        u = select(u < low, low, u);
        store(to + i, g * sigmoid16(g) * u, n - i);
    }
}

struct ExpertTask {
    long expert, first, rows;  // expert == layer.experts: the shared one, over tokens first …
};

// Sort (token, choice) pairs by expert, stably; returns the number of tasks, the shared expert's first.
inline long plan_experts(const PtLayer& layer, long count, const int64_t* ids, long* order, ExpertTask* tasks) {
    const long experts = layer.experts, pairs = count * layer.top_k;
    long* place = PT_SCRATCH(long, experts + 1);
    for (long expert = 0; expert <= experts; expert++) place[expert] = 0;
    for (long pair = 0; pair < pairs; pair++) place[ids[pair] + 1]++;
    long num_tasks = 0, start = 0;
    for (long first = 0; first < count; first += ROWS_PER_EXPERT_TASK)
        tasks[num_tasks++] = {experts, first, std::min(ROWS_PER_EXPERT_TASK, count - first)};
    for (long expert = 0; expert < experts; expert++) {
        long end = start + place[expert + 1];
        for (long first = start; first < end; first += ROWS_PER_EXPERT_TASK)
            tasks[num_tasks++] = {expert, first, std::min(ROWS_PER_EXPERT_TASK, end - first)};
        place[expert + 1] = end;
        start = end;
    }
    for (long pair = 0; pair < pairs; pair++) order[place[ids[pair]]++] = pair;
    return num_tasks;
}

// What an expert task reads and writes: rows by pointer, and the expert's matrices.
template <class T>
struct ExpertRows {
    const T* x[ROWS_PER_EXPERT_TASK];
    T* middle[ROWS_PER_EXPERT_TASK];
    float* y[ROWS_PER_EXPERT_TASK];
    Weights<T> w1, w3, w2;
    long rows, inner;

    // Of the inner channels [first, last): middle[r] = swiglu(w1 x[r], w3 x[r]).
    void activate(const PtLayer& layer, long first, long last) const {
        const long width = last - first;
        float* gate = PT_SCRATCH(float, ROWS_PER_EXPERT_TASK * width);
        float* up = PT_SCRATCH(float, ROWS_PER_EXPERT_TASK * width);
        float *gate_rows[ROWS_PER_EXPERT_TASK], *up_rows[ROWS_PER_EXPERT_TASK];
        row_pointers(gate_rows, gate, rows, width);
        row_pointers(up_rows, up, rows, width);
        Product<T, float>{x, gate_rows, w1.rows_from(first), rows, layer.hidden, width}.run_serial();
        Product<T, float>{x, up_rows, w3.rows_from(first), rows, layer.hidden, width}.run_serial();
        for (long row = 0; row < rows; row++)
            swiglu(gate_rows[row], up_rows[row], width, layer.swiglu_limit, middle[row] + first);
    }

    // Of the hidden channels [first, last): y[r] = w2 middle[r], float32.
    void project(long hidden, long first, long last) const {
        Product<T, float>{middle, y, w2, rows, inner, hidden}.columns(0, rows, first, last);
    }
};

// y [T, D] = routed experts in each token's own order, then the shared expert.
template <class T>
inline void moe(const PtLayer& layer, const PtTokens& tokens, const T* x, T* y) {
    const long count = tokens.count, hidden = layer.hidden, top_k = layer.top_k, pairs = count * top_k;
    if (!count) return;
    int64_t* ids = PT_SCRATCH(int64_t, pairs);
    float* weights = PT_SCRATCH(float, pairs);
    route(layer, tokens, x, ids, weights);
    Timed timed(EXPERTS);
    long* order = PT_SCRATCH(long, pairs);
    const long most = pairs / ROWS_PER_EXPERT_TASK + layer.experts + count / ROWS_PER_EXPERT_TASK + 2;
    ExpertTask* tasks = PT_SCRATCH(ExpertTask, most);
    const long num_tasks = plan_experts(layer, count, ids, order, tasks);
    // By (token, choice), then the shared expert's by token.
    const long middle_width = std::max(layer.inner, layer.shared_inner);
    T* middle = PT_SCRATCH(T, (pairs + count) * middle_width);
    float* outputs = PT_SCRATCH(float, (pairs + count) * hidden);
    auto rows_of = [&](const ExpertTask& task) {
        const bool is_shared = task.expert == layer.experts;
        ExpertRows<T> own;
        own.rows = task.rows, own.inner = is_shared ? layer.shared_inner : layer.inner;
        for (long i = 0; i < task.rows; i++) {
            long pair = is_shared ? pairs + task.first + i : order[task.first + i];
            own.x[i] = x + (is_shared ? task.first + i : pair / top_k) * hidden;
            own.middle[i] = middle + pair * middle_width;
            own.y[i] = outputs + pair * hidden;
        }
        if (is_shared) {
            own.w1 = layer.shared_w1, own.w3 = layer.shared_w3, own.w2 = layer.shared_w2;
        } else {
            const Weights<T> w13(layer.w13), w2(layer.w2);  // w13: gate and up of every expert in turn
            own.w1 = w13.part(2 * task.expert, layer.inner, hidden);
            own.w3 = w13.part(2 * task.expert + 1, layer.inner, hidden);
            own.w2 = w2.part(task.expert, hidden, layer.inner);
        }
        return own;
    };
    // Few experts are cut into parts, so that no thread is left with one while the others have nothing.
    const long parts = tokens.threads > 1 ? tokens.threads * TASKS_PER_THREAD / num_tasks + 1 : 1;
    auto share_parts = [&](auto width_of, auto run_part) {
        share(num_tasks * parts, tokens.threads, [&](long index) {
            const ExpertRows<T> own = rows_of(tasks[index / parts]);
            const long width = width_of(own);
            const long stretch = (width + 8 * parts - 1) / (8 * parts) * 8, first = index % parts * stretch;
            if (first < width) run_part(own, first, std::min(width, first + stretch));
        });
    };
    share_parts([&](const ExpertRows<T>& own) { return own.inner; },
                [&](const ExpertRows<T>& own, long first, long last) { own.activate(layer, first, last); });
    share_parts([&](const ExpertRows<T>&) { return hidden; },
                [&](const ExpertRows<T>& own, long first, long last) { own.project(hidden, first, last); });
    const long group = 8;
    share((count + group - 1) / group, tokens.threads, [&](long task) {
        for (long token = task * group; token < std::min(count, task * group + group); token++) {
            const float *own = outputs + token * top_k * hidden, *shared = outputs + (pairs + token) * hidden;
            for (long i = 0; i < hidden; i += LANES) {
                v16 total = {};
                for (long k = 0; k < top_k; k++)
                    total += load(own + k * hidden + i, hidden - i) * weights[token * top_k + k];
                store(y + token * hidden + i, total + load(shared + i, hidden - i), hidden - i);
            }
        }
    });
}

}  // namespace pt
