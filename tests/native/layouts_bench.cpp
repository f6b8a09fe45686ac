// What an expert's product costs in each layout of its weights, and what changing the layout costs.
//
// One thread, its own processor time, all ways in turn, the least of several rounds: so what else the
// machine does hardly shows. Experts come from more memory than the caches hold, as they do in a model.

#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "ggml-cpu-impl.h"
#include "moe-edge-layout.h"
#include "tiled/tiled.h"

namespace {

constexpr int64_t N_IN      = 2048;
constexpr int64_t N_OUT     = 768;
constexpr int64_t ROW_BLOCK = 16;  // as in the CPU executor
constexpr size_t  IN_TURN   = 96u << 20;

const ggml_type TYPES[] = { GGML_TYPE_Q4_0, GGML_TYPE_Q4_K, GGML_TYPE_IQ4_NL, GGML_TYPE_MXFP4, GGML_TYPE_Q2_K };

double cpu_us() {
    timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

ggml_tensor tensor(ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2, void * data) {
    ggml_tensor t{};
    t.type  = type;
    t.data  = data;
    t.ne[0] = ne0;
    t.ne[1] = ne1;
    t.ne[2] = ne2;
    t.ne[3] = 1;
    t.nb[0] = ggml_type_size(type);
    t.nb[1] = ggml_row_size(type, ne0);
    t.nb[2] = t.nb[1] * ne1;
    t.nb[3] = t.nb[2] * ne2;
    return t;
}

// n_out rows of weights by the tiled kernel, or the dot products of rows where it declines, as the CPU executor does.
void plain(ggml_type type, void * weights, int64_t n_out, char * acts, ggml_tensor & x, float * out, std::vector<char> & scratch,
           const std::vector<int32_t> & pairs) {
    const int64_t rows = x.ne[2];
    const auto * traits = ggml_get_type_traits_cpu(type);
    ggml_tensor w  = tensor(type, N_IN, n_out, 1, weights);
    ggml_tensor op = tensor(GGML_TYPE_F32, N_OUT, 1, rows, out);
    op.ne[0]  = n_out;
    op.op     = GGML_OP_MUL_MAT_ID;
    op.src[0] = &w;
    op.src[1] = &x;
    scratch.resize(ggml_tiled_wdata_size(1, &op) + 64);
    ggml_compute_params params{};
    params.nth   = 1;
    params.wdata = acts;
    char * aligned = reinterpret_cast<char *>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) / 64 * 64);
    if (ggml_compute_forward_mul_mat_id_tiled(&params, &op, 0, rows, pairs.data(), aligned)) {
        return;
    }
    const size_t row_size = ggml_row_size(type, N_IN);
    const size_t act_size = ggml_row_size(traits->vec_dot_type, N_IN);
    for (int64_t c0 = 0; c0 < rows; c0 += ROW_BLOCK) {
        for (int64_t b0 = 0; b0 < n_out; b0 += ROW_BLOCK) {
            for (int64_t c = c0; c < std::min(c0 + ROW_BLOCK, rows); c++) {
                for (int64_t row = b0; row < b0 + ROW_BLOCK; row++) {
                    traits->vec_dot(N_IN, out + c*N_OUT + row, 0, static_cast<char *>(weights) + row*row_size, 0,
                                    acts + c*act_size, 0, 1);
                }
            }
        }
    }
}

