// GGML_OP_MUL_MAT_ID with managed experts, compared with references:
//
//   one tier:    upstream's op on a plain tensor of the same bytes, bit for bit
//   mixed tiers: a plain dot product with the dequantized weights of each expert's tier,
//                within the error of 8-bit activations; skipped experts give 0
//   own layout:  slots in the layout of the CPU's repacked kernels: upstream's op on repacked weights, bit
//                for bit, or within that error for Q4_K with many tokens
//
// Cases cover types, batch sizes, numbers of threads, and slots so few that waves are needed.
//
//   executor_test DIR

#include "moe-edge.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace {

constexpr int64_t N_IN = 512, EXPERTS = 8, USED = 3;
int64_t N_OUT = 192;

[[noreturn]] void die(const std::string & sentence) {
    fprintf(stderr, "executor_test: %s\n", sentence.c_str());
    exit(1);
}

struct weights {
    std::vector<ggml_type> types;  // by tier
    std::vector<std::vector<uint8_t>> bytes;      // by tier, all experts
    std::vector<std::vector<float>> dequantized;  // by tier
    std::string path;

    weights(const std::string & dir, const std::vector<ggml_type> & types, std::mt19937 & random) : types(types), path(dir + "/experts.bin") {
        std::normal_distribution<float> normal(0.0f, 0.05f);
        std::vector<float> full(N_IN * N_OUT * EXPERTS);
        for (float & w : full) {
            w = normal(random);
        }
        FILE * f = fopen(path.c_str(), "wb");
        for (const ggml_type type : types) {
            std::vector<uint8_t> b(ggml_row_size(type, N_IN) * N_OUT * EXPERTS);
            ggml_quantize_chunk(type, full.data(), b.data(), 0, N_OUT * EXPERTS, N_IN, nullptr);
            std::vector<float> d(full.size());
            ggml_get_type_traits(type)->to_float(b.data(), d.data(), d.size());
            if (!f || fwrite(b.data(), 1, b.size(), f) != b.size()) {
                die("cannot write " + path);
            }
            bytes.push_back(std::move(b));
            dequantized.push_back(std::move(d));
        }
        fclose(f);
    }

    moe_edge_store * open(int32_t slots, bool own_layout = false) const {
        moe_edge_layer layer = {};
        std::vector<moe_edge_group> groups;
        uint64_t offset = 0, total = 0;
        for (size_t t = 0; t < types.size(); t++) {
            const uint64_t expert_bytes = bytes[t].size() / EXPERTS;
            const int32_t rows = own_layout && moe_edge_interleaves(types[t], N_IN, N_OUT) ? N_OUT : 0;
            layer.slices[MOE_EDGE_UP][t] = { offset, expert_bytes, 0, types[t], (int32_t) t, rows, nullptr, 0.0 };
            groups.push_back({ moe_edge_slot_bytes(4095, expert_bytes), slots, 0, MOE_EDGE_MISS_COPY, 0 });
            offset += bytes[t].size();
            total += groups.back().slot_bytes * slots;
        }
        const char * file = path.c_str();
        moe_edge_config config = {};
        config.files = &file;
        config.layers = &layer;
        config.groups = groups.data();
        config.budget_bytes = total;
        config.n_files = config.n_layers = 1;
        config.n_groups = config.n_tiers = types.size();
        config.n_expert = EXPERTS;
        config.n_expert_used = USED;
        config.max_tokens = 512;
        config.n_io_threads = 2;
        config.flags = MOE_EDGE_DIRECT_IO;
        char err[512];
        moe_edge_store * store = moe_edge_store_create(&config, err, sizeof(err));
        if (!store) {
            die(err);
        }
        return store;
    }
};

struct batch {
    int64_t tokens;
    int64_t x_slots;  // 1: up and gate, USED: down
    std::vector<float> x;
    std::vector<int32_t> ids;

    batch(int64_t tokens, int64_t x_slots, std::mt19937 & random) : tokens(tokens), x_slots(x_slots), x(N_IN * x_slots * tokens) {
        std::normal_distribution<float> normal;
        for (float & v : x) {
            v = normal(random);
        }
        for (int64_t t = 0; t < tokens; t++) {
            std::set<int32_t> chosen;
            while ((int64_t) chosen.size() < USED) {
                chosen.insert(random() % EXPERTS);
            }
            ids.insert(ids.end(), chosen.begin(), chosen.end());
        }
    }
};

// Returns the buffer type of upstream's repacked weights.
ggml_backend_buffer_type_t repacked() {
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    const auto extra = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu), "ggml_backend_dev_get_extra_bufts"));
    for (auto * buft = extra(cpu); buft && *buft; buft++) {
        if (strcmp(ggml_backend_buft_name(*buft), "CPU_REPACK") == 0) {
            return *buft;
        }
    }
    die("no CPU_REPACK");
}

