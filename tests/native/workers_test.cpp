// Products of many rows by several threads, against each row alone by one: bit for bit the same. Experts of
// several types share the rows, which each type wants in a form of its own.
//
//   workers_test     exit status 1 and a sentence where they differ

#include "moe-edge-workers.h"

#include "ggml.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

namespace {

constexpr int64_t N_IN = 256, N_OUT = 40, N_ROWS = 4096;
constexpr ggml_type TYPES[] = { GGML_TYPE_Q4_K, GGML_TYPE_Q8_0, GGML_TYPE_Q2_K, GGML_TYPE_F16 };

}  // namespace

int main() {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    std::vector<float> x(N_IN * N_ROWS), full(N_IN * N_OUT);
    for (float & v : x) {
        v = normal(random);
    }
    std::vector<std::vector<uint8_t>> weights;
    std::vector<std::vector<float>> out;
    std::vector<moe_edge_product> products;
    for (const ggml_type type : TYPES) {
        for (float & v : full) {
            v = normal(random);
        }
        weights.emplace_back(ggml_row_size(type, N_IN) * N_OUT);
        ggml_quantize_chunk(type, full.data(), weights.back().data(), 0, N_OUT, N_IN, nullptr);
        out.emplace_back(N_OUT * N_ROWS);
        moe_edge_product & p = products.emplace_back();
        p = { weights.back().data(), type, N_IN, N_OUT, {}, {} };
        for (int64_t i = 0; i < N_ROWS; i++) {
            p.x.push_back(x.data() + i * N_IN);
            p.out.push_back(out.back().data() + i * N_OUT);
        }
    }
    moe_edge_workers(3).multiply(products);

    moe_edge_workers one(1);
    for (const moe_edge_product & p : products) {
        for (int64_t i = 0; i < N_ROWS; i++) {
            float alone[N_OUT];
            one.multiply({ { p.weights, p.type, N_IN, N_OUT, { p.x[i] }, { alone } } });
            if (memcmp(alone, p.out[i], sizeof(alone)) != 0) {
                fprintf(stderr, "workers_test: row %lld of %s is another one alone\n", (long long) i, ggml_type_name((ggml_type) p.type));
                return 1;
            }
        }
    }
    printf("%lld rows in %zu types: the same bits\n", (long long) N_ROWS, products.size());
    return 0;
}
