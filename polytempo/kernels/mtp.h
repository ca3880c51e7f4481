// What an MTP block reads: streams of a position and the embedding of the token behind it.
#pragma once

#include "linear.h"

namespace pt {

// to [T, hc, D] = h_proj(hnorm(streams)) + e_proj(enorm(embedding of the token)), each rounded as the twin rounds it.
// source: which of the streams is each token's, null for all in order.
template <class T>
inline void combine(const PtLayer& layer, const PtMtp& mtp, const PtTokens& tokens, const T* streams,
                    const int64_t* source, T* to) {
    Timed timed(COMBINE);
    const long count = tokens.count, hc = layer.hc, hidden = layer.hidden, group = 4;
    T* normed = PT_SCRATCH(T, count * hc * hidden);
    T* next = PT_SCRATCH(T, count * hidden);
    T* added = PT_SCRATCH(T, count * hidden);
    share((count + group - 1) / group, tokens.threads, [&](long task) {
        for (long token = task * group; token < std::min(count, task * group + group); token++) {
            const T* own = streams + (source ? source[token] : token) * hc * hidden;
            for (long k = 0; k < hc; k++)
                rms_norm(own + k * hidden, normed + (token * hc + k) * hidden, mtp.hnorm, hidden, layer.norm_eps);
            rms_norm((const T*)mtp.embed + tokens.ids[token] * hidden, next + token * hidden, mtp.enorm, hidden,
                     layer.norm_eps);
        }
    });
    const Product<T> products[2] = {
        {row_pointers(PT_SCRATCH(T*, count * hc), normed, count * hc, hidden),
         row_pointers(PT_SCRATCH(T*, count * hc), to, count * hc, hidden), mtp.h_proj, count * hc, hidden, hidden},
        {row_pointers(PT_SCRATCH(T*, count), next, count, hidden),
         row_pointers(PT_SCRATCH(T*, count), added, count, hidden), mtp.e_proj, count, hidden, hidden}};
    run(products, 2, tokens.threads);
    share((count + group - 1) / group, tokens.threads, [&](long task) {
        for (long token = task * group; token < std::min(count, task * group + group); token++)
            for (long row = token * hc; row < (token + 1) * hc; row++)
                for (long i = 0; i < hidden; i += LANES) {
                    T* own = to + row * hidden + i;
                    store(own, load(own, hidden - i) + load(added + token * hidden + i, hidden - i), hidden - i);
                }
    });
}

}  // namespace pt
