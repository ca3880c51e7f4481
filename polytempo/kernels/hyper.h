// Manifold-constrained hyper-connections: what a site reads from the residual streams, and what it writes back.
#pragma once

#include "linear.h"

namespace pt {

constexpr long MAX_HC = 8;

// Mixing logits of up to 16 tokens, transposed: mixes[row of fn] holds one token per lane.
template <class T>
inline void mix(const T* streams, const float* fn, long tokens, long width, long rows, float eps, int64_t threads,
                v16* mixes) {
    float* normed = PT_SCRATCH(float, LANES * width);
    const float* x[LANES];
    for (long token = 0; token < tokens; token++) {
        x[token] = normed + token * width;
        rms_norm(streams + token * width, normed + token * width, nullptr, width, eps);
    }
    share((rows + 3) / 4, threads, [&](long quad) {
        const long row = 4 * quad, count = std::min(4L, rows - row);
        for (long i = 0; i < count; i++) mixes[row + i] = v16{};
        const float* w[4];
        for (long i = 0; i < 4; i++) w[i] = fn + (row + std::min(i, count - 1)) * width;
        for (long token = 0; token < tokens;) {
            if (token + 4 <= tokens) {
                v16 out = dots<float, 4, 4>(x + token, w, width);
                for (long i = 0; i < count; i++)
                    for (long t = 0; t < 4; t++) mixes[row + i][token + t] = out[4 * t + i];
                token += 4;
            } else {
                v16 out = dots<float, 1, 4>(x + token, w, width);
                for (long i = 0; i < count; i++) mixes[row + i][token] = out[i];
                token++;
            }
        }
    });
}

// comb[j * hc + k]: how much of old stream j enters new stream k, per lane.
inline void sinkhorn(v16* comb, long hc, long iterations, float eps) {
    for (long pass = 0; pass < 2 * iterations - 1; pass++) {
        // Columns first: sums over j for even passes, over k for odd ones.
        long outer = pass % 2 ? hc : 1, inner = pass % 2 ? 1 : hc;
        for (long i = 0; i < hc; i++) {
            v16 sum = comb[i * outer];
            for (long j = 1; j < hc; j++) sum += comb[i * outer + j * inner];
            sum = 1.0f / (sum + eps);
            for (long j = 0; j < hc; j++) comb[i * outer + j * inner] *= sum;
        }
    }
}

// Sum of a token's streams, weighted by lane `lane` of pre, rounded to T as the streams are.
template <class T>
inline void collapse(const T* streams, const v16* pre, long lane, long hc, long hidden, T* to) {
    for (long i = 0; i < hidden; i += LANES) {
        v16 total = load(streams + i, hidden - i) * pre[0][lane];
        for (long k = 1; k < hc; k++) total += load(streams + k * hidden + i, hidden - i) * pre[k][lane];
        store(to + i, total, hidden - i);
    }
}

// Up to 16 tokens of one site: x = norm(collapse), and the weights post [hc] and comb [hc, hc] of each.
template <class T>
inline void site_tokens(const PtLayer& layer, const PtSite& site, const T* streams, long tokens, int64_t threads, T* x,
                        float* post, float* comb) {
    const long hc = layer.hc, hidden = layer.hidden;
    const float eps = layer.hc_eps;
    v16 mixes[MAX_HC * (MAX_HC + 2)];
    mix(streams, site.fn, tokens, hc * hidden, (2 + hc) * hc, layer.norm_eps, threads, mixes);
    v16 *into = mixes, *out = mixes + hc, *across = mixes + 2 * hc;
    for (long k = 0; k < hc; k++) {
        into[k] = sigmoid16(into[k] * site.scale[0] + site.base[k]) + eps;
        out[k] = 2.0f * sigmoid16(out[k] * site.scale[1] + site.base[hc + k]);
    }
    for (long j = 0; j < hc; j++) {
        v16* row = across + j * hc;
        for (long k = 0; k < hc; k++) row[k] = row[k] * site.scale[2] + site.base[2 * hc + j * hc + k];
        v16 highest = row[0];
        for (long k = 1; k < hc; k++) highest = max16(highest, row[k]);
        for (long k = 0; k < hc; k++) row[k] = exp16(row[k] - highest);
        v16 sum = row[0];
        for (long k = 1; k < hc; k++) sum += row[k];
        for (long k = 0; k < hc; k++) row[k] = row[k] / sum + eps;
    }
    sinkhorn(across, hc, layer.sinkhorn_iterations, eps);
    for (long token = 0; token < tokens; token++) {
        for (long k = 0; k < hc; k++) post[token * hc + k] = out[k][token];
        for (long k = 0; k < hc * hc; k++) comb[token * hc * hc + k] = across[k][token];
        collapse(streams + token * hc * hidden, into, token, hc, hidden, x + token * hidden);
        rms_norm(x + token * hidden, x + token * hidden, site.norm, hidden, layer.norm_eps);
    }
}

// Tokens per task: lanes are full only where there are enough tokens for every thread.
inline long site_group(long tokens, int64_t threads) { return tokens >= LANES * threads ? LANES : 4; }

template <class T>
inline void read_site(const PtLayer& layer, const PtSite& site, const PtTokens& tokens, const T* streams, T* x,
                      float* post, float* comb) {
    Timed timed(MHC);
    const long group = site_group(tokens.count, tokens.threads), hc = layer.hc, hidden = layer.hidden;
    const int64_t inner = tokens.count <= group ? tokens.threads : 1;  // one group: its threads share the projection
    share((tokens.count + group - 1) / group, tokens.threads, [&](long task) {
        long first = task * group, count = std::min(group, tokens.count - first);
        site_tokens(layer, site, streams + first * hc * hidden, count, inner, x + first * hidden, post + first * hc,
                    comb + first * hc * hc);
    });
}

// new[k] = post[k] * output + sum over j of comb[j, k] * old[j]; `to` may not be `streams`.
template <class T>
inline void expand(const PtLayer& layer, const PtTokens& tokens, const T* streams, const T* output, const float* post,
                   const float* comb, T* to) {
    Timed timed(MHC);
    const long hc = layer.hc, hidden = layer.hidden, group = 8;
    share((tokens.count + group - 1) / group, tokens.threads, [&](long task) {
        for (long token = task * group; token < std::min(tokens.count, task * group + group); token++) {
            const T *old = streams + token * hc * hidden, *y = output + token * hidden;
            T* fresh = to + token * hc * hidden;
            const float *p = post + token * hc, *c = comb + token * hc * hc;
            for (long i = 0; i < hidden; i += LANES) {
                v16 value = load(y + i, hidden - i), streams16[MAX_HC];
                for (long j = 0; j < hc; j++) streams16[j] = load(old + j * hidden + i, hidden - i);
                for (long k = 0; k < hc; k++) {
                    v16 total = value * p[k];
                    for (long j = 0; j < hc; j++) total += streams16[j] * c[j * hc + k];
                    store(fresh + k * hidden + i, total, hidden - i);
                }
            }
        }
    });
}

// The head's site: sigma(.) + eps without the factor 2, collapse, then the final norm.
template <class T>
inline void read_head(const PtLayer& layer, const PtSite& site, const PtTokens& tokens, const T* streams, T* x) {
    Timed timed(HEAD);
    const long group = site_group(tokens.count, tokens.threads), hc = layer.hc, hidden = layer.hidden;
    share((tokens.count + group - 1) / group, tokens.threads, [&](long task) {
        long first = task * group, count = std::min(group, tokens.count - first);
        const T* own = streams + first * hc * hidden;
        v16 pre[MAX_HC];
        mix(own, site.fn, count, hc * hidden, hc, layer.norm_eps, 1, pre);  // one or two quads: nothing to share
        for (long k = 0; k < hc; k++) pre[k] = sigmoid16(pre[k] * site.scale[0] + site.base[k]) + float(layer.hc_eps);
        for (long token = 0; token < count; token++) {
            T* to = x + (first + token) * hidden;
            collapse(own + token * hc * hidden, pre, token, hc, hidden, to);
            rms_norm(to, to, site.norm, hidden, layer.norm_eps);
        }
    });
}

}  // namespace pt
