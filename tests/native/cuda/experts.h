// Experts of one matrix in several types, routed tokens, and the expected result: a dot product in
// double precision with the dequantized weights.

#pragma once

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>
#include <string>
#include <vector>

// Upstream's limit for MUL_MAT_ID, over all rows. A single row may exceed it, because MMQ
// multiplies the weights' offsets with sums of the activations before rounding.
constexpr double NMSE_LIMIT = 5e-4, ROW_LIMIT = 1e-2;
constexpr int32_t SKIP = -1;

[[noreturn]] inline void die(const std::string & sentence) {
    fflush(stdout);
    fprintf(stderr, "%s\n", sentence.c_str());
    exit(1);
}

struct shape {
    int64_t n_in, n_out, experts, used;
};

struct expert_weights {
    shape s;
    std::vector<ggml_type> types;                 // by tier
    std::vector<std::vector<uint8_t>> bytes;      // by tier, all experts
    std::vector<std::vector<float>> dequantized;  // by tier

    expert_weights(const shape & s, const std::vector<ggml_type> & types, std::mt19937 & random) : s(s), types(types) {
        std::normal_distribution<float> normal(0.0f, 0.05f);
        std::vector<float> full(s.n_in * s.n_out * s.experts);
        const std::vector<float> even(s.n_in, 1.0f);
        for (const ggml_type type : types) {
            // The tiers have independent weights, so that a wrong tier is as wrong as a wrong
            // expert.
            for (float & w : full) {
                w = normal(random);
            }
            std::vector<uint8_t> b(ggml_row_size(type, s.n_in) * s.n_out * s.experts);
            ggml_quantize_chunk(type, full.data(), b.data(), 0, s.n_out * s.experts, s.n_in, even.data());
            std::vector<float> d(full.size());
            if (type == GGML_TYPE_F32) {
                d = full;
            } else {
                ggml_get_type_traits(type)->to_float(b.data(), d.data(), d.size());
            }
            bytes.push_back(std::move(b));
            dequantized.push_back(std::move(d));
        }
    }

    size_t expert_bytes(size_t tier) const { return bytes[tier].size() / s.experts; }
};

struct batch {
    int64_t tokens;
    int64_t x_slots;  // 1: up and gate, used: down
    std::vector<float> x;
    std::vector<int32_t> ids;

    batch(const shape & s, int64_t tokens, int64_t x_slots, std::mt19937 & random) : tokens(tokens), x_slots(x_slots), x(s.n_in * x_slots * tokens) {
        std::normal_distribution<float> normal;
        for (float & v : x) {
            v = normal(random);
        }
        for (int64_t t = 0; t < tokens; t++) {
            std::vector<int32_t> all(s.experts);
            for (int32_t e = 0; e < s.experts; e++) {
                all[e] = e;
            }
            std::shuffle(all.begin(), all.end(), random);
            ids.insert(ids.end(), all.begin(), all.begin() + s.used);
        }
    }

    std::vector<int32_t> distinct() const {
        const std::set<int32_t> found(ids.begin(), ids.end());
        return { found.begin(), found.end() };
    }
};

// Returns [tokens, used, n_out]. tier_of[e]: the tier of each expert, or SKIP.
inline std::vector<float> reference(const expert_weights & w, const batch & b, const std::vector<int32_t> & tier_of) {
    const shape & s = w.s;
    std::vector<float> out(s.n_out * s.used * b.tokens);
    for (int64_t t = 0; t < b.tokens; t++) {
        for (int64_t k = 0; k < s.used; k++) {
            const int32_t e = b.ids[t * s.used + k];
            const float * x = &b.x[(t * b.x_slots + k % b.x_slots) * s.n_in];
            for (int64_t row = 0; tier_of[e] != SKIP && row < s.n_out; row++) {
                const float * r = &w.dequantized[tier_of[e]][(e * s.n_out + row) * s.n_in];
                double sum = 0;
                for (int64_t i = 0; i < s.n_in; i++) {
                    sum += static_cast<double>(r[i]) * x[i];
                }
                out[(t * s.used + k) * s.n_out + row] = static_cast<float>(sum);
            }
        }
    }
    return out;
}

// Accumulates the error of several results. Exits at the first wrong row.
struct comparison {
    double error = 0, power = 0;

    void add(const expert_weights & w, const batch & b, const std::vector<int32_t> & tier_of, const std::vector<float> & got, const std::string & where) {
        const auto want = reference(w, b, tier_of);
        for (size_t r = 0; r < b.ids.size(); r++) {
            double row_error = 0, row_power = 0;
            for (int64_t i = 0; i < w.s.n_out; i++) {
                const double g = got[r * w.s.n_out + i], v = want[r * w.s.n_out + i];
                if (tier_of[b.ids[r]] == SKIP && g != 0) {
                    die("a skipped expert contributes: " + where);
                }
                row_error += (g - v) * (g - v);
                row_power += v * v;
            }
            if (!(row_error <= ROW_LIMIT * row_power)) {
                die("row " + std::to_string(r) + " of expert " + std::to_string(b.ids[r]) + ", tier " + std::to_string(tier_of[b.ids[r]]) +
                    ": NMSE " + std::to_string(row_error / row_power) + ": " + where);
            }
            error += row_error;
            power += row_power;
        }
    }

    double nmse(const std::string & where) const {
        if (!(error <= NMSE_LIMIT * power)) {
            die("NMSE " + std::to_string(error / power) + ": " + where);
        }
        return power > 0 ? error / power : 0;
    }
};

inline ggml_type type_of(const std::string & name) {
    for (int t = 0; t < GGML_TYPE_COUNT; t++) {
        const char * known = ggml_type_name(static_cast<ggml_type>(t));
        if (known && name == known) {
            return static_cast<ggml_type>(t);
        }
    }
    die("no such type: " + name);
}

// The op's tensors on a backend. The caller owns the weights.
struct op {
    ggml_context * ctx;
    ggml_tensor * x;
    ggml_tensor * ids;
    ggml_tensor * out;
    ggml_cgraph * graph;
    ggml_backend_buffer_t buffer;
    ggml_backend_t backend;

    op(ggml_backend_t backend, ggml_tensor * weights, int64_t used, int64_t x_slots, int64_t tokens) : backend(backend) {
        ggml_init_params params = { ggml_tensor_overhead() * 8 + ggml_graph_overhead(), nullptr, true };
        ctx   = ggml_init(params);
        x     = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, weights->ne[0], x_slots, tokens);
        ids   = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, used, tokens);
        out   = ggml_mul_mat_id(ctx, weights, x, ids);
        graph = ggml_new_graph(ctx);
        ggml_build_forward_expand(graph, out);
        buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
    }

    std::vector<float> run(const batch & b) {
        const std::vector<float> poison(ggml_nelements(out), NAN);
        ggml_backend_tensor_set(x, b.x.data(), 0, ggml_nbytes(x));
        ggml_backend_tensor_set(ids, b.ids.data(), 0, ggml_nbytes(ids));
        ggml_backend_tensor_set(out, poison.data(), 0, ggml_nbytes(out));
        if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) {
            die("the graph failed");
        }
        std::vector<float> result(ggml_nelements(out));
        ggml_backend_tensor_get(out, result.data(), 0, ggml_nbytes(out));
        return result;
    }

    ~op() {
        ggml_backend_buffer_free(buffer);
        ggml_free(ctx);
    }
};
