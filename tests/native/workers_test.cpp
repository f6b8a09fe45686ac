// Compares products by several threads with each row alone by one thread. Few rows: equal bit for
// bit. Many rows use a matrix product, which sums in another order. Experts of several types share
// the rows, and each type converts them to its own format.
//
//   workers_test       exits with 1 and a message if they differ
//   workers_test time  prints the time of one thread for an expert's rows, one by one and together

#include "moe-edge-workers.h"

#include "ggml.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

namespace {

constexpr int64_t N_IN = 256, N_OUT = 40, MOST_ROWS = 4096;
constexpr int64_t FEW_ROWS = 15;  // up to this number, rows are equal bit for bit
constexpr double  NMSE_LIMIT = 1e-9;
constexpr ggml_type TYPES[] = { GGML_TYPE_Q4_K, GGML_TYPE_Q8_0, GGML_TYPE_Q2_K, GGML_TYPE_F16 };

[[noreturn]] void die(const char * sentence, int64_t n_rows, int64_t row, int32_t type) {
    fprintf(stderr, "workers_test: %lld rows, row %lld of %s: %s\n", (long long) n_rows, (long long) row,
            ggml_type_name((ggml_type) type), sentence);
    exit(1);
}

struct experts {
    std::vector<std::vector<uint8_t>> weights;
    std::vector<std::vector<float>> out;
    std::vector<moe_edge_product> products;

    experts(const std::vector<float> & x, int64_t n_rows, std::mt19937 & random) {
        std::normal_distribution<float> normal;
        std::vector<float> full(N_IN * N_OUT);
        for (const ggml_type type : TYPES) {
            for (float & v : full) {
                v = normal(random);
            }
            weights.emplace_back(ggml_row_size(type, N_IN) * N_OUT);
            ggml_quantize_chunk(type, full.data(), weights.back().data(), 0, N_OUT, N_IN, nullptr);
            out.emplace_back(N_OUT * n_rows, NAN);
            moe_edge_product & p = products.emplace_back();
            p = { weights.back().data(), type, N_IN, N_OUT, {}, {} };
            for (int64_t i = 0; i < n_rows; i++) {  // not contiguous and not in order
                const int64_t at = i * 7 % n_rows;
                p.x.push_back(x.data() + at * N_IN);
                p.out.push_back(out.back().data() + at * N_OUT);
            }
        }
    }
};

void compare(const experts & all, int64_t n_rows) {
    moe_edge_workers one(1);
    for (const moe_edge_product & p : all.products) {
        for (int64_t i = 0; i < n_rows; i++) {
            float alone[N_OUT];
            one.multiply({ { p.weights, p.type, N_IN, N_OUT, { p.x[i] }, { alone } } });
            if (n_rows <= FEW_ROWS) {
                if (memcmp(alone, p.out[i], sizeof(alone)) != 0) {
                    die("the row differs from the row alone", n_rows, i, p.type);
                }
                continue;
            }
            double error = 0, power = 0;
            for (int64_t k = 0; k < N_OUT; k++) {
                error += std::pow(p.out[i][k] - alone[k], 2);
                power += std::pow(alone[k], 2);
            }
            if (!(error <= NMSE_LIMIT * power)) {
                die("the row is not close to the row alone", n_rows, i, p.type);
            }
        }
    }
}

// Returns the minimum of five tries, in milliseconds, with at most `together` rows per product.
double least_ms(moe_edge_workers & workers, const moe_edge_product & p, size_t together) {
    std::vector<moe_edge_product> parts;
    for (size_t i = 0; i < p.x.size(); i += together) {
        const size_t end = std::min(p.x.size(), i + together);
        parts.push_back({ p.weights, p.type, p.n_in, p.n_out, { p.x.begin() + i, p.x.begin() + end }, { p.out.begin() + i, p.out.begin() + end } });
    }
    double least = INFINITY;
    for (int i = 0; i < 5; i++) {
        const auto t0 = std::chrono::steady_clock::now();
        workers.multiply(parts);
        least = std::min(least, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - t0).count());
    }
    return least;
}

// Times experts of the size of Qwen3-30B-A3B.
void time_them(std::mt19937 & random) {
    constexpr int64_t n_in = 2048, n_out = 768, most = 512;
    std::normal_distribution<float> normal;
    std::vector<float> x(n_in * most), full(n_in * n_out), out(n_out * most);
    std::generate(x.begin(), x.end(), [&] { return normal(random); });
    std::generate(full.begin(), full.end(), [&] { return normal(random); });
    moe_edge_workers one(1);
    for (const ggml_type type : TYPES) {
        std::vector<uint8_t> weights(ggml_row_size(type, n_in) * n_out);
        ggml_quantize_chunk(type, full.data(), weights.data(), 0, n_out, n_in, nullptr);
        for (const int64_t n_rows : { (int64_t) 16, (int64_t) 128, most }) {
            moe_edge_product p = { weights.data(), type, n_in, n_out, {}, {} };
            for (int64_t i = 0; i < n_rows; i++) {
                p.x.push_back(&x[i * n_in]);
                p.out.push_back(&out[i * n_out]);
            }
            const double alone = least_ms(one, p, FEW_ROWS), all = least_ms(one, p, n_rows);
            printf("%-5s %4lld rows: %7.2f ms one by one, %7.2f ms together, %.2f times\n", ggml_type_name(type),
                   (long long) n_rows, alone, all, alone / all);
        }
    }
}

}  // namespace

int main(int argc, char ** argv) {
    std::mt19937 random(1);
    if (argc > 1 && strcmp(argv[1], "time") == 0) {
        time_them(random);
        return 0;
    }
    std::normal_distribution<float> normal;
    std::vector<float> x(N_IN * MOST_ROWS);
    for (float & v : x) {
        v = normal(random);
    }
    moe_edge_workers three(3);
    for (const int64_t n_rows : { FEW_ROWS, FEW_ROWS + 1, (int64_t) 131, MOST_ROWS }) {
        const experts all(x, n_rows, random);
        three.multiply(all.products);
        compare(all, n_rows);
    }
    experts few(x, 1, random), many(x, 200, random);  // both kinds in one call
    few.products.insert(few.products.begin(), many.products.begin(), many.products.end());
    three.multiply(few.products);
    compare(many, 200);
    few.products.erase(few.products.begin(), few.products.begin() + many.products.size());
    compare(few, 1);
    printf("few rows: equal bits; many rows: equal except for rounding\n");
    return 0;
}
