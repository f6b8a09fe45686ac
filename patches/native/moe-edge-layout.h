// The CPU's own layout of a matrix: eight rows of it interleaved, as upstream's repacked kernels read them.

#pragma once

#include <cstddef>
#include <cstdint>

struct ggml_tensor;

constexpr int MOE_EDGE_ROWS = 8;  // interleaved with each other

// Eight scales and eight minimums of six bits each in 12 bytes. Q4_K has them so for the parts of one row; interleaved,
// for one part of eight rows. Written are scales[i*stride] and mins[i*stride].
template <typename NUMBER> inline void moe_edge_unpack_six_bits(const uint8_t * q, NUMBER * scales, NUMBER * mins, int stride) {
    for (int i = 0; i < 4; i++) {
        const int high = (i + 4) * stride;
        scales[i*stride] = q[i] & 63;
        mins[i*stride]   = q[i + 4] & 63;
        scales[high]     = (q[i + 8] & 15) | (q[i] >> 6 << 4);
        mins[high]       = (q[i + 8] >> 4) | (q[i + 4] >> 6 << 4);
    }
}

// Upstream's kernels for the layout of one type. gemv and gemm write nr rows of nc numbers each to out, whose rows
// are `stride` numbers apart: the products of nr rows of activations with nc rows of weights, nc a multiple of 8.
struct moe_edge_kernels {
    using product = void (*)(int n_in, float * out, size_t stride, const void * weights, const void * acts, int nr, int nc);

    int32_t type;
    product gemv;  // one row of activations, as its vec_dot type
    product gemm;  // a multiple of four, by fours interleaved
    void (*quantize)(const float * x, void * acts, int64_t n_in);  // four rows at x, one behind the other, interleaved
    int (*interleave)(ggml_tensor * to, const void * rows, size_t size);
    int64_t tiles_from;  // so many rows of activations are faster by tiles; 0: never
};

// Those for a matrix of n_out rows of n_in numbers; null where this CPU or this shape has none, or where they
// gain nothing. Never where upstream's repacked buffer type would keep the matrix plain.
const moe_edge_kernels * moe_edge_kernels_of(int32_t type, int64_t n_in, int64_t n_out);

// From so many rows of activations on, upstream's tiles are faster on this CPU; they want block_q8_K.
int64_t moe_edge_tiles_from(const moe_edge_kernels & kernels);

// out[a][r]: n_acts activations of n_in numbers times the rows [first, last) of a matrix, multiples of 8. The workspace
// has moe_edge_tiles_size() bytes, aligned to 64.
void   moe_edge_tiles(int32_t type, const void * weights, int64_t n_in, int64_t first, int64_t last, const void * const * acts,
                      int64_t n_acts, float * const * out, void * workspace);
size_t moe_edge_tiles_size();

// Of n_rows rows of weights, so many for a thread at once: many, which share what is made of the activations, but some
// parts for each thread.
int64_t moe_edge_tiles_rows(int64_t n_rows, int n_threads);

// Changes the layout of a plain matrix in place.
void moe_edge_interleave(const moe_edge_kernels & kernels, int64_t n_in, int64_t n_out, void * matrix);
