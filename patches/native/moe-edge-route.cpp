// Implements the route hook. It adds a node, the route node, to the graph between the router of a layer and its
// experts. The node reports the selected experts to the store.

#include "moe-edge-hook.h"
#include "moe-edge-llama.h"
#include "moe-edge-util.h"

#include "llama-graph.h"

#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

namespace {

// The latest attention in the graph that this thread builds. The next MoE layer of the graph may compute token
// importance from it.
struct attention {
    const ggml_context * graph = nullptr;
    int           il      = 0;
    ggml_tensor * q       = nullptr;  // as passed to moe_edge_attention_hook
    ggml_tensor * k       = nullptr;
    ggml_tensor * mask    = nullptr;
    ggml_tensor * sinks   = nullptr;
    float         scale   = 0.0f;
    ggml_tensor * weights = nullptr;  // as passed to moe_edge_attention_weights
};
thread_local attention seen_attention;

// Records the MoE layers of a graph while this thread builds the graph only to reserve memory for it. Null while this
// thread builds a graph that will be computed, and at all other times.
thread_local moe_edge_reserve_hook * reserving;

float gate(int gating_op, float logit) {
    switch (gating_op) {
        case LLAMA_EXPERT_GATING_FUNC_TYPE_SIGMOID:
            return 1.0f / (1.0f + std::exp(-logit));
        case LLAMA_EXPERT_GATING_FUNC_TYPE_SQRT_SOFTPLUS:
            return std::sqrt(logit > 20.0f ? logit : std::log1p(std::exp(logit)));
        default:
            return logit;
    }
}

// Selects the experts of a layer from predicted router logits [n_expert], as the layer itself would. Writes
// n_expert_used experts and their scores, best first. If the layer uses fewer experts, the first expert is repeated
// with score 0.
void predict(const hook_layer & target, const float * logits, int32_t * ids_out, float * scores_out) {
    const auto & hp = target.model->model->hparams;
    const auto & store = *target.model->store;
    const int32_t n = store.n_expert;
    const int32_t k = std::min<int32_t>(hp.n_expert_used(store.il[target.layer]), store.n_expert_used);
    thread_local std::vector<float>   scores;
    thread_local std::vector<float>   choice;
    thread_local std::vector<int32_t> order;
    scores.resize(n);
    choice.resize(n);
    order.resize(n);

    const auto & bias = target.router_bias;
    const auto & pick = target.choice_bias;
    for (int32_t e = 0; e < n; e++) {
        scores[e] = gate(target.gating_op, logits[e] + (bias.empty() ? 0.0f : bias[e]));
    }
    const bool softmax = target.gating_op == LLAMA_EXPERT_GATING_FUNC_TYPE_SOFTMAX ||
                         target.gating_op == LLAMA_EXPERT_GATING_FUNC_TYPE_SOFTMAX_WEIGHT;
    if (softmax) {
        const float top = *std::max_element(scores.begin(), scores.end());
        float sum = 0.0f;
        for (float & s : scores) {
            s = std::exp(s - top);
            sum += s;
        }
        for (float & s : scores) {
            s /= sum;
        }
    }
    for (int32_t e = 0; e < n; e++) {
        choice[e] = scores[e] + (pick.empty() ? 0.0f : pick[e]);
    }
    if (hp.n_expert_groups > 1 && n % hp.n_expert_groups == 0) {
        // Keep only the experts of the n_group_used best groups. The value of a group is the sum of its two highest
        // selection scores.
        const int32_t per_group = n / hp.n_expert_groups;
        std::vector<std::pair<float, int32_t>> groups;
        for (int32_t g = 0; g < (int32_t) hp.n_expert_groups; g++) {
            float best = -INFINITY, second = -INFINITY;
            for (int32_t e = g * per_group; e < (g + 1) * per_group; e++) {
                if (choice[e] > best) {
                    second = best;
                    best = choice[e];
                } else {
                    second = std::max(second, choice[e]);
                }
            }
            groups.emplace_back(-(best + second), g);
        }
        std::sort(groups.begin(), groups.end());
        for (size_t i = hp.n_group_used; i < groups.size(); i++) {
            std::fill_n(choice.begin() + groups[i].second * per_group, per_group, -INFINITY);
        }
    }
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + k, order.end(),
        [&](int32_t a, int32_t b) { return choice[a] != choice[b] ? choice[a] > choice[b] : a < b; });
    for (int32_t i = 0; i < store.n_expert_used; i++) {
        ids_out[i]    = i < k ? order[i] : order[0];
        scores_out[i] = i < k ? scores[order[i]] : 0.0f;
    }
}

