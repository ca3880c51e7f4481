// The C interface. Callers check shapes, dtypes and contiguity (model/native.py, kernels/ops.py); pointers are trusted.

#include "attention.h"
#include "hyper.h"
#include "moe.h"
#include "mtp.h"

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

template <class T>
void block(const PtLayer& layer, const PtState& state, const PtTokens& tokens, const T* streams, T* to) {
    SiteBuffers<T> work = site_buffers<T>(layer, tokens.count);
    read_site(layer, layer.attn_site, tokens, streams, work.x, work.post, work.comb);
    attention(layer, state, tokens, work.x, work.y, false);
    expand(layer, tokens, streams, work.y, work.post, work.comb, work.middle);
    read_site(layer, layer.ffn_site, tokens, work.middle, work.x, work.post, work.comb);
    moe(layer, tokens, work.x, work.y);
    expand(layer, tokens, work.middle, work.y, work.post, work.comb, to);
}

template <class T>
void keys_only(const PtLayer& layer, const PtState& state, const PtTokens& tokens, const T* streams) {
    SiteBuffers<T> work = site_buffers<T>(layer, tokens.count);
    read_site(layer, layer.attn_site, tokens, streams, work.x, work.post, work.comb);
    attention(layer, state, tokens, work.x, work.y, true);
}

template <class T>
void mtp_block(const PtLayer& layer, const PtMtp& mtp, const PtState& state, const PtTokens& tokens, const T* streams,
               T* to) {
    T* inputs = PT_SCRATCH(T, tokens.count * layer.hc * layer.hidden);
    combine(layer, mtp, tokens, streams, inputs);
    block(layer, state, tokens, inputs, to);
}

template <class T>
void mtp_keys(const PtLayer& layer, const PtMtp& mtp, const PtState& state, const PtTokens& tokens, const T* streams) {
    T* inputs = PT_SCRATCH(T, tokens.count * layer.hc * layer.hidden);
    combine(layer, mtp, tokens, streams, inputs);
    keys_only(layer, state, tokens, inputs);
}

template <class T>
void linear(const T* x, const Weights<T>& w, T* y, long rows, long K, long N, int64_t threads) {
    Timed timed(LINEAR);
    Product<T> product{row_pointers(PT_SCRATCH(T*, rows), (T*)x, rows, K),
                       row_pointers(PT_SCRATCH(T*, rows), y, rows, N), w, rows, K, N};
    run(&product, 1, threads);
}

}  // namespace pt

#define PT_DISPATCH(call_bf16, call_float) \
    if (tokens->is_bf16)                   \
        call_bf16;                         \
    else                                   \
        call_float

using pt::bf16;

// Streams [T, hc, D] through a whole block, writing the tokens' state.
PT_EXPORT void pt_block(const PtLayer* layer, const PtState* state, const PtTokens* tokens, const void* streams,
                        void* to) {
    PT_DISPATCH(pt::block(*layer, *state, *tokens, (const bf16*)streams, (bf16*)to),
                pt::block(*layer, *state, *tokens, (const float*)streams, (float*)to));
}

// The MTP block over streams [T, hc, D] of positions and the tokens behind them, to the streams of the next position.
PT_EXPORT void pt_mtp_block(const PtLayer* layer, const PtMtp* mtp, const PtState* state, const PtTokens* tokens,
                            const void* streams, void* to) {
    PT_DISPATCH(pt::mtp_block(*layer, *mtp, *state, *tokens, (const bf16*)streams, (bf16*)to),
                pt::mtp_block(*layer, *mtp, *state, *tokens, (const float*)streams, (float*)to));
}

// Only the keys that pt_mtp_block would write.
PT_EXPORT void pt_mtp_keys(const PtLayer* layer, const PtMtp* mtp, const PtState* state, const PtTokens* tokens,
                           const void* streams) {
    PT_DISPATCH(pt::mtp_keys(*layer, *mtp, *state, *tokens, (const bf16*)streams),
                pt::mtp_keys(*layer, *mtp, *state, *tokens, (const float*)streams));
}

// x [T, D], normalised, to y [T, D] through attention alone.
PT_EXPORT void pt_attention(const PtLayer* layer, const PtState* state, const PtTokens* tokens, const void* x,
                            void* y) {
    PT_DISPATCH(pt::attention(*layer, *state, *tokens, (const bf16*)x, (bf16*)y, false),
                pt::attention(*layer, *state, *tokens, (const float*)x, (float*)y, false));
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

// Streams [T, hc, D] to the input [T, D] of the vocabulary projection.
PT_EXPORT void pt_head(const PtLayer* layer, const PtSite* site, const PtTokens* tokens, const void* streams, void* x) {
    PT_DISPATCH(pt::read_head(*layer, *site, *tokens, (const bf16*)streams, (bf16*)x),
                pt::read_head(*layer, *site, *tokens, (const float*)streams, (float*)x));
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
                           sizeof(PtPool), sizeof(PtState),  sizeof(PtTokens)};
    return index < int64_t(sizeof all / sizeof *all) ? all[index] : 0;
}

// What this file was built for.
PT_EXPORT const char* pt_instructions() {
#if defined(__AVX512BF16__)
    return "avx512_bf16";
#elif defined(__AVX512F__)
    return "avx512";
#elif defined(__AVX2__)
    return "avx2";
#else
    return "generic";
#endif
}