// Runs the op on a backend. If store is null, a tensor with tier 0's bytes is in upstream's buffer.
std::vector<float> run(const weights & w, const batch & b, moe_edge_store * store, int threads,
                       ggml_backend_buffer_type_t upstream = ggml_backend_cpu_buffer_type()) {
    ggml_init_params params = { ggml_tensor_overhead() * 8 + ggml_graph_overhead(), nullptr, true };
    ggml_context * ctx_w = ggml_init(params);
    ggml_context * ctx   = ggml_init(params);
    ggml_tensor * experts = ggml_new_tensor_3d(ctx_w, w.types[0], N_IN, N_OUT, EXPERTS);
    auto * buft = store ? static_cast<ggml_backend_buffer_type_t>(moe_edge_buffer_type()) : upstream;
    ggml_backend_buffer_t buffer_w = ggml_backend_alloc_ctx_tensors_from_buft(ctx_w, buft);
    char err[512];
    if (store) {
        if (ggml_backend_buffer_get_size(buffer_w) > 4096) {
            die("a placeholder takes memory");
        }
        if (moe_edge_store_bind(store, 0, MOE_EDGE_UP, experts, err, sizeof(err)) != 0) {
            die(err);
        }
    } else {
        ggml_backend_tensor_set(experts, w.bytes[0].data(), 0, w.bytes[0].size());
    }
    ggml_tensor * x   = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, N_IN, b.x_slots, b.tokens);
    ggml_tensor * ids = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, USED, b.tokens);
    ggml_tensor * out = ggml_mul_mat_id(ctx, experts, x, ids);
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, out);
    ggml_backend_t cpu = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(cpu, threads);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, cpu);
    ggml_backend_tensor_set(x, b.x.data(), 0, ggml_nbytes(x));
    ggml_backend_tensor_set(ids, b.ids.data(), 0, ggml_nbytes(ids));
    std::vector<float> poison(ggml_nelements(out), NAN);
    ggml_backend_tensor_set(out, poison.data(), 0, ggml_nbytes(out));
    if (ggml_backend_graph_compute(cpu, graph) != GGML_STATUS_SUCCESS) {
        die("the graph failed");
    }
    std::vector<float> result(ggml_nelements(out));
    ggml_backend_tensor_get(out, result.data(), 0, ggml_nbytes(out));
    ggml_backend_buffer_free(buffer);
    ggml_backend_buffer_free(buffer_w);
    ggml_backend_free(cpu);
    ggml_free(ctx);
    ggml_free(ctx_w);
    return result;
}

std::vector<float> reference(const weights & w, const batch & b, const uint8_t * tier_of) {
    std::vector<float> out(N_OUT * USED * b.tokens);
    for (int64_t t = 0; t < b.tokens; t++) {
        for (int64_t k = 0; k < USED; k++) {
            const int32_t e = b.ids[t * USED + k];
            const float * x = &b.x[(t * b.x_slots + k % b.x_slots) * N_IN];
            for (int64_t row = 0; tier_of[e] != MOE_EDGE_SKIP && row < N_OUT; row++) {
                const float * r = &w.dequantized[tier_of[e]][(e * N_OUT + row) * N_IN];
                double sum = 0;
                for (int64_t i = 0; i < N_IN; i++) {
                    sum += (double) r[i] * x[i];
                }
                out[(t * USED + k) * N_OUT + row] = sum;
            }
        }
    }
    return out;
}

void apply(moe_edge_store * store, const batch & b, const uint8_t * tier_of) {
    std::vector<int32_t> distinct;
    std::vector<uint8_t> tiers;
    for (const int32_t e : std::set<int32_t>(b.ids.begin(), b.ids.end())) {
        distinct.push_back(e);
        tiers.push_back(tier_of[e]);
    }
    moe_edge_begin_step(store, b.tokens > 1 ? MOE_EDGE_PREFILL : MOE_EDGE_DECODE);
    if (moe_edge_apply(store, 0, distinct.data(), tiers.data(), nullptr, distinct.size()) != 0) {
        die(moe_edge_error(store));
    }
}

// Returns the NMSE. Exits if it exceeds upstream's limit for MUL_MAT_ID.
double nmse_of(const std::vector<float> & got, const std::vector<float> & want, const batch & b, const uint8_t * tier_of,
               const std::string & where) {
    double error = 0, power = 0;
    for (size_t i = 0; i < got.size(); i++) {
        if (want[i] == 0.0f && got[i] != 0.0f && tier_of[b.ids[i / N_OUT]] == MOE_EDGE_SKIP) {
            die("a skipped expert contributes: " + where);
        }
        error += (got[i] - want[i]) * (got[i] - want[i]);
        power += want[i] * want[i];
    }
    const double nmse = power > 0 ? error / power : 0;
    if (!(nmse < 5e-4)) {
        die("NMSE " + std::to_string(nmse) + ": " + where);
    }
    return nmse;
}

void check(moe_edge_store * store) {
    char err[512];
    if (moe_edge_check(store, err, sizeof(err)) != 0) {
        die(err);
    }
}

// Computes experts in their tiers with an empty store, and frees the store.
double nmse_of_mixed(const weights & w, const batch & b, moe_edge_store * mixed, const uint8_t * tier_of, int threads, const std::string & where) {
    apply(mixed, b, tier_of);
    const double nmse = nmse_of(run(w, b, mixed, threads), reference(w, b, tier_of), b, tier_of, where);
    check(mixed);
    moe_edge_store_free(mixed);
    return nmse;
}

