// Experts that are all resident, in any tier, and a graph that computes with them:
// down(silu(gate(x)) * up(x)).

#pragma once

#include "experts.h"
#include "gpu.h"

#include "moe-edge-device.h"
#include "moe-edge-table.h"
#include "moe-edge-workers.h"

#include <cstring>
#include <functional>
#include <memory>
#include <numeric>

// A matrix whose experts are all resident, in every tier.
class resident {
  public:
    resident(moe_edge_device * device, const expert_weights & w, int32_t kind) : device(device), w(w) {
        matrix.ops    = &operations;
        matrix.device = device;
        matrix.kind   = kind;
        matrix.store  = reinterpret_cast<moe_edge_store *>(this);
        matrix.table.resize(w.s.experts);
        for (size_t t = 0; t < w.types.size(); t++) {
            const uint64_t unit = ggml_is_quantized(w.types[t]) ? ggml_type_size(w.types[t]) : 256;
            const uint64_t past = ggml_is_quantized(w.types[t]) ? ggml_row_size(w.types[t], 512) : 0;
            // not as close as possible, so that offsets are not multiples of the index
            step.push_back((w.expert_bytes(t) + past + unit - 1) / unit * unit + 3 * unit);
            memory.push_back(static_cast<char *>(device->alloc(step[t] * w.s.experts)));
            bool pinned = false;
            host.push_back(device->alloc_host(w.bytes[t].size(), &pinned));
            memcpy(host[t], w.bytes[t].data(), w.bytes[t].size());
            for (int32_t e = 0; e < w.s.experts; e++) {
                tickets.push_back(device->copy(e % MOE_EDGE_N_LANES, memory[t] + e * step[t], host[t] + e * w.expert_bytes(t),
                                               w.expert_bytes(t), 0));
            }
            matrix.types.push_back(w.types[t]);
            matrix.base.push_back(memory[t]);
            most = std::max(most, w.expert_bytes(t));
        }
        bool pinned = false;
        nan = device->alloc_host(most, &pinned);
        memset(nan, 0xff, most);
    }

    ~resident() {
        matrix.executor.reset();
        for (size_t t = 0; t < memory.size(); t++) {
            device->release(memory[t]);
            device->release_host(host[t]);
        }
        device->release_host(nan);
    }

    void set(const std::vector<int32_t> & new_tiers) {
        tier_of = new_tiers;
        for (int32_t e = 0; e < w.s.experts; e++) {
            const int32_t t = tier_of[e];
            matrix.table[e] = {};
            if (t != SKIP) {
                matrix.table[e] = { memory[t] + e * step[t], w.types[t], 0 };
                if (fixed) {
                    device->wait(tickets[t * w.s.experts + e]);
                }
            }
        }
        matrix.version++;
    }

    // Copies some experts again, after bytes that are no numbers. An op that does not wait for the copies computes NaN.
    void copy_again(std::mt19937 & random) {
        for (size_t t = 0; t < memory.size(); t++) {
            for (int32_t e = 0; e < w.s.experts; e++) {
                if (random() % 2) {
                    const int32_t lane = random() % MOE_EDGE_N_LANES;
                    char * to = memory[t] + e * step[t];
                    const moe_edge_ticket wrong = device->copy(lane, to, nan, w.expert_bytes(t), 0);
                    tickets[t * w.s.experts + e] = device->copy(lane, to, host[t] + e * w.expert_bytes(t), w.expert_bytes(t), wrong);
                }
            }
        }
    }

    moe_edge_matrix matrix;
    std::vector<int32_t> tier_of;
    bool fixed = false;
    bool late  = false;  // next() returns one expert at a time
    int32_t odd = MOE_EDGE_MISS_COPY;  // how experts with an odd number are served
    std::vector<int32_t> hooked;  // the ids that a hook saw; empty without a hook
    int  begun = 0;
    bool missing = false;  // begin_layer() returns false

  private:
    static resident & of(moe_edge_matrix * m) { return *reinterpret_cast<resident *>(m->store); }

    moe_edge_ready ready_of(int32_t e) {
        const int32_t t = tier_of[e];
        return { matrix.table[e].data, e, matrix.table[e].type, t == SKIP ? 0 : tickets[t * w.s.experts + e] };
    }

