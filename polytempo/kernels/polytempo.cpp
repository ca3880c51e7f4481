// The C interface. Callers check shapes, dtypes and contiguity (model/native.py, kernels/ops.py); pointers are trusted.

#include "attention.h"
#include "greedy.h"
#include "hyper.h"
#include "moe.h"
#include "mtp.h"
#include "noise.h"
#include "streams.h"

#define PT_EXPORT extern "C" __attribute__((visibility("default")))

namespace pt {

template <class T>
struct SiteBuffers {
    T *x, *y, *middle;
    float *post, *comb;
};

template <class T>
SiteBuffers<T> site_buffers(const PtLayer& layer, long count) {
    const long hc = layer.hc;
    return {PT_SCRATCH(T, count * layer.hidden), PT_SCRATCH(T, count * layer.hidden),
            PT_SCRATCH(T, count * hc * layer.hidden), PT_SCRATCH(float, count * hc),
            PT_SCRATCH(float, count * hc * hc)};
}

// A block over streams [T, hc, D], to those of the last Q tokens, the queries; of the others it writes the keys alone.
template <class T>
void block(const PtLayer& layer, const PtState& state, const PtTokens& tokens, const PtTokens& queries,
           const T* streams, T* to) {
    SiteBuffers<T> work = site_buffers<T>(layer, tokens.count);
    read_site(layer, layer.attn_site, tokens, streams, work.x, work.post, work.comb);
    attention(layer, state, tokens, queries, work.x, work.y);
    if (!queries.count) return;
    const long hc = layer.hc, first = tokens.count - queries.count;
    expand(layer, queries, streams + first * hc * layer.hidden, work.y, work.post + first * hc,
           work.comb + first * hc * hc, work.middle);
    read_site(layer, layer.ffn_site, queries, work.middle, work.x, work.post, work.comb);
    moe(layer, queries, work.x, work.y);
    expand(layer, queries, work.middle, work.y, work.post, work.comb, to);
}

// The first token whose id has no embedding, or -1.
inline int64_t find_unknown(const PtTokens& tokens, long vocab) {
    for (long token = 0; token < tokens.count; token++)
        if (tokens.ids[token] < 0 || tokens.ids[token] >= vocab) return token;
    return -1;
}

inline PtTokens with_angles(PtTokens tokens, const PtAngles& angles) {
    tokens.cos = angles.cos, tokens.sin = angles.sin;
    return tokens;
}

template <class T>
void target(const PtLayer* layers, const PtState* states, const PtAngles* angles, long num_layers,
            const PtTokens& tokens, const T* embed, T* to, T* kept, long window) {
    const long hc = layers->hc, hidden = layers->hidden, group = 32;
    T* other = PT_SCRATCH(T, tokens.count * hc * hidden);
    T *streams = num_layers % 2 ? other : to, *next = num_layers % 2 ? to : other;
    share((tokens.count + group - 1) / group, tokens.threads, [&](long task) {
        for (long token = task * group; token < std::min(tokens.count, task * group + group); token++)
            for (long k = 0; k < hc; k++)
                memcpy(streams + (token * hc + k) * hidden, embed + tokens.ids[token] * hidden, hidden * sizeof(T));
    });
    for (long i = 0; i < num_layers; i++) {
        const PtTokens own = with_angles(tokens, angles[i]);
        block(layers[i], states[i], own, own, streams, next);
        std::swap(streams, next);
    }
    if (kept) keep_streams(tokens, to, kept, window, hc * hidden);
}

// source: which of the streams belong to which token, null for all in order.
template <class T>
void mtp_block(const PtLayer& layer, const PtMtp& mtp, const PtState& state, const PtTokens& tokens, long num_queries,
               const T* streams, const int64_t* source, T* to) {
    PtTokens queries = tokens;
    const long first = tokens.count - num_queries;
    queries.count = num_queries, queries.ids += first, queries.slots += first, queries.positions += first;
    T* inputs = PT_SCRATCH(T, tokens.count * layer.hc * layer.hidden);
    combine(layer, mtp, tokens, streams, source, inputs);
    block(layer, state, tokens, queries, inputs, to);
}

template <class T>
void linear(const T* x, const Weights<T>& w, T* y, long rows, long K, long N, int64_t threads) {
    Timed timed(LINEAR);
    Product<T> product{row_pointers(PT_SCRATCH(T*, rows), (T*)x, rows, K),
                       row_pointers(PT_SCRATCH(T*, rows), y, rows, N), w, rows, K, N};
    run(&product, 1, threads);
}

template <class T>
void logits(const PtLayer& layer, const PtHead& head, const PtTokens& tokens, const T* streams, T* to) {
    T* x = PT_SCRATCH(T, tokens.count * layer.hidden);
    read_head(layer, head.site, tokens, streams, x);
    linear(x, Weights<T>((const T*)head.weight), to, tokens.count, layer.hidden, head.vocab, tokens.threads);
}

}  // namespace pt

