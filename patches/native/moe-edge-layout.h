// Declares functions for the CPU's own layout of a matrix: groups of eight interleaved rows, as upstream's repacked
// kernels read them.

#pragma once

#include <cstddef>
#include <cstdint>

struct ggml_tensor;

constexpr int MOE_EDGE_ROWS = 8;  // number of rows that are interleaved

// Unpacks eight scales and eight minimums of six bits each, from 12 bytes at q. Writes them to scales[i*stride] and
// mins[i*stride].
template <typename NUMBER> inline void moe_edge_unpack_six_bits(const uint8_t * q, NUMBER * scales, NUMBER * mins, int stride) {
    for (int i = 0; i < 4; i++) {
        const int high = (i + 4) * stride;
        scales[i*stride] = q[i] & 63;
        mins[i*stride]   = q[i + 4] & 63;
        scales[high]     = (q[i + 8] & 15) | (q[i] >> 6 << 4);
        mins[high]       = (q[i + 8] >> 4) | (q[i + 4] >> 6 << 4);
    }
}

// Upstream's kernels for matrices of one type in the interleaved layout (groups of eight rows).
struct moe_edge_kernels {
    // Multiplies nr rows of activations with nc rows of weights, and writes nr rows of nc values to `out`. Rows of
    // `out` are `stride` values apart. nc is a multiple of 8.
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

// Returns the smallest number of rows of activations for which upstream's tiled kernel is faster than these kernels on
// this CPU. Returns INT64_MAX if it never is.
int64_t moe_edge_tiles_from(const moe_edge_kernels & kernels);

// Multiplies the rows [first, last) of a matrix with n_acts rows of activations in block_q8_K, and writes the results
// to out[activation][row]. first and last must be multiples of 8. workspace: moe_edge_tiles_size() bytes, aligned to 64
// bytes.
void   moe_edge_tiles(int32_t type, const void * weights, int64_t n_in, int64_t first, int64_t last, const void * const * acts,
                      int64_t n_acts, float * const * out, void * workspace);
size_t moe_edge_tiles_size();

// Returns how many rows of weights a thread should multiply at a time if n_threads threads share n_rows rows. The
// number is large, but small enough to give each thread several portions.
int64_t moe_edge_tiles_rows(int64_t n_rows, int n_threads);

// Converts a plain matrix to the interleaved layout (groups of eight rows), in the same memory.
void moe_edge_interleave(const moe_edge_kernels & kernels, int64_t n_in, int64_t n_out, void * matrix);