    int32_t next(moe_edge_ready * out) {
        int32_t n = 0;
        while (!asked.empty() && (n == 0 || !late)) {
            const int32_t e = asked.back();
            asked.pop_back();
            const int32_t t = tier_of[e];
            out[n] = ready_of(e);
            if (odd != MOE_EDGE_MISS_COPY && e % 2 && t != SKIP) {
                out[n] = { host[t] + e * w.expert_bytes(t), e, w.types[t], 0, odd };
            }
            n++;
            held++;
        }
        if (n == 0) {
            die("the executor requests more experts than it began with");
        }
        return n;
    }

    moe_edge_device * device;
    const expert_weights & w;
    std::vector<uint64_t> step;
    std::vector<char *> memory, host;
    char * nan  = nullptr;
    size_t most = 0;  // bytes of an expert
    std::vector<moe_edge_ticket> tickets;  // [tiers, experts]
    std::vector<int32_t> asked;
    int held = 0;

    static const moe_edge_ops operations;
};

inline const moe_edge_ops resident::operations = {
    [](moe_edge_matrix * m, const int32_t * experts, int32_t n) {
        if (!of(m).asked.empty() || of(m).held != 0) {
            die("an op begins before the last one has released its experts");
        }
        of(m).asked.assign(experts, experts + n);
        of(m).begun++;
    },
    [](moe_edge_matrix * m, moe_edge_ready * out) { return of(m).next(out); },
    [](moe_edge_matrix * m, const moe_edge_ready * ready, int32_t n, moe_edge_ticket after) {
        of(m).held -= n;
        if (after == 0 && std::any_of(ready, ready + n, [](const moe_edge_ready & r) { return r.place != MOE_EDGE_MISS_COMPUTE; })) {
            die("released without a ticket: " + of(m).device->error());
        }
    },
    nullptr,  // wait is for executors on the host
    [](moe_edge_matrix * m) { return of(m).fixed; },
    nullptr,  // no hook either
    [](moe_edge_matrix * m, int32_t * out) {
        std::copy(of(m).hooked.begin(), of(m).hooked.end(), out);
        return of(m).hooked.empty() ? -1 : static_cast<int32_t>(of(m).hooked.size());
    },
    [](moe_edge_matrix *, const std::vector<moe_edge_product> & products, uint64_t) {
        static moe_edge_workers workers(2);
        workers.multiply(products);
    },
    [](moe_edge_matrix *, int32_t, uint64_t) {},
    [](moe_edge_matrix * const * matrices, int32_t n, std::vector<moe_edge_ready> * out) {
        for (int32_t i = 0; i < n; i++) {
            resident & r = of(matrices[i]);
            if (r.missing) {
                return false;
            }
            if (r.held != 0) {
                die("a layer begins before its last ops have released their experts");
            }
        }
        for (int32_t i = 0; i < n; i++) {
            resident & r = of(matrices[i]);
            for (const int32_t e : r.hooked) {
                out[i].push_back(r.ready_of(e));
            }
            r.held = r.hooked.size();
        }
        return true;
    },
};

// The route node of a test. Its decision sets the weights of skipped experts to 0.
struct test_route : moe_edge_route {
    std::vector<resident *> of_layer;
    std::vector<int32_t> selected;  // as the node has reported them
    std::vector<float>   weights, ahead;
    bool fails = false;
    std::function<void()> loads = [] {};  // called at each decision

    test_route(moe_edge_device * on, const std::vector<resident *> & m) : of_layer(m) {
        device = on;
        for (resident * r : m) {
            matrices[r->matrix.kind] = &r->matrix;
        }
        decide = [](moe_edge_route * route, const ggml_tensor * node, const moe_edge_routed & routed) {
            auto & own = *static_cast<test_route *>(route);
            const ggml_tensor * ids = node->src[1];
            own.selected.clear();
            for (int64_t t = 0; t < ids->ne[1]; t++) {
                const auto * row = reinterpret_cast<const int32_t *>(static_cast<const char *>(routed.inputs[1]) + t * routed.selected_stride);
                own.selected.insert(own.selected.end(), row, row + ids->ne[0]);
            }
            own.weights.assign(routed.weights, routed.weights + own.selected.size());
            const auto * values = static_cast<const float *>(routed.inputs[2]);
            own.ahead.assign(values, values + ggml_nelements(node->src[2]));
            own.loads();
            int changed = 0;
            for (size_t i = 0; i < own.selected.size(); i++) {
                if (own.of_layer[0]->tier_of[own.selected[i]] == SKIP) {
                    routed.weights[i] = 0;
                    changed = 1;
                }
            }
            return own.fails ? -1 : changed;
        };
    }
};