// The index of the op parameter in which a route node stores for how many of the following layers it predicts the
// experts (look-ahead).
constexpr int AHEAD_AT = MOE_EDGE_ROUTE_MARK_AT + 1;

// Returns for how many of the following layers the experts can be predicted from this layer's router input. The count
// ends before the first layer that cannot be predicted (its `router` is null).
int32_t ahead_layers(const hook_layer & layer) {
    const auto & layers = layer.model->layers;
    const int32_t most = std::min<int32_t>(layer.model->store->n_ahead, layers.size() - 1 - layer.layer);
    int32_t n = 0;
    while (n < most && layers[layer.layer + 1 + n].router) {
        n++;
    }
    return n;
}

// Returns the input [n_embd, T] from which the layer's router computed these logits. Returns null if other logits than
// the router's were passed.
ggml_tensor * router_input(const hook_layer & layer, const ggml_tensor * logits) {
    while (logits && logits->op == GGML_OP_ADD) {
        logits = logits->src[0];
    }
    const bool own = logits && logits->op == GGML_OP_MUL_MAT && logits->src[0] == layer.router;
    return own ? logits->src[1] : nullptr;
}

// The graph input with the indices of the tokens whose attention queries are used for token importance: the attention
// that each token receives. A graph can be reused for a micro-batch with the same number of such tokens.
class window_input : public llm_graph_input_i {
  public:
    window_input(const moe_edge_store & store, ggml_tensor * rows) : rows(rows), store(store) {}

    void set_input(const llama_ubatch *) override {
        for (int64_t head = 0; head < rows->ne[1]; head++) {
            ggml_backend_tensor_set(rows, store.step_batch().window.data(), head * rows->nb[1], rows->nb[1]);
        }
    }

    bool can_reuse(const llm_graph_params &) override {
        return (int64_t) store.step_batch().window.size() == rows->ne[0];
    }

    ggml_tensor * const rows;  // I32 [queries, heads], the same for each head

  private:
    const moe_edge_store & store;
};

// Computes token importance (DyMoE eq. 1) as a node of the graph: the attention that each token receives, summed over
// the queries and averaged over the heads. Writes it to dst [T]. src[0]: attention weights [n_kv, queries, heads].
// src[1]: KV cells of the batch's tokens, I64 [T].
void importance_node(ggml_tensor * dst, int ith, int nth, void *) {
    const ggml_tensor * attention = dst->src[0];
    const auto * cells = static_cast<const int64_t *>(dst->src[1]->data);
    const int64_t n_kv  = attention->ne[0];
    const int64_t n     = attention->ne[1] * attention->ne[2];
    const int64_t first = n_kv * ith / nth;
    const int64_t last  = n_kv * (ith + 1) / nth;
    thread_local std::vector<float> received;
    received.assign(last - first, 0.0f);
    for (int64_t row = 0; row < n; row++) {
        const auto * given = static_cast<const float *>(attention->data) + row * n_kv + first;
        for (int64_t i = 0; i < last - first; i++) {
            received[i] += given[i];
        }
    }
    auto * out = static_cast<float *>(dst->data);
    for (int64_t t = 0; t < dst->ne[0]; t++) {
        if (cells[t] >= first && cells[t] < last) {
            out[t] = received[cells[t] - first] / attention->ne[2];
        }
    }
}