// Experts in the CPU's own layout, if it has one. Upstream multiplies row by row. From four rows on
// we use its gemm, which sums in another order for Q4_K.
void test_own_layout(const std::string & dir, std::mt19937 & random) {
    const std::vector<std::vector<ggml_type>> tier_sets = {
        { GGML_TYPE_Q4_0, GGML_TYPE_Q8_0 },
        { GGML_TYPE_Q4_K, GGML_TYPE_Q2_K },
        { GGML_TYPE_IQ4_NL, GGML_TYPE_Q4_K },
        { GGML_TYPE_MXFP4, GGML_TYPE_Q4_0 },
        { GGML_TYPE_Q2_K, GGML_TYPE_MXFP4 },
    };
    int n = 0, n_own = 0, n_equal = 0;
    double worst = 0;
    for (const int64_t n_out : { 192, 584, 100 }) {  // 584 rows are two work units of gemm; 100 is not a multiple of 8
        N_OUT = n_out;
        for (const auto & types : tier_sets) {
            const weights w(dir, types, random);
            const bool own = moe_edge_interleaves(types[0], N_IN, N_OUT);
            n_own += own;
            if (own && n_out % 8 != 0) {
                die("an own layout although the rows are not a multiple of 8");
            }
            moe_edge_store * store = w.open(2, true);
            for (const int64_t tokens : { 1, 3, 4, 9, 200 }) {
                const batch b(tokens, n % 2 == 0 ? 1 : USED, random);
                const int threads = 1 + n % 3;
                const std::string where = std::string("own layout of ") + ggml_type_name(types[0]) + ", rows " + std::to_string(n_out) +
                    ", tokens " + std::to_string(tokens) + ", threads " + std::to_string(threads);
                const std::vector<uint8_t> best(EXPERTS, 0);
                apply(store, b, best.data());
                const auto got = run(w, b, store, threads);
                const bool equal = got == run(w, b, nullptr, 2, own ? repacked() : ggml_backend_cpu_buffer_type());
                if (!equal && (tokens < 4 || (types[0] != GGML_TYPE_Q4_K && types[0] != GGML_TYPE_Q2_K))) {
                    die("differs from upstream: " + where);
                }
                n_equal += equal;
                worst = std::max(worst, nmse_of(got, reference(w, b, best.data()), b, best.data(), where));

                uint8_t tier_of[EXPERTS];
                for (auto & t : tier_of) {
                    t = random() % types.size();
                }
                worst = std::max(worst, nmse_of_mixed(w, b, w.open(3, true), tier_of, threads, where));
                check(store);
                n++;
            }
            moe_edge_store_free(store);
        }
    }
    printf("own layout: %d of %zu matrices have one; %d of %d cases as upstream's repacked bits, worst NMSE %.2e\n", n_own, 3 * tier_sets.size(), n_equal, n, worst);
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 2) {
        die("usage: executor_test DIR");
    }
    std::mt19937 random(1);
    const std::vector<std::vector<ggml_type>> tier_sets = {
        { GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q2_K },
        { GGML_TYPE_Q4_K, GGML_TYPE_Q2_K },
        { GGML_TYPE_Q6_K, GGML_TYPE_Q3_K, GGML_TYPE_IQ4_NL },
        { GGML_TYPE_F16, GGML_TYPE_Q4_0, GGML_TYPE_Q2_0 },
        { GGML_TYPE_Q5_K, GGML_TYPE_IQ4_XS },
        { GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q3_K, GGML_TYPE_Q2_K },
    };
    int n = 0;
    double worst = 0;
    for (const auto & types : tier_sets) {
        const weights w(argv[1], types, random);
        for (const int32_t slots : { 8, 2, 1 }) {
            moe_edge_store * store = w.open(slots);
            for (const int64_t tokens : { 1, 2, 9, 33, 200 }) {
                for (const int64_t x_slots : { (int64_t) 1, USED }) {
                    const batch b(tokens, x_slots, random);
                    const int threads = 1 + n % 3;
                    const std::string where = std::string(ggml_type_name(types[0])) + ", slots " + std::to_string(slots) +
                        ", tokens " + std::to_string(tokens) + ", threads " + std::to_string(threads);

                    const std::vector<uint8_t> best(EXPERTS, 0);
                    apply(store, b, best.data());
                    if (run(w, b, store, threads) != run(w, b, nullptr, 2)) {
                        die("one tier differs from upstream: " + where);
                    }

                    uint8_t tier_of[EXPERTS];
                    for (auto & t : tier_of) {
                        const size_t pick = random() % (types.size() + 1);
                        t = pick == types.size() ? MOE_EDGE_SKIP : pick;
                    }
                    // start with an empty store, because a resident better tier would be reused
                    worst = std::max(worst, nmse_of_mixed(w, b, w.open(slots), tier_of, threads, where));
                    check(store);
                    n++;
                }
            }
            moe_edge_store_free(store);
        }
    }
    printf("%d cases, worst NMSE of a mixed case %.2e\n", n, worst);
    test_own_layout(argv[1], random);
    return 0;
}
