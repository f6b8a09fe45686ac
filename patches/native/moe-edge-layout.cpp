#include "moe-edge-layout.h"
#include "moe-edge.h"

#include "ggml-backend-impl.h"
#include "ggml-cpp.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "repack.h"
#include "tiled/tiled.h"

#include <cstdint>
#include <cstring>
#include <vector>

// Declares upstream's functions that convert a matrix to the CPU's own layout (interleaved rows). Calling them directly
// avoids a log line for each tensor.
namespace ggml::cpu::repack {
template <typename BLOC_TYPE, int64_t INTER_SIZE, int64_t NB_COLS>
int repack(ggml_tensor * t, const void * data, size_t data_size);
#if defined(__x86_64__)
template <> int repack<block_q4_0, 8, 8>(ggml_tensor *, const void *, size_t);
template <> int repack<block_iq4_nl, 8, 8>(ggml_tensor *, const void *, size_t);
template <> int repack<block_mxfp4, 8, 8>(ggml_tensor *, const void *, size_t);
#endif
}  // namespace ggml::cpu::repack

namespace {

constexpr int64_t ROWS = MOE_EDGE_ROWS;

#if defined(__x86_64__)
void pack_six_bits(const uint8_t * scales, const uint8_t * mins, uint8_t * q) {
    for (int i = 0; i < 4; i++) {
        q[i]     = scales[i] | (scales[i + 4] >> 4 << 6);
        q[i + 4] = mins[i] | (mins[i + 4] >> 4 << 6);
        q[i + 8] = (scales[i + 4] & 15) | (mins[i + 4] & 15) << 4;
    }
}

// Interleaves the scales and the minimums of eight blocks, one block per row. in[r*stride] is the block of row r.
void interleave_scales(const block_q4_K * in, int64_t stride, block_q4_Kx8 & to) {
    uint8_t scales[ROWS][ROWS], mins[ROWS][ROWS];  // [row][part]
    for (int r = 0; r < ROWS; r++) {
        moe_edge_unpack_six_bits(in[r*stride].scales, scales[r], mins[r], 1);
    }
    for (int part = 0; part < ROWS; part++) {
        uint8_t of_part[2][ROWS];
        for (int r = 0; r < ROWS; r++) {
            of_part[0][r] = scales[r][part];
            of_part[1][r] = mins[r][part];
        }
        pack_six_bits(of_part[0], of_part[1], to.scales + 12*part);
    }
}

void interleave_scales(const block_q2_K * in, int64_t stride, block_q2_Kx8 & to) {
    for (int r = 0; r < ROWS; r++) {
        for (int i = 0; i < QK_K/16; i += 2) {  // a scale and a minimum share a byte; copies two parts of a row
            memcpy(to.scales + i*ROWS + 2*r, in[r*stride].scales + i, 2);
        }
    }
}

// Converts eight rows of Q4_K or Q2_K to the interleaved layout. The result is the same as that of upstream's function,
// which takes four times as long.
template <typename INTERLEAVED, typename PLAIN> int interleave(ggml_tensor * to, const void * rows, size_t) {
    const int64_t n_blocks = to->ne[0] / QK_K;
    auto * out = static_cast<INTERLEAVED *>(to->data);
    for (int64_t b = 0; b < n_blocks; b++, out++) {
        const auto * in = static_cast<const PLAIN *>(rows) + b;
        interleave_scales(in, n_blocks, *out);
        for (int r = 0; r < ROWS; r++) {
            const auto & from = in[r*n_blocks];
            out->d[r]    = from.data.data.d;
            out->dmin[r] = from.data.data.dmin;
            for (size_t i = 0; i < sizeof(from.qs); i += 8) {
                memcpy(out->qs + i*ROWS + 8*r, from.qs + i, 8);
            }
        }
    }
    return 0;
}
#endif

const std::vector<moe_edge_kernels> KERNELS = {
#if defined(__x86_64__)
    { GGML_TYPE_Q4_0, ggml_gemv_q4_0_8x8_q8_0, ggml_gemm_q4_0_8x8_q8_0, ggml_quantize_mat_q8_0_4x8,
      ggml::cpu::repack::repack<block_q4_0, 8, 8>, 0 },
    { GGML_TYPE_Q4_K, ggml_gemv_q4_K_8x8_q8_K, ggml_gemm_q4_K_8x8_q8_K, ggml_quantize_mat_q8_K_4x8,
      interleave<block_q4_Kx8, block_q4_K>, 8 },
    { GGML_TYPE_Q2_K, ggml_gemv_q2_K_8x8_q8_K, ggml_gemm_q2_K_8x8_q8_K, ggml_quantize_mat_q8_K_4x8,
      interleave<block_q2_Kx8, block_q2_K>, 10 },
    { GGML_TYPE_IQ4_NL, ggml_gemv_iq4_nl_8x8_q8_0, ggml_gemm_iq4_nl_8x8_q8_0, ggml_quantize_mat_q8_0_4x8,
      ggml::cpu::repack::repack<block_iq4_nl, 8, 8>, 0 },
    { GGML_TYPE_MXFP4, ggml_gemv_mxfp4_8x8_q8_0, ggml_gemm_mxfp4_8x8_q8_0, ggml_quantize_mat_q8_0_4x8,
      ggml::cpu::repack::repack<block_mxfp4, 8, 8>, 0 },
#endif
};

ggml_tensor matrix(int32_t type, int64_t n_in, int64_t n_out, void * data) {
    ggml_tensor t = {};
    t.type  = static_cast<ggml_type>(type);
    t.data  = data;
    t.ne[0] = n_in;
    t.ne[1] = n_out;
    t.ne[2] = t.ne[3] = 1;
    t.nb[0] = ggml_type_size(t.type);
    t.nb[1] = ggml_row_size(t.type, n_in);
    t.nb[2] = t.nb[3] = t.nb[1] * n_out;
    return t;
}

// Returns whether upstream would store this matrix in a layout of interleaved rows on this CPU.
bool upstream_repacks(int32_t type, int64_t n_in, int64_t n_out) {
    static const ggml_backend_buffer_ptr buffer(ggml_backend_buft_alloc_buffer(ggml_backend_cpu_repack_buffer_type(), ROWS));
    ggml_tensor t = matrix(type, n_in, n_out, nullptr);
    buffer->iface.init_tensor(buffer.get(), &t);
    return t.extra != nullptr;
}

// Returns whether upstream has a tiled kernel for this type on this CPU. An environment variable can disable tiled
// kernels.
bool upstream_tiles(int32_t type) {
    const int64_t n_in = ggml_blck_size((ggml_type) type);
    ggml_tensor w = matrix(type, n_in, ROWS, nullptr), x = matrix(GGML_TYPE_F32, n_in, 1, nullptr);
    ggml_tensor op = matrix(GGML_TYPE_F32, ROWS, 1, nullptr);
    op.src[0] = &w;
    op.src[1] = &x;
    return ggml_tiled_wdata_size(1, &op) > 0;
}

}  // namespace