// Implements moe_edge_route::decide. Reports the experts that a router has selected to the store, and sets the routing
// weights of skipped experts to 0.
//
// The sources of the route node, in this order:
// - the routing weights
// - the selected experts
// - the predicted router logits of following layers, one source for each of them
// - token importance, F32; optional
// - the indices of the tokens, I32; present if the layer computes only the tokens that have an output
int decide(moe_edge_route * route, const ggml_tensor * node, const moe_edge_routed & routed) {
    const auto & layer = *static_cast<const hook_layer *>(route);
    moe_edge_store & store = *layer.model->store;
    const int32_t k = node->src[1]->ne[0];
    const int32_t n = node->src[1]->ne[1];
    const int32_t stride = store.n_expert_used;
    float * out = routed.weights;
    if (k > stride || n > store.max_tokens) {
        return 0;  // a warm-up with all experts, or a batch larger than configured: use the default tier
    }

    auto & event = store.event;
    event.layer    = layer.layer;
    event.n_tokens = n;
    event.n_ahead  = 0;
    event.n_used   = k;
    for (int32_t t = 0; t < n; t++) {
        const auto * chosen = (const int32_t *) (static_cast<const char *>(routed.inputs[1]) + t * routed.selected_stride);
        std::fill(std::copy_n(chosen, k, &store.ids[t * stride]), &store.ids[t * stride] + stride, chosen[0]);
        std::fill(std::copy_n(out + t * k, k, &store.weights[t * stride]), &store.weights[t * stride] + stride, 0.0f);
    }
    std::iota(store.tokens.begin(), store.tokens.begin() + n, 0);
    event.has_importance = 0;
    const float * importance = nullptr;
    const int32_t n_ahead = node->op_params[AHEAD_AT];
    for (int i = 2; i < GGML_MAX_SRC && node->src[i]; i++) {
        const auto * values = static_cast<const float *>(routed.inputs[i]);
        if (node->src[i]->type == GGML_TYPE_I32) {
            memcpy(store.tokens.data(), values, n * sizeof(int32_t));
            continue;
        }
        if (event.n_ahead == n_ahead) {
            importance = values;
            continue;
        }
        const int32_t p = event.n_ahead++;
        const auto & target = layer.model->layers[layer.layer + 1 + p];
        for (int32_t t = 0; t < n; t++) {
            const size_t at = ((size_t) p * store.max_tokens + t) * stride;
            predict(target, values + (size_t) t * store.n_expert, &store.ahead_ids[at], &store.ahead[at]);
        }
    }
    store.describe_tokens();
    if (importance) {
        event.has_importance = 1;
        for (int32_t t = 0; t < n; t++) {
            store.importance[t] = importance[store.tokens[t]];
        }
    }
    if (!store.route()) {
        return -1;
    }

    const auto * tier = store.decision.tier;
    bool changed = false;
    for (int32_t t = 0; t < n; t++) {
        float all = 0.0f, kept = 0.0f;
        for (int32_t i = 0; i < k; i++) {
            float & w = out[t * k + i];
            all += w;
            if (tier[store.ids[t * stride + i]] == MOE_EDGE_SKIP) {
                w = 0.0f;
                changed = true;
            } else {
                kept += w;
            }
        }
        if (store.decision.renormalize && kept != all && kept > 0.0f) {
            for (int32_t i = 0; i < k; i++) {
                out[t * k + i] *= all / kept;
            }
        }
    }
    return changed;
}

// Runs the route node on the CPU.
void route_node(ggml_tensor * dst, int ith, int, void * userdata) {
    if (ith != 0) {
        return;
    }
    moe_edge_routed routed;
    for (int i = 0; i < GGML_MAX_SRC && dst->src[i]; i++) {
        routed.inputs[i] = dst->src[i]->data;
    }
    routed.selected_stride = dst->src[1]->nb[1];
    routed.weights = static_cast<float *>(dst->data);
    memcpy(dst->data, dst->src[0]->data, ggml_nbytes(dst->src[0]));
    decide(static_cast<moe_edge_route *>(userdata), dst, routed);
}

// Returns the graph input with the KV cells into which a layer writes the keys of this batch, I64 [T]. Returns null if
// the context's memory is not a KV cache.
ggml_tensor * key_cells(const llm_graph_context & graph, int il) {
    for (auto & input : graph.res->inputs) {
        if (auto * kv = dynamic_cast<llm_graph_input_attn_kv *>(input.get())) {
            return kv->get_k_idxs();
        }
        if (auto * k = dynamic_cast<llm_graph_input_attn_k *>(input.get())) {
            return k->get_k_idxs();
        }
        if (auto * iswa = dynamic_cast<llm_graph_input_attn_kv_iswa *>(input.get())) {
            return graph.hparams.is_swa(il) ? iswa->get_k_idxs_swa() : iswa->get_k_idxs();
        }
        if (auto * hybrid = dynamic_cast<llm_graph_input_mem_hybrid *>(input.get())) {
            return hybrid->get_attn()->get_k_idxs();
        }
    }
    return nullptr;
}

int64_t most_heads(const llm_graph_context & graph) {
    uint32_t most = 0;
    for (int64_t il = 0; il < graph.n_layer; il++) {
        most = std::max(most, graph.hparams.n_head(il));
    }
    return most;
}

