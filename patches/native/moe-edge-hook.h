// Defines the records of models whose experts are in a store. All hooks inside llama.cpp use these records.

#pragma once

#include "moe-edge-store.h"

#include "llama-model.h"

#include "ggml-cpp.h"

#include <memory>
#include <shared_mutex>
#include <unordered_map>

struct hook_model;

// A MoE layer of a model, with the tensors and tables that the route hook uses. The route hook adds a node after the
// layer's router, in which the store decides about the layer's experts.
struct hook_layer : moe_edge_route {
    hook_model *  model   = nullptr;
    int32_t       layer   = 0;
    const ggml_tensor * experts = nullptr;  // its down matrices, which identify the layer in graphs
    // gate_inp [n_embd, n_expert]; null if predictions for this layer are not possible
    ggml_tensor * router       = nullptr;
    ggml_tensor * ahead_router = nullptr;  // used for the look-ahead: a copy of `router` in half precision, or `router`
    std::vector<float> router_bias;  // [n_expert] or empty
    std::vector<float> choice_bias;  // [n_expert] added for the selection only, or empty
    std::vector<int32_t> by_token;   // [n_vocab, n_expert_used] experts of each token id; empty if a router selects
    int           gating_op = LLAMA_EXPERT_GATING_FUNC_TYPE_SOFTMAX;
};

// A model whose experts are in a store.
struct hook_model {
    moe_edge_store *           store;
    const llama_model *        model;
    std::vector<hook_layer>    layers;  // [n_layers] of the store
    std::vector<ggml_tensor *> bound;   // tensors whose `extra` points into the store
    ggml_context_ptr           copies;  // copies of the routers, for the look-ahead
    std::vector<ggml_backend_buffer_ptr> copy_buffers;
    // The hooks in each graph that was computed, by the address of its llm_graph_result. 0: none. 1: the route hook,
    // which lets the store decide about the experts of each layer. 2: also the hooks that compute token importance.
    std::unordered_map<const void *, int> watched;

    hook_model(moe_edge_store * store, const llama_model & model) : store(store), model(&model) {}
    hook_model(const hook_model &) = delete;
    ~hook_model() {
        for (ggml_tensor * tensor : bound) {
            tensor->extra = nullptr;
        }
    }
};

// All models that have a store. The list changes when a store or a model is created or destroyed.
struct moe_edge_registry {
    std::shared_mutex mutex;
    std::unordered_map<const llama_model *, std::unique_ptr<hook_model>> models;
    std::unordered_map<const ggml_tensor *, hook_layer *> by_experts;
};

extern moe_edge_registry moe_edge_attached;