const moe_edge_kernels * moe_edge_kernels_of(int32_t type, int64_t n_in, int64_t n_out) {
    for (const auto & kernels : KERNELS) {
        if (kernels.type == type) {
            const bool whole = n_in > 0 && n_out > 0 && n_out % ROWS == 0 && n_in % ggml_blck_size((ggml_type) type) == 0;
            return whole && upstream_repacks(type, n_in, n_out) ? &kernels : nullptr;
        }
    }
    return nullptr;
}

int64_t moe_edge_tiles_from(const moe_edge_kernels & kernels) {
    // Test only at the first call whether upstream has tiled kernels for this CPU. Every op calls this function, and
    // the answer never changes.
    static const bool tiles = ggml_cpu_has_avx512_vnni() && upstream_tiles(GGML_TYPE_Q4_K) && upstream_tiles(GGML_TYPE_Q2_K);
    return kernels.tiles_from > 0 && tiles ? kernels.tiles_from : INT64_MAX;
}

void moe_edge_interleave(const moe_edge_kernels & kernels, int64_t n_in, int64_t n_out, void * data) {
    const size_t size = ROWS * ggml_row_size((ggml_type) kernels.type, n_in);
    thread_local std::vector<char> rows;
    rows.resize(size);
    for (int64_t row = 0; row < n_out; row += ROWS) {
        char * to = static_cast<char *>(data) + row / ROWS * size;
        memcpy(rows.data(), to, size);
        ggml_tensor t = matrix(kernels.type, n_in, ROWS, to);
        const int status = kernels.interleave(&t, rows.data(), size);
        GGML_ASSERT(status == 0);
    }
}

int32_t moe_edge_interleaves(int32_t type, int64_t n_in, int64_t n_out) {
    return moe_edge_kernels_of(type, n_in, n_out) != nullptr;
}