// Returns the graph input with the indices of the tokens whose attention queries are used for token importance. Adds it
// to the graph if it does not exist, so that all layers of a graph share it. Its shape is I32 [queries, heads]. It
// repeats the indices for each head, because ggml_get_rows requires this.
ggml_tensor * window_rows(const llm_graph_context & graph, const moe_edge_store & store) {
    for (auto & input : graph.res->inputs) {
        if (auto * window = dynamic_cast<window_input *>(input.get())) {
            return window->rows;
        }
    }
    // While no step is running, the graph is built only to reserve memory. Then use the largest possible number of
    // queries.
    const int64_t most = std::min<int64_t>((int64_t) store.importance_window * graph.cparams.n_seq_max, graph.n_tokens);
    const int64_t n = store.step_batch().phases.empty() ? most : store.step_batch().window.size();
    ggml_tensor * rows = ggml_new_tensor_2d(graph.ctx0, GGML_TYPE_I32, n, most_heads(graph));
    ggml_set_input(rows);
    graph.res->add_input(std::make_unique<window_input>(store, rows));
    return rows;
}

// Adds nodes that compute attention weights [n_kv, queries, heads, 1] from an attention's inputs. rows: the indices of
// the queries.
ggml_tensor * weights_of(const llm_graph_context & graph, const attention & a, ggml_tensor * rows) {
    ggml_context * ctx = graph.ctx0;
    ggml_tensor * q = ggml_get_rows(ctx, a.q, ggml_view_2d(ctx, rows, rows->ne[0], a.q->ne[2], rows->nb[1], 0));
    ggml_tensor * mask = ggml_get_rows(ctx, a.mask, ggml_view_1d(ctx, rows, rows->ne[0], 0));
    ggml_tensor * kq = ggml_mul_mat(ctx, a.k, q);
    float scale = a.scale;
    if (graph.hparams.attn_soft_cap) {
        const float cap = graph.hparams.f_attn_logit_softcapping;
        const bool flash = graph.cparams.flash_attn;  // flash attention scales before it caps
        kq = ggml_scale(ctx, ggml_tanh(ctx, ggml_scale(ctx, kq, (flash ? scale : 1.0f) / cap)), cap);
        scale = flash ? 1.0f : scale;
    }
    kq = ggml_soft_max_ext(ctx, kq, mask, scale, graph.hparams.f_max_alibi_bias);
    ggml_soft_max_add_sinks(kq, a.sinks);
    return kq;
}

// Adds a node that computes the importance of the batch's tokens [T] for a MoE layer, from the latest attention.
// Returns null in a decode step, if the store does not use importance, or if importance cannot be computed in this
// graph.
ggml_tensor * importance(const llm_graph_context & graph, const moe_edge_store & store, int il) {
    const attention & a = seen_attention;
    const int32_t window = store.importance_window;
    if (window == 0 || graph.n_tokens < 2 || !store.in_prefill() || a.graph != graph.ctx0 || a.il > il) {
        return nullptr;
    }
    // Look for the KV cells before window_rows() adds a graph input. Without them no node would read that input, and
    // ggml would allocate no memory for it.
    ggml_tensor * cells = key_cells(graph, a.il);
    if (!cells) {
        return nullptr;
    }
    ggml_tensor * weights = a.weights;
    if (window > 0) {
        // Support only one stream of the KV cache (k->ne[3]), because each stream numbers its cells separately.
        weights = a.q && a.mask && a.k->ne[3] == 1 ? weights_of(graph, a, window_rows(graph, store)) : nullptr;
    }
    if (!weights || weights->ne[3] != 1) {
        return nullptr;
    }
    ggml_tensor * args[] = { weights, cells };
    ggml_tensor * scores = ggml_custom_4d(graph.ctx0, GGML_TYPE_F32, graph.n_tokens, 1, 1, 1, args, 2, importance_node,
        GGML_N_TASKS_MAX, nullptr);
    ggml_set_name(scores, "moe_edge_importance");
    return scores;
}

// Returns the graph input with the indices of the tokens that have an output, or null if the graph has no such input.
ggml_tensor * output_ids(const llm_graph_context & graph) {
    for (auto & input : graph.res->inputs) {
        if (auto * out_ids = dynamic_cast<llm_graph_input_out_ids *>(input.get())) {
            return out_ids->out_ids;
        }
    }
    return nullptr;
}