#define PT_DISPATCH(call_bf16, call_float) \
    if (tokens->is_bf16)                   \
        call_bf16;                         \
    else                                   \
        call_float

using pt::bf16;

// Tokens through all layers, writing their state, to last-layer streams [T, hc, D]; these go to kept [slots, window, hc,
// D] too, if it is not null. Returns the first token whose id has no embedding, before anything is written; -1 if there
// is none.
PT_EXPORT int64_t pt_target(const PtLayer* layers, const PtState* states, const PtAngles* angles, int64_t num_layers,
                            const PtTokens* tokens, const void* embed, int64_t vocab, void* to, void* kept,
                            int64_t window) {
    const int64_t unknown = pt::find_unknown(*tokens, vocab);
    if (unknown >= 0) return unknown;
    PT_DISPATCH(
        pt::target(layers, states, angles, num_layers, *tokens, (const bf16*)embed, (bf16*)to, (bf16*)kept, window),
        pt::target(layers, states, angles, num_layers, *tokens, (const float*)embed, (float*)to, (float*)kept, window));
    return -1;
}

// The MTP block over streams of positions and the tokens behind them: writes the keys of all tokens, and for the last
// num_queries the streams [Q, hc, D] of the next position. Returns as pt_target.
PT_EXPORT int64_t pt_mtp(const PtLayer* layer, const PtMtp* mtp, const PtState* state, const PtAngles* angles,
                         const PtTokens* tokens, int64_t num_queries, int64_t vocab, const void* streams,
                         const int64_t* source, void* to) {
    const int64_t unknown = pt::find_unknown(*tokens, vocab);
    if (unknown >= 0) return unknown;
    const PtTokens own = pt::with_angles(*tokens, *angles);
    PT_DISPATCH(
        pt::mtp_block(*layer, *mtp, *state, own, num_queries, (const bf16*)streams, source, (bf16*)to),
        pt::mtp_block(*layer, *mtp, *state, own, num_queries, (const float*)streams, source, (float*)to));
    return -1;
}

// x [T, D], normalised, to y [T, D] through attention alone.
PT_EXPORT void pt_attention(const PtLayer* layer, const PtState* state, const PtTokens* tokens, const void* x,
                            void* y) {
    PT_DISPATCH(pt::attention(*layer, *state, *tokens, *tokens, (const bf16*)x, (bf16*)y),
                pt::attention(*layer, *state, *tokens, *tokens, (const float*)x, (float*)y));
}

PT_EXPORT void pt_site(const PtLayer* layer, const PtSite* site, const PtTokens* tokens, const void* streams, void* x,
                       float* post, float* comb) {
    PT_DISPATCH(pt::read_site(*layer, *site, *tokens, (const bf16*)streams, (bf16*)x, post, comb),
                pt::read_site(*layer, *site, *tokens, (const float*)streams, (float*)x, post, comb));
}

PT_EXPORT void pt_expand(const PtLayer* layer, const PtTokens* tokens, const void* streams, const void* y,
                         const float* post, const float* comb, void* to) {
    PT_DISPATCH(pt::expand(*layer, *tokens, (const bf16*)streams, (const bf16*)y, post, comb, (bf16*)to),
                pt::expand(*layer, *tokens, (const float*)streams, (const float*)y, post, comb, (float*)to));
}

PT_EXPORT void pt_moe(const PtLayer* layer, const PtTokens* tokens, const void* x, void* y) {
    PT_DISPATCH(pt::moe(*layer, *tokens, (const bf16*)x, (bf16*)y),
                pt::moe(*layer, *tokens, (const float*)x, (float*)y));
}