void measure(ggml_type type, int rounds) {
    const char * name = ggml_type_name(type);
    const moe_edge_kernels * l = moe_edge_kernels_of(type, N_IN, N_OUT);
    if (!l) {
        printf("%-7s upstream keeps it plain on this processor\n", name);
        return;
    }
    const size_t bytes = ggml_row_size(type, N_IN) * N_OUT;
    const int copies = static_cast<int>(IN_TURN / bytes);
    const auto vec_type = ggml_get_type_traits_cpu(type)->vec_dot_type;
    const size_t act_size = ggml_row_size(vec_type, N_IN);

    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> source(N_IN * N_OUT);
    std::generate(source.begin(), source.end(), [&] { return normal(random); });
    char * flat   = static_cast<char *>(aligned_alloc(64, (bytes * copies + 63) / 64 * 64));
    char * packed = static_cast<char *>(aligned_alloc(64, (bytes * copies + 63) / 64 * 64));
    ggml_quantize_chunk(type, source.data(), flat, 0, N_OUT, N_IN, nullptr);
    for (int i = 1; i < copies; i++) {
        std::copy(flat, flat + bytes, flat + i*bytes);
    }

    double repack_us = std::numeric_limits<double>::max();
    for (int i = 0; i < copies; i++) {
        std::copy(flat, flat + bytes, packed + i*bytes);
        const double start = cpu_us();
        moe_edge_interleave(*l, N_IN, N_OUT, packed + i*bytes);
        repack_us = std::min(repack_us, cpu_us() - start);
    }
    printf("%-7s changing the layout: %.0f us a MiB\n", name, repack_us * 1048576 / bytes);
    printf("%-7s %5s %10s %8s %8s %16s %9s   (us; over plain)\n", "", "rows", "plain", "gemv", "gemm",
           "gemm, quantizing", "tiles");

    for (const int64_t rows : { 1, 2, 4, 8, 16, 32, 64, 128, 256 }) {
        std::vector<float> inputs(N_IN * rows);
        std::generate(inputs.begin(), inputs.end(), [&] { return normal(random); });
        std::vector<char> acts(act_size * rows);
        std::vector<char> acts4(act_size * rows);
        const auto from_float = ggml_get_type_traits_cpu(vec_type)->from_float;
        for (int64_t r = 0; r < rows; r++) {
            from_float(inputs.data() + r*N_IN, acts.data() + r*act_size, N_IN);
        }
        const auto quantize = [&] {
            for (int64_t r = 0; r + 4 <= rows; r += 4) {
                l->quantize(inputs.data() + r*N_IN, acts4.data() + r*act_size, N_IN);
            }
        };
        quantize();
        std::vector<float> out(N_OUT * rows);
        std::vector<char> scratch;
        std::vector<int32_t> pairs;
        for (int32_t r = 0; r < rows; r++) {
            pairs.insert(pairs.end(), { 0, r });
        }
        ggml_tensor x = tensor(GGML_TYPE_F32, N_IN, 1, rows, inputs.data());
        const auto gemv = [&](char * w, int64_t from) {
            for (int64_t r = from; r < rows; r++) {
                l->gemv(N_IN, out.data() + r*N_OUT, N_OUT, w, acts.data() + r*act_size, 1, N_OUT);
            }
        };
        const auto gemm = [&](char * w) {
            const int64_t whole = rows - rows % 4;
            if (whole > 0) {
                l->gemm(N_IN, out.data(), N_OUT, w, acts4.data(), whole, N_OUT);
            }
            gemv(w, whole);
        };
        std::vector<char> workspace(moe_edge_tiles_size() + 64);
        void * aligned = reinterpret_cast<void *>((reinterpret_cast<uintptr_t>(workspace.data()) + 63) / 64 * 64);
        std::vector<const void *> inputs_at;
        std::vector<float *> out_at;
        for (int64_t r = 0; r < rows; r++) {
            inputs_at.push_back(acts.data() + r*act_size);
            out_at.push_back(out.data() + r*N_OUT);
        }
        const auto tiles = [&](char * w) {
            moe_edge_tiles(type, w, N_IN, 0, N_OUT, inputs_at.data(), rows, out_at.data(), aligned);
        };
        const std::function<void(int)> ways[] = {
            [&](int i) { plain(type, flat + i*bytes, N_OUT, acts.data(), x, out.data(), scratch, pairs); },
            [&](int i) { gemv(packed + i*bytes, 0); },
            [&](int i) { gemm(packed + i*bytes); },
            [&](int i) { quantize(); gemm(packed + i*bytes); },
            [&](int i) { tiles(packed + i*bytes); },
        };
        const int n_ways = l->tiles_from > 0 && rows >= 4 ? 5 : 4;
        double least[5];
        std::fill(least, least + 5, std::numeric_limits<double>::max());
        int at = 0;
        const int in_round = rows < 8 ? 16 : 2;
        for (int round = 0; round < rounds; round++) {
            for (int way = 0; way < n_ways; way++) {
                const double start = cpu_us();
                for (int n = 0; n < in_round; n++) {
                    ways[way](at++ % copies);
                }
                least[way] = std::min(least[way], (cpu_us() - start) / in_round);
            }
        }
        printf("%-7s %5d %10.0f %8.2f %8.2f %16.2f", name, (int) rows, least[0], least[1] / least[0], least[2] / least[0],
               least[3] / least[0]);
        printf(n_ways > 4 ? " %9.2f\n" : "\n", least[4] / least[0]);
        fflush(stdout);
    }
    free(flat);
    free(packed);
}

}  // namespace

int main(int argc, char ** argv) {
    const int rounds = argc > 1 ? atoi(argv[1]) : 12;
    ggml_cpu_init();
    printf("%s, %d x %d, one thread\n", ggml_cpu_has_avx512() ? "AVX-512" : ggml_cpu_has_avx2() ? "AVX2" : "no AVX2",
           (int) N_IN, (int) N_OUT);
    for (const ggml_type type : TYPES) {
        measure(type, rounds);
    }
    return 0;
}
