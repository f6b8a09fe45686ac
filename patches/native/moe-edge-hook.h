// What the store's parts inside llama.cpp share: the models that are attached to a store.

#pragma once

#include "moe-edge-store.h"

#include "llama-model.h"

#include "ggml-cpp.h"

#include <memory>
#include <shared_mutex>
#include <unordered_map>

struct hook_model;

// What the route hook needs of one MoE layer.
struct hook_layer {
    hook_model *  model;
    int32_t       layer;
    const ggml_tensor * experts = nullptr;  // its down matrices, by which graphs name it
    ggml_tensor * router;       // gate_inp [n_embd, n_expert]; null where none can be foreseen with
    ggml_tensor * ahead_router; // what earlier layers look ahead with: a copy in half precision, or the same
    std::vector<float> router_bias;  // [n_expert] or empty
    std::vector<float> choice_bias;  // [n_expert] added for the selection only, or empty
    std::vector<int32_t> by_token;   // [n_vocab, n_expert_used] where a token's id chooses its experts, or empty
    int           gating_op = LLAMA_EXPERT_GATING_FUNC_TYPE_SOFTMAX;
};

// A model whose experts a store serves.
struct hook_model {
    moe_edge_store *           store;
    const llama_model *        model;
    std::vector<hook_layer>    layers;  // [n_layers] of the store
    std::vector<ggml_tensor *> bound;   // their extra points into the store
    ggml_context_ptr           copies;  // of routers, for the look-ahead
    std::vector<ggml_backend_buffer_ptr> copy_buffers;
    // Graphs that were computed, and what of ours is in them: 0 nothing, 1 the route hook, 2 the
    // tokens' importance as well; a context keeps one or two.
    std::unordered_map<const void *, int> watched;

    hook_model(moe_edge_store * store, const llama_model & model) : store(store), model(&model) {}
    hook_model(const hook_model &) = delete;
    ~hook_model() {
        for (ggml_tensor * tensor : bound) {
            tensor->extra = nullptr;
        }
    }
};

// Written where a store or a model comes and goes, read while graphs are built and steps begin.
struct moe_edge_registry {
    std::shared_mutex mutex;
    std::unordered_map<const llama_model *, std::unique_ptr<hook_model>> models;
    std::unordered_map<const ggml_tensor *, hook_layer *> by_experts;
};

extern moe_edge_registry moe_edge_attached;