// Streams [T, hc, D] to logits [T, vocab].
PT_EXPORT void pt_logits(const PtLayer* layer, const PtHead* head, const PtTokens* tokens, const void* streams,
                         void* to) {
    PT_DISPATCH(pt::logits(*layer, *head, *tokens, (const bf16*)streams, (bf16*)to),
                pt::logits(*layer, *head, *tokens, (const float*)streams, (float*)to));
}

// The greedy token of each row of x [rows, N], as pt::greedy says.
PT_EXPORT void pt_greedy(const void* x, int64_t* ids, int64_t rows, int64_t N, int64_t is_bf16, int64_t threads) {
    if (is_bf16)
        pt::greedy_rows((const bf16*)x, ids, rows, N, threads);
    else
        pt::greedy_rows((const float*)x, ids, rows, N, threads);
}

// Random numbers of each row's token groups [rows, 4 groups], as pt::uniform_rows says.
PT_EXPORT void pt_uniform(const int64_t* seeds, const int64_t* choices, const int64_t* positions, double* out,
                          int64_t rows, int64_t groups, int64_t threads) {
    pt::uniform_rows(seeds, choices, positions, out, rows, groups, threads);
}

// y [rows, N] = x [rows, K] . w [N, K], all row-major and contiguous.
PT_EXPORT void pt_linear(const void* x, const PtMatrix* w, void* y, int64_t rows, int64_t K, int64_t N, int64_t is_bf16,
                         int64_t threads) {
    if (is_bf16)
        pt::linear<bf16>((const bf16*)x, *w, (bf16*)y, rows, K, N, threads);
    else
        pt::linear<float>((const float*)x, *w, (float*)y, rows, K, N, threads);
}

// y [rows, N] = weight * x / rms(x).
PT_EXPORT void pt_rms_norm(const void* x, const float* weight, void* y, int64_t rows, int64_t N, double eps,
                           int64_t is_bf16) {
    for (long row = 0; row < rows; row++) {
        if (is_bf16)
            pt::rms_norm((const bf16*)x + row * N, (bf16*)y + row * N, weight, N, eps);
        else
            pt::rms_norm((const float*)x + row * N, (float*)y + row * N, weight, N, eps);
    }
}

// Element-wise exp, through the code that the kernels use.
PT_EXPORT void pt_exp(const float* x, float* y, int64_t count) {
    for (long i = 0; i < count; i += pt::LANES) pt::store(y + i, pt::exp16(pt::load(x + i, count - i)), count - i);
}

// Switch the timing of parts on or off, and start from 0.
PT_EXPORT void pt_profile(int64_t is_on) {
    pt::profile = pt::Profile{};
    pt::profile.is_on = is_on;
}

// Seconds spent in part number `index` since pt_profile; its name, null after the last.
PT_EXPORT double pt_part_seconds(int64_t index) { return pt::profile.seconds[index]; }
PT_EXPORT const char* pt_part_name(int64_t index) { return index < pt::NUM_PARTS ? pt::PART_NAMES[index] : nullptr; }

// Size of structure number `index` in the order of args.h; 0 after the last.
PT_EXPORT int64_t pt_struct_size(int64_t index) {
    const int64_t all[] = {sizeof(PtSite), sizeof(PtMatrix), sizeof(PtCompressor), sizeof(PtLayer), sizeof(PtMtp),
                           sizeof(PtPool), sizeof(PtState),  sizeof(PtTokens), sizeof(PtAngles), sizeof(PtHead)};
    return index < int64_t(sizeof all / sizeof *all) ? all[index] : 0;
}

// Whether packed weights are decoded so fast that no number of rows is more than 3 % slower than with others: measured,
// docs/kernels.md.
PT_EXPORT int64_t pt_prefers_packed() {
#if defined(__AVX2__)
    return 1;
#else
    return 0;
#endif
}

// What this file was built for.
PT_EXPORT const char* pt_instructions() {
#if defined(PT_BF16_DOT)
    return "avx512_bf16";
#elif defined(__AVX512F__)
    return "avx512";
#elif defined(__AVX2__)
    return "avx2";
#else
    return "generic";
#endif
}