// The graph of down(silu(gate(x)) * up(x)). With a route, it begins with a route node, and `routed` has its weights.
// apart: an op between gate and its activation prevents their fusion.
struct feed_forward {
    ggml_context * weights_ctx;
    ggml_context * ctx;
    ggml_tensor * weights[3];  // gate, up, down
    ggml_tensor * x;
    ggml_tensor * ids;
    ggml_tensor * glu;
    ggml_tensor * out;
    ggml_tensor * router = nullptr;  // the weights before the route node
    ggml_tensor * ahead  = nullptr;
    ggml_tensor * routed = nullptr;
    ggml_cgraph * graph;
    ggml_backend_buffer_t placeholders, buffer;
    const gpu & g;

    feed_forward(const gpu & g, const std::vector<resident *> & m, const std::vector<const expert_weights *> & w, int64_t tokens,
                 test_route * route = nullptr, bool apart = false) : g(g) {
        const shape & s = w[0]->s;
        ggml_init_params params = { ggml_tensor_overhead() * 24 + ggml_graph_overhead(), nullptr, true };
        weights_ctx = ggml_init(params);
        for (size_t i = 0; i < 3; i++) {
            weights[i] = ggml_new_tensor_3d(weights_ctx, w[i]->types[0], w[i]->s.n_in, w[i]->s.n_out, s.experts);
        }
        placeholders = ggml_backend_alloc_ctx_tensors_from_buft(weights_ctx, g.placeholders);
        for (size_t i = 0; i < 3; i++) {
            weights[i]->extra = &m[i]->matrix;
        }
        ctx = ggml_init(params);
        x   = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, s.n_in, 1, tokens);
        graph = ggml_new_graph(ctx);
        if (route) {
            // as argsort, whose first columns are the selection
            ids    = ggml_view_2d(ctx, ggml_new_tensor_2d(ctx, GGML_TYPE_I32, s.experts, tokens), s.used, tokens, s.experts * sizeof(int32_t), 0);
            router = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, 1, s.used, tokens);
            ahead  = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, s.experts, tokens);
            ggml_tensor * sources[] = { router, ids, ahead };
            const int64_t n = ggml_nelements(router);
            ggml_tensor * node = ggml_custom_4d(ctx, GGML_TYPE_F32, n + moe_edge_plan_words(s.used, tokens), 1, 1, 1, sources, 3,
                [](ggml_tensor *, int, int, void *) { die("the CPU runs a route node"); }, 1, route);
            moe_edge_mark_route(node, route);
            routed = ggml_view_3d(ctx, node, 1, s.used, tokens, router->nb[1], router->nb[2], 0);
            ggml_build_forward_expand(graph, routed);
        } else {
            ids = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, s.used, tokens);
        }
        ggml_tensor * gate = ggml_mul_mat_id(ctx, weights[0], x, ids);
        ggml_tensor * up   = ggml_mul_mat_id(ctx, weights[1], x, ids);
        glu   = ggml_swiglu_split(ctx, apart ? ggml_scale(ctx, gate, 1.0f) : gate, up);
        out   = ggml_mul_mat_id(ctx, weights[2], glu, ids);
        ggml_build_forward_expand(graph, out);
        buffer = ggml_backend_alloc_ctx_tensors(ctx, g.backend);
    }

    void run(const batch & b) {
        const std::vector<float> poison(std::max(ggml_nelements(glu), ggml_nelements(out)), NAN);
        ggml_backend_tensor_set(x, b.x.data(), 0, ggml_nbytes(x));
        for (int64_t t = 0; t < ids->ne[1]; t++) {
            ggml_backend_tensor_set(ids, &b.ids[t * ids->ne[0]], t * ids->nb[1], ids->ne[0] * sizeof(int32_t));
        }
        if (router) {
            std::vector<float> values(ggml_nelements(ahead));
            std::iota(values.begin(), values.end(), 1.0f);
            ggml_backend_tensor_set(ahead, values.data(), 0, ggml_nbytes(ahead));
            ggml_backend_tensor_set(router, values.data(), 0, ggml_nbytes(router));
        }
        ggml_backend_tensor_set(glu, poison.data(), 0, ggml_nbytes(glu));
        ggml_backend_tensor_set(out, poison.data(), 0, ggml_nbytes(out));
        if (ggml_backend_graph_compute(g.backend, graph) != GGML_STATUS_SUCCESS) {
            die("the graph failed");
        }
    }

    static std::vector<float> read(const ggml_tensor * t) {
        std::vector<float> values(ggml_nelements(t));
        ggml_backend_tensor_get(t, values.data(), 0, ggml_nbytes(t));
        return values;
    }

    ~feed_forward() {
        ggml_backend_buffer_free(buffer);
        ggml_backend_buffer_free(placeholders);
        ggml_free(ctx);
        ggml_free(weights_ctx);
    }
};

