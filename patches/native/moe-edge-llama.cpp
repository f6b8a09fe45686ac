#include "moe-edge-llama.h"
#include "moe-edge-store.h"

#include "llama-graph.h"
#include "llama-model.h"

#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <shared_mutex>
#include <unordered_map>

namespace {

// Architectures whose every expert layer goes through llm_graph_context::build_moe_ffn.
const char * const ARCHITECTURES[] = {
    "qwen3moe", "qwen2moe", "olmoe", "llama", "deepseek", "deepseek2", "phimoe",
    "bailingmoe", "bailingmoe2", "dots1", "ernie4_5-moe", "exaone-moe", "glm4moe", "granitemoe",
    "hunyuan-moe", "minimax-m2", "gpt-oss", "qwen3next", "qwen35moe", "qwen3vlmoe",
};

const char * const TENSOR_KINDS[MOE_EDGE_N_KINDS] = { "up", "gate", "gate_up", "down" };

struct hook_model;

// What the hook needs of one MoE layer.
struct hook_layer {
    hook_model *  model;
    int32_t       layer;
    ggml_tensor * router;       // gate_inp [n_embd, n_expert]
    ggml_tensor * router_bias;  // [n_expert] or null
    ggml_tensor * choice_bias;  // [n_expert] added for the selection only, or null
    int           gating_op = LLAMA_EXPERT_GATING_FUNC_TYPE_SOFTMAX;
};

struct hook_model {
    moe_edge_store *        store;
    const llama_hparams *   hparams;
    std::vector<hook_layer> layers;  // [n_layers] of the store
    std::vector<ggml_tensor *> bound = {};  // their extra points into the store
};

// Written by attach and free, read while graphs are built.
struct {
    std::shared_mutex mutex;
    std::unordered_map<const moe_edge_store *, std::unique_ptr<hook_model>> models;
    std::unordered_map<const ggml_tensor *, hook_layer *> by_router;
} registry;

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

// The target layer's own selection on predicted logits [n_expert]: gating function,
// selection bias and expert groups. Writes the k best, best first, and their scores.
void predict(const hook_layer & target, const float * logits, int32_t k, int32_t * ids_out, float * scores_out) {
    const auto & hp = *target.model->hparams;
    const int32_t n = target.model->store->n_expert;
    thread_local std::vector<float>   scores;
    thread_local std::vector<float>   choice;
    thread_local std::vector<int32_t> order;
    scores.resize(n);
    choice.resize(n);
    order.resize(n);

    const auto * bias = target.router_bias ? static_cast<const float *>(target.router_bias->data) : nullptr;
    const auto * pick = target.choice_bias ? static_cast<const float *>(target.choice_bias->data) : nullptr;
    for (int32_t e = 0; e < n; e++) {
        scores[e] = gate(target.gating_op, logits[e] + (bias ? bias[e] : 0.0f));
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
        choice[e] = scores[e] + (pick ? pick[e] : 0.0f);
    }
    if (hp.n_expert_groups > 1 && n % hp.n_expert_groups == 0) {
        // only the groups with the best sum of their two best experts stay
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
    for (int32_t i = 0; i < k; i++) {
        ids_out[i]    = order[i];
        scores_out[i] = scores[order[i]];
    }
}

// The node: src[0] weights, src[1] selected, then one logits tensor for each look-ahead
// layer, then the output rows' token indices if this layer sees only those.
void route_node(ggml_tensor * dst, int ith, int, void * userdata) {
    if (ith != 0) {
        return;
    }
    const auto & layer = *static_cast<const hook_layer *>(userdata);
    moe_edge_store & store = *layer.model->store;
    const ggml_tensor * weights  = dst->src[0];
    const ggml_tensor * selected = dst->src[1];
    const int32_t k = selected->ne[0];
    const int32_t n = selected->ne[1];
    float * out = static_cast<float *>(dst->data);
    memcpy(out, weights->data, ggml_nbytes(weights));
    if (k != store.n_expert_used || n > store.max_tokens) {
        return;  // a warm-up over all experts, or a batch larger than announced: default tier
    }

    auto & event = store.event;
    event.layer    = layer.layer;
    event.n_tokens = n;
    event.n_ahead  = 0;
    for (int32_t t = 0; t < n; t++) {
        memcpy(&store.ids[t * k], static_cast<const char *>(selected->data) + t * selected->nb[1], k * sizeof(int32_t));
    }
    memcpy(store.weights.data(), weights->data, (size_t) n * k * sizeof(float));
    std::iota(store.tokens.begin(), store.tokens.begin() + n, 0);
    for (int i = 2; i < GGML_MAX_SRC && dst->src[i]; i++) {
        const ggml_tensor * src = dst->src[i];
        if (src->type == GGML_TYPE_I32) {
            memcpy(store.tokens.data(), src->data, n * sizeof(int32_t));
            continue;
        }
        const int32_t p = event.n_ahead++;
        const auto & target = layer.model->layers[layer.layer + 1 + p];
        for (int32_t t = 0; t < n; t++) {
            const size_t at = ((size_t) p * store.max_tokens + t) * k;
            predict(target, static_cast<const float *>(src->data) + (size_t) t * store.n_expert, k,
                    &store.ahead_ids[at], &store.ahead[at]);
        }
    }
    if (!store.route()) {
        return;
    }

    const auto * tier = store.decision.tier;
    for (int32_t t = 0; t < n; t++) {
        float all = 0.0f, kept = 0.0f;
        for (int32_t i = 0; i < k; i++) {
            float & w = out[t * k + i];
            all += w;
            if (tier[store.ids[t * k + i]] == MOE_EDGE_SKIP) {
                w = 0.0f;
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
}

// The tensor of output row indices, if the batch has fewer outputs than tokens.
ggml_tensor * output_ids(const llm_graph_context & graph) {
    for (auto & input : graph.res->inputs) {
        if (auto * out_ids = dynamic_cast<llm_graph_input_out_ids *>(input.get())) {
            return out_ids->out_ids;
        }
    }
    return nullptr;
}

void unbind(const hook_model & hook) {
    for (ggml_tensor * tensor : hook.bound) {
        tensor->extra = nullptr;
    }
}

void detach(const moe_edge_store * store) {
    std::unique_lock<std::shared_mutex> lock(registry.mutex);
    const auto it = registry.models.find(store);
    unbind(*it->second);
    for (auto & layer : it->second->layers) {
        registry.by_router.erase(layer.router);
    }
    registry.models.erase(it);
}

int refuse(char * err, size_t err_size, const char * fmt, const char * a, const char * b = "") {
    if (!err) {
        return -1;
    }
    snprintf(err, err_size, fmt, a, b);
    return -1;
}

}  // namespace

bool moe_edge_is_placeholder(const ggml_tensor * tensor) {
    return tensor->buffer && ggml_backend_buffer_get_type(tensor->buffer) == moe_edge_buffer_type();
}

ggml_tensor * moe_edge_route_hook(const llm_graph_context & graph, ggml_tensor * gate_inp, ggml_tensor * x,
                                  ggml_tensor * selected, ggml_tensor * weights, int gating_op) {
    hook_layer * found = nullptr;
    {
        std::shared_lock<std::shared_mutex> lock(registry.mutex);
        const auto it = registry.by_router.find(gate_inp);
        if (it == registry.by_router.end() || graph.cparams.warmup) {
            return weights;
        }
        found = it->second;
    }
    hook_layer & layer = *found;
    layer.gating_op = gating_op;

    std::vector<ggml_tensor *> args = { weights, selected };
    auto & layers = layer.model->layers;
    const size_t last = std::min<size_t>(layer.layer + layer.model->store->n_ahead, layers.size() - 1);
    for (size_t l = layer.layer + 1; l <= last; l++) {
        args.push_back(ggml_mul_mat(graph.ctx0, layers[l].router, x));
    }
    ggml_tensor * out_ids = output_ids(graph);
    if (out_ids && out_ids->ne[0] == selected->ne[1] && selected->ne[1] < graph.n_tokens) {
        args.push_back(out_ids);
    }
    ggml_tensor * routed = ggml_custom_4d(graph.ctx0, GGML_TYPE_F32, weights->ne[0], weights->ne[1], weights->ne[2], 1,
        args.data(), args.size(), route_node, 1, &layer);
    ggml_set_name(routed, "moe_edge_route");
    return routed;
}

// ---- C interface

int moe_edge_store_bind(moe_edge_store * store, int32_t layer, int32_t kind, void * operand, char * err, size_t err_size) {
    auto * tensor = static_cast<ggml_tensor *>(operand);
    if (!store->has_matrix(layer, kind, nullptr, 0)) {
        return refuse(err, err_size, "%s: the store has no such layer or kind%s", tensor->name);
    }
    if (!moe_edge_is_placeholder(tensor)) {
        return refuse(err, err_size, "%s was not loaded into the buffer type of moe_edge_buffer_type()%s", tensor->name);
    }
    for (int32_t t = 0; t < store->n_tiers; t++) {
        const auto & s = store->slices[layer][kind][t];
        const auto type = static_cast<ggml_type>(s.type);
        if (tensor->ne[2] != store->n_expert || tensor->ne[3] != 1 || tensor->ne[0] % ggml_blck_size(type) != 0 ||
            s.expert_bytes != ggml_row_size(type, tensor->ne[0]) * tensor->ne[1]) {
            return refuse(err, err_size, "%s: its shape does not fit the expert file's tier of type %s", tensor->name, ggml_type_name(type));
        }
    }
    tensor->extra = &store->matrices[layer][kind];
    return 0;
}

int moe_edge_store_attach(moe_edge_store * store, void * llama, char * err, size_t err_size) {
    auto & model = *static_cast<llama_model *>(llama);
    const std::string arch = model.arch_name();
    if (std::find(std::begin(ARCHITECTURES), std::end(ARCHITECTURES), arch) == std::end(ARCHITECTURES)) {
        return refuse(err, err_size, "architecture %s%s does not build its experts in the common way and cannot be managed", arch.c_str());
    }
    if (store->detach) {
        return refuse(err, err_size, "the store is attached to a model already%s%s", "");
    }
    auto hook = std::make_unique<hook_model>();
    hook->store   = store;
    hook->hparams = &model.hparams;
    for (int32_t l = 0; l < store->n_layers; l++) {
        const int32_t il = store->il[l];
        if (il < 0 || il >= (int32_t) model.layers.size() || !model.layers[il].ffn_gate_inp) {
            return refuse(err, err_size, "layer %s%s has no router", std::to_string(il).c_str());
        }
        const auto & layer = model.layers[il];
        for (const ggml_tensor * bias : { layer.ffn_gate_inp_b, layer.ffn_exp_probs_b }) {
            if (bias && (bias->type != GGML_TYPE_F32 || !ggml_backend_buffer_is_host(bias->buffer))) {
                return refuse(err, err_size, "%s: the look-ahead needs it in F32 in main memory%s", bias->name);
            }
        }
        hook->layers.push_back({ hook.get(), l, layer.ffn_gate_inp, layer.ffn_gate_inp_b, layer.ffn_exp_probs_b });
    }
    size_t placeholders = 0;
    for (const auto & [name, tensor] : model.tensors_by_name) {
        placeholders += moe_edge_is_placeholder(tensor);
    }
    for (int32_t l = 0; l < store->n_layers; l++) {
        for (int32_t k = 0; k < MOE_EDGE_N_KINDS; k++) {
            if (store->slices[l][k][0].expert_bytes == 0) {
                continue;
            }
            const std::string name = "blk." + std::to_string(store->il[l]) + ".ffn_" + TENSOR_KINDS[k] + "_exps.weight";
            auto * tensor = const_cast<ggml_tensor *>(model.get_tensor(name.c_str()));
            if (!tensor || moe_edge_store_bind(store, l, k, tensor, err, err_size) != 0) {
                unbind(*hook);
                return tensor ? -1 : refuse(err, err_size, "the model has no tensor %s%s", name.c_str());
            }
            hook->bound.push_back(tensor);
        }
    }
    if (hook->bound.size() != placeholders) {
        unbind(*hook);
        return refuse(err, err_size, "the model has expert tensors that the expert file does not list%s%s", "");
    }
    std::unique_lock<std::shared_mutex> lock(registry.mutex);
    for (auto & layer : hook->layers) {
        registry.by_router[layer.router] = &layer;
    }
    registry.models[store] = std::move(hook);
    store->detach = [store] { detach(store); };
    return 0;
}
