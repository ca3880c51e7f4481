// What crosses the C boundary. Every field is 8 bytes wide, so that kernels/structs.py can mirror the order alone;
// pt_struct_size lets it check that it does.
#pragma once

#include <cstdint>

extern "C" {

// One mHC site: mixing weights of a block's input, and the norm of that input.
struct PtSite {
    const float *fn, *base, *scale, *norm;
};

// A weight matrix or a stack of them: plain in the compute dtype, or codes with scales (packed.h).
struct PtMatrix {
    const void *values, *scales;
    int64_t kind;
};

struct PtCompressor {
    const void *wkv, *wgate;
    const float *ape, *norm;
};

struct PtLayer {
    int64_t hidden, hc, sinkhorn_iterations;
    int64_t heads, head_dim, rope_pairs, q_rank, groups, o_rank, ratio, window;
    int64_t index_heads, index_dim, index_top_k;
    int64_t experts, top_k, inner, shared_inner;
    double norm_eps, hc_eps, attn_scale, index_scale, route_scale, swiglu_limit;
    PtSite attn_site, ffn_site;
    PtMatrix wq_a, wq_b, wkv, wo_a, wo_b;
    const float *q_norm, *kv_norm, *sink;
    PtCompressor compressor, index_compressor;
    PtMatrix index_wq_b;
    const void* index_weights;
    const float *gate_weight, *gate_bias;
    const int64_t* gate_table;
    PtMatrix w13, w2, shared_w1, shared_w2, shared_w3;
};

// What an MTP block makes its input of; the block itself is a PtLayer. Embeddings are plain.
struct PtMtp {
    const float *hnorm, *enorm;
    PtMatrix h_proj, e_proj;
    const void* embed;
};

// State of one compressor over all slots; entry e of a slot is row e % 64 of block table[slot][e / 64].
struct PtPool {
    void *kv, *gate, *entries;
    const int64_t* table;
    int64_t cells, table_width;
};

struct PtState {
    void* window;
    int64_t window_cells;
    PtPool pool, index_pool;
};

struct PtTokens {
    int64_t count;
    const int64_t *ids, *slots, *positions;
    const float *cos, *sin;  // of one layer: see PtAngles
    int64_t is_bf16, threads;
};

// A layer's rotary table, by position.
struct PtAngles {
    const float *cos, *sin;
};

// The last steps of a forward, from streams to logits [T, vocab].
struct PtHead {
    PtSite site;
    const void* weight;
    int64_t vocab;
};
}