// Announces to the device the largest scratch memory that attention needs. Without flash attention, it holds the
// attention weights of a micro-batch. With flash attention and a quantized cache, it holds a layer's keys and values in
// half precision.
void expect_attention(const llm_graph_context & graph, moe_edge_device & device) {
    const auto & c = graph.cparams;
    uint64_t row = 0;  // values per position of the context
    if (!c.flash_attn) {
        row = (uint64_t) most_heads(graph) * c.n_ubatch;
    } else if (seen_attention.k && ggml_is_quantized(seen_attention.k->type)) {
        row = std::max(graph.hparams.n_embd_k_gqa_max(), graph.hparams.n_embd_v_gqa_max());
    }
    device.expect_scratch(sizeof(ggml_fp16_t) * c.n_ctx * row, c.flash_attn ? 2 : 1);
}

}  // namespace

void moe_edge_attention_hook(const llm_graph_context & graph, ggml_tensor * q, ggml_tensor * k, ggml_tensor * bias,
                             ggml_tensor * mask, ggml_tensor * sinks, float scale, int il) {
    seen_attention = { graph.ctx0, il, bias ? nullptr : q, k, mask, sinks, scale, nullptr };
}

void moe_edge_attention_weights(ggml_tensor * weights) {
    seen_attention.weights = weights;
}

moe_edge_reserve_hook::moe_edge_reserve_hook() { reserving = this; }

moe_edge_reserve_hook::~moe_edge_reserve_hook() { reserving = nullptr; }

bool moe_edge_reserve_hook::announced(const ggml_tensor * selected) const {
    return std::find(choices.begin(), choices.end(), selected) != choices.end();
}

ggml_tensor * moe_edge_route_hook(const llm_graph_context & graph, const ggml_tensor * experts, ggml_tensor * logits,
                                  ggml_tensor * selected, ggml_tensor * weights, int gating_op) {
    if (reserving) {
        reserving->announce(selected);
    }
    hook_layer * found = nullptr;
    {
        std::shared_lock<std::shared_mutex> lock(moe_edge_attached.mutex);
        const auto it = moe_edge_attached.by_experts.find(experts);
        if (it != moe_edge_attached.by_experts.end() && it->second->model->store->device) {
            expect_attention(graph, *it->second->model->store->device);
        }
        if (it == moe_edge_attached.by_experts.end()) {
            return weights;
        }
        found = it->second;
    }
    hook_layer & layer = *found;
    layer.gating_op = gating_op;
    ggml_tensor * x = router_input(layer, logits);
    if (!x || !layer.by_token.empty()) {
        layer.router = nullptr;  // happens while memory is reserved, before a graph is computed
    }
    if (graph.cparams.warmup || layer.model->store->runs_unwatched()) {
        return weights;
    }

    std::vector<ggml_tensor *> args = { weights, selected };
    auto & model = *layer.model;
    const int32_t n_ahead = x && x->ne[1] == selected->ne[1] ? ahead_layers(layer) : 0;
    for (int32_t p = 1; p <= n_ahead; p++) {
        args.push_back(ggml_mul_mat(graph.ctx0, model.layers[layer.layer + p].ahead_router, x));
    }
    if (ggml_tensor * scores = importance(graph, *model.store, model.store->il[layer.layer])) {
        args.push_back(scores);
    }
    if (layer.layer + 1 == model.store->n_layers) {
        seen_attention = {};  // the next attention belongs to another graph
    }
    ggml_tensor * out_ids = output_ids(graph);
    if (out_ids && out_ids->ne[0] == selected->ne[1] && selected->ne[1] < graph.n_tokens) {
        args.push_back(out_ids);
    }
    moe_edge_device * device = model.store->device;
    layer.device = device && device->runs_route_node() ? device : nullptr;
    layer.decide = decide;
    moe_edge_route * route = &layer;
    const auto * ne = weights->ne;
    const int64_t n_words = layer.device ? moe_edge_plan_words(selected->ne[0], selected->ne[1]) : 0;
    const auto new_node = [&](int64_t ne0, int64_t ne1, int64_t ne2) {
        return ggml_custom_4d(graph.ctx0, GGML_TYPE_F32, ne0, ne1, ne2, 1, args.data(), args.size(), route_node, 1, route);
    };
    ggml_tensor * routed = n_words > 0 ? new_node(ggml_nelements(weights) + n_words, 1, 1) : new_node(ne[0], ne[1], ne[2]);
    routed->op_params[AHEAD_AT] = n_ahead;
    moe_edge_mark_route(routed, route);
    ggml_set_name(routed, "moe_edge_route");
    return n_words > 0 ? ggml_view_3d(graph.ctx0, routed, ne[0], ne[1], ne[2], weights->nb[1], weights->nb[2], 0) : routed;
}