inline std::vector<int32_t> decide(const expert_weights & w, std::mt19937 & random) {
    std::vector<int32_t> tier_of(w.s.experts);
    for (int32_t & t : tier_of) {
        const size_t pick = random() % (w.types.size() * 2 + 1);
        t = pick == w.types.size() * 2 ? SKIP : static_cast<int32_t>(pick / 2);
    }
    return tier_of;
}

inline comparison downs;  // over all cases of a pair of tiers, because one case has too few rows for the limit

// Compares the GLU and the output of a graph with references that use its own inputs.
inline void check(const feed_forward & f, const std::vector<const expert_weights *> & w, const std::vector<resident *> & m, const batch & b,
           const std::string & where) {
    const auto gate = reference(*w[0], b, m[0]->tier_of), up = reference(*w[1], b, m[1]->tier_of);
    const auto got = feed_forward::read(f.glu);
    double error = 0, power = 0;
    for (size_t i = 0; i < got.size(); i++) {
        const double want = gate[i] / (1 + std::exp(-double(gate[i]))) * up[i];
        error += (got[i] - want) * (got[i] - want);
        power += want * want;
        if (want == 0 && got[i] != 0) {
            die("a skipped expert contributes to the GLU: " + where);
        }
    }
    // a product of two results has twice the error
    if (!(error <= 2 * NMSE_LIMIT * power)) {
        die("GLU: NMSE " + std::to_string(error / power) + ": " + where);
    }
    batch middle = b;
    middle.x       = got;
    middle.x_slots = w[0]->s.used;
    downs.add(*w[2], middle, m[2]->tier_of, feed_forward::read(f.out), where);
}

struct counted {
    uint64_t glus, graphs, reads;
    explicit counted(const gpu & g)
        : glus(g.launches("unary_gated_op_kernel")), graphs(g.launches("cudaGraphLaunch")), reads(g.launches("cudaMemcpy2DAsync")) {}
};

inline void expect(bool true_one, const std::string & sentence) {
    if (!true_one) {
        die(sentence);
    }
}

// gate, up and down of one layer.
struct layer {
    std::vector<std::unique_ptr<resident>> own;
    std::vector<resident *> m;
    std::vector<moe_edge_matrix *> matrices;

    layer(const gpu & g, const std::vector<const expert_weights *> & w, bool fixed) {
        for (size_t i = 0; i < 3; i++) {
            own.push_back(std::make_unique<resident>(g.device, *w[i], i == 0 ? MOE_EDGE_GATE : i == 1 ? MOE_EDGE_UP : MOE_EDGE_DOWN));
            m.push_back(own.back().get());
            m[i]->fixed = fixed;
            matrices.push_back(&m[i]->matrix);
        }
    }

    void set(const std::vector<int32_t> & tier_of) {
        for (resident * r : m) {
            r->set(tier_of);
        }
    }
};
