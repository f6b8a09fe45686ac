// Declares functions for the CPU's own layout of a matrix: groups of eight interleaved rows, as upstream's repacked
// kernels read them.

#pragma once

#include <cstddef>
#include <cstdint>

struct ggml_tensor;

constexpr int MOE_EDGE_ROWS = 8;  // number of rows that are interleaved

// Unpacks eight scales and eight minimums from 12 bytes, six bits each, to scales[i*stride] and mins[i*stride]. In
// plain Q4_K the eight values belong to the eight parts of one row. In the interleaved layout they belong to one part
// of eight rows.
template <typename NUMBER> inline void moe_edge_unpack_six_bits(const uint8_t * q, NUMBER * scales, NUMBER * mins, int stride) {
    for (int i = 0; i < 4; i++) {
        const int high = (i + 4) * stride;
        scales[i*stride] = q[i] & 63;
        mins[i*stride]   = q[i + 4] & 63;
        scales[high]     = (q[i + 8] & 15) | (q[i] >> 6 << 4);
        mins[high]       = (q[i + 8] >> 4) | (q[i + 4] >> 6 << 4);
    }
}

// Upstream's kernels for matrices of one type in the interleaved layout. gemv and gemm multiply nr rows of activations
// with nc rows of weights; nc is a multiple of 8. They write nr rows of nc values to `out`, where rows are `stride`
// values apart.
struct moe_edge_kernels {
    using product = void (*)(int n_in, float * out, size_t stride, const void * weights, const void * acts, int nr, int nc);

    int32_t type;
    product gemv;  // for one row of activations in its vec_dot type
    product gemm;  // for a multiple of four rows of activations, interleaved in groups of four
    // Converts four consecutive rows of activations at x to their vec_dot type, and interleaves them.
    void (*quantize)(const float * x, void * acts, int64_t n_in);
    int (*interleave)(ggml_tensor * to, const void * rows, size_t size);
    int64_t tiles_from;  // rows of activations from which tiles are faster; 0: never
};

// Returns the kernels for a matrix of n_out rows of n_in values in the interleaved layout. Returns null if this CPU has
// no faster kernels for this shape, or if upstream would not interleave the matrix.
const moe_edge_kernels * moe_edge_kernels_of(int32_t type, int64_t n_in, int64_t n_out);

// Returns the number of rows of activations from which upstream's tiled kernel is faster on this CPU. Returns INT64_MAX
// if it never is. The activations must be of type block_q8_K.
int64_t moe_edge_tiles_from(const moe_edge_kernels & kernels);

// Multiplies rows [first, last) of a matrix with n_acts activations of n_in values each, and writes out[a][row]. first
// and last are multiples of 8. The workspace has moe_edge_tiles_size() bytes and is aligned to 64 bytes.
void   moe_edge_tiles(int32_t type, const void * weights, int64_t n_in, int64_t first, int64_t last, const void * const * acts,
                      int64_t n_acts, float * const * out, void * workspace);
size_t moe_edge_tiles_size();

// Returns how many of n_rows rows of weights a thread should take at a time. Many rows are better, because they share
// the converted activations. But each thread should get several portions.
int64_t moe_edge_tiles_rows(int64_t n_rows, int n_threads);

// Converts a plain matrix in memory to the interleaved layout, without a second matrix.
void moe_edge_interleave(const moe_edge_kernels & kernels, int64_t n_in, int64_t n_out, void * matrix);
