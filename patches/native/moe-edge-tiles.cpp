// Multiplies many activations with a matrix in the CPU's own layout (eight interleaved rows). Upstream's microkernel
// multiplies 16 rows with 16 activations, both as bytes. This file converts parts of the matrix and of the activations
// to that form.

#include "moe-edge-layout.h"

#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "repack.h"
#include "simd-mappings.h"
#include "tiled/tiled-kernel.h"

#include <algorithm>
#include <cstring>

namespace {

constexpr int ROWS       = MOE_EDGE_ROWS;
constexpr int PIECE      = 8;   // consecutive bytes of one row in the interleaved layout
constexpr int BYTES      = 32;  // bytes of a row that are unpacked at a time, each to values that are BYTES apart
constexpr int CACHE_LINE = 64;
constexpr int64_t LEAST_ROWS = 64;  // per thread at a time
constexpr int64_t UNITS      = 4;   // portions for each thread

template <typename INTERLEAVED> void unpack_factors(const INTERLEAVED & in, tiled_tile_src0 & to, int row) {
    for (int r = 0; r < ROWS; r++) {
        to.d[row + r]    = GGML_CPU_FP16_TO_FP32(in.d[r]);
        to.dmin[row + r] = GGML_CPU_FP16_TO_FP32(in.dmin[r]);
    }
}

// Collects BYTES consecutive bytes of row r from an interleaved block, starting with the row's byte `at`.
void gather(const uint8_t * qs, int r, int at, uint8_t * bytes) {
    for (int i = 0; i < BYTES; i += PIECE) {
        memcpy(bytes + i, qs + (at + i) * ROWS + r*PIECE, PIECE);
    }
}

// Unpacks one interleaved block of eight rows to bytes. The values, scales and minimums go to eight rows of `to`,
// starting with `row`.
void unpack(const block_q4_Kx8 & in, tiled_tile_src0 & to, int row) {
    constexpr int PARTS = TILED_TILE_K / 32;
    for (int part = 0; part < PARTS; part++) {
        moe_edge_unpack_six_bits(in.scales + 12*part, to.scales + row*PARTS + part, to.mins + row*PARTS + part, PARTS);
    }
    for (int r = 0; r < ROWS; r++) {
        for (int at = 0; at < TILED_TILE_K / 2; at += BYTES) {
            uint8_t bytes[BYTES], * out = to.q + (row + r) * TILED_TILE_K + 2*at;
            gather(in.qs, r, at, bytes);
            tiled_unpk_nib4(bytes, out, out + BYTES);
        }
    }
}

void unpack(const block_q2_Kx8 & in, tiled_tile_src0 & to, int row) {
    constexpr int PARTS = TILED_TILE_K / 16;
    for (int r = 0; r < ROWS; r++) {
        for (int part = 0; part < PARTS; part++) {  // two parts of a row are adjacent
            const uint8_t both = in.scales[part / 2 * 2*ROWS + 2*r + part % 2];
            to.scales[(row + r) * PARTS + part] = both & 15;
            to.mins[(row + r) * PARTS + part]   = both >> 4;
        }
        for (int at = 0; at < TILED_TILE_K / 4; at += BYTES) {
            uint8_t bytes[BYTES], * out = to.q + (row + r) * TILED_TILE_K + 4*at;
            gather(in.qs, r, at, bytes);
            tiled_unpk_2bit<0>(bytes, out);
            tiled_unpk_2bit<2>(bytes, out + BYTES);
            tiled_unpk_2bit<4>(bytes, out + 2*BYTES);
            tiled_unpk_2bit<6>(bytes, out + 3*BYTES);
        }
    }
}

// Copies block number `block` of each activation to `to`. Fills up the last microtile with zeros if it is not complete.
void fill(const void * const * acts, int n_acts, int64_t block, tiled_tile_src1 & to) {
    for (int a = 0; a < n_acts; a++) {
        const block_q8_K & x = static_cast<const block_q8_K *>(acts[a])[block];
        memcpy(to.q + a*TILED_TILE_K, x.qs, TILED_TILE_K);
        to.d[a] = x.d;
        for (int i = 0; i < TILED_TILE_K / 16; i++) {
            to.bsums[i*TILED_TILE_ROWS + a] = x.bsums[i];
        }
    }
    for (int a = n_acts; a % TILED_MICRO != 0; a++) {
        memset(to.q + a*TILED_TILE_K, 0, TILED_TILE_K);
        to.d[a] = 0;
        for (int i = 0; i < TILED_TILE_K / 16; i++) {
            to.bsums[i*TILED_TILE_ROWS + a] = 0;
        }
    }
}

// Prefetches an interleaved block into the CPU's cache. Successive blocks are far apart in memory, so the processor
// does not predict them.
template <typename INTERLEAVED> void ask_for(const INTERLEAVED & block) {
    for (size_t i = 0; i < sizeof(block); i += CACHE_LINE) {
        __builtin_prefetch(reinterpret_cast<const char *>(&block) + i, 0, 2);
    }
}

// Writes the products of n_rows rows of the matrix and n_acts activations to `out`. The product of row i and activation
// a is at sums[i*TILED_TILE_ROWS + a], and goes to out[a][row0 + i].
void store(const float * sums, int n_rows, int n_acts, float * const * out, int64_t row0) {
    for (int i0 = 0; i0 < n_rows; i0 += TILED_MICRO) {
        const int n = std::min(TILED_MICRO, n_rows - i0);
        for (int a = 0; a < n_acts; a++) {
            for (int i = 0; i < n; i++) {
                out[a][row0 + i0 + i] = sums[(i0 + i) * TILED_TILE_ROWS + a];
            }
        }
    }
}

template <typename INTERLEAVED, int PART>
void multiply(const void * weights, int64_t n_in, int64_t first, int64_t last, const void * const * acts, int64_t n_acts,
              float * const * out, tiled_ws & ws) {
    const int64_t n_blocks = n_in / TILED_TILE_K;
    for (int64_t row0 = first; row0 < last; row0 += TILED_TILE_ROWS) {
        const int n_w = std::min<int64_t>(TILED_TILE_ROWS, last - row0);
        const auto * in = static_cast<const INTERLEAVED *>(weights) + row0 / ROWS * n_blocks;
        for (int64_t act0 = 0; act0 < n_acts; act0 += TILED_TILE_ROWS) {
            const int n_a = std::min<int64_t>(TILED_TILE_ROWS, n_acts - act0);
            for (int row = 0; row < GGML_PAD(n_w, TILED_MICRO); row++) {
                memset(ws.acc + row*TILED_TILE_ROWS, 0, sizeof(float) * GGML_PAD(n_a, TILED_MICRO));
            }
            for (int64_t block = 0; block < n_blocks; block++) {
                for (int row = 0; row < n_w; row += ROWS) {
                    const auto & eight = in[row / ROWS * n_blocks + block];
                    unpack_factors(eight, ws.src0, row);
                    unpack(eight, ws.src0, row);
                }
                fill(acts + act0, n_a, block, ws.src1);
                for (int a = 0; a < n_a; a += TILED_MICRO) {
                    tiled_repack_src1(&ws.src1, a, 1, false);
                    for (int row = 0; row < n_w; row += TILED_MICRO) {
                        if (a == 0 && block + 1 < n_blocks) {
                            for (int r = row; r < std::min(row + TILED_MICRO, n_w); r += ROWS) {
                                ask_for(in[r / ROWS * n_blocks + block + 1]);
                            }
                        }
                        tiled_run_microtile<PART, true, 0, false>(ws.src0, ws.src1, row, a, 1, 0, ws.acc, TILED_TILE_ROWS);
                    }
                }
            }
            store(ws.acc, n_w, n_a, out + act0, row0);
        }
    }
}

}  // namespace

size_t moe_edge_tiles_size() { return sizeof(tiled_ws); }

int64_t moe_edge_tiles_rows(int64_t n_rows, int n_threads) {
    int64_t rows = TILED_TILE_ROWS;
    while (rows > LEAST_ROWS && n_rows < rows * UNITS * n_threads) {
        rows /= 2;
    }
    return rows;
}

void moe_edge_tiles(int32_t type, const void * weights, int64_t n_in, int64_t first, int64_t last, const void * const * acts,
                    int64_t n_acts, float * const * out, void * workspace) {
    auto & ws = *static_cast<tiled_ws *>(workspace);
    switch (type) {
        case GGML_TYPE_Q4_K: return multiply<block_q4_Kx8, 32>(weights, n_in, first, last, acts, n_acts, out, ws);
        case GGML_TYPE_Q2_K: return multiply<block_q2_Kx8, 16>(weights, n_in, first, last, acts, n_acts, out, ws);
        default: GGML_ABORT("no tiles for this type");
    }
}
