// Declares the functions that the patched llama.cpp calls. They do nothing for a model without a store.

#pragma once

#include "ggml.h"

#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

struct hook_model;
struct llama_context;
struct llama_model;
struct llama_ubatch;
struct llm_graph_context;
class  moe_edge_threads;
class  llm_graph_result;
struct llama_model_loader;

// Called by the model loader with `weights`, its map of tensors by name. An expert file can store each expert tensor in
// several precisions (tiers). Removes all precisions except the best from the map. Only the store reads them, so the
// loader must neither count nor load them.
template <typename Map> void moe_edge_drop_lower_tiers(Map & weights) {
    for (auto it = weights.begin(); it != weights.end();) {
        it = it->first.find(".moe_edge.") != std::string::npos ? weights.erase(it) : std::next(it);
    }
}

// Called by the model loader. Returns whether a graph reads only single rows of this tensor, so that the tensor can
// stay on disk. This is the case for the token embedding of a model with a store, unless the model also uses it as the
// output matrix.
bool moe_edge_reads_rows(const llama_model_loader & loader, const std::string & name);

// Called by the model loader. Returns whether a tensor is a placeholder: a tensor without memory, whose data the store
// reads instead of the loader.
bool moe_edge_is_placeholder(const ggml_tensor * tensor);

// Called after the tensors of a model are loaded. If the expert tensors are placeholders, attaches the store that waits
// for a model. Throws an exception if no store waits, or if the tensors do not match the store.
void moe_edge_model_loaded(const llama_model & model);

// Called before the tensors of a model are destroyed. Detaches the model's store, so that the next model that is loaded
// can take the store.
void moe_edge_model_freed(const llama_model & model);

// Created by llama_context before it computes a batch of n_tokens tokens or restores a state of n_bytes bytes. The
// constructor calls the application's room callback, which makes memory available, and sets the size of the
// micro-batches. The destructor restores that size.
class moe_edge_room_hook {
  public:
    explicit moe_edge_room_hook(llama_context & ctx, uint32_t n_tokens, uint64_t n_bytes = 0);
    moe_edge_room_hook(const moe_edge_room_hook &) = delete;
    ~moe_edge_room_hook();

    bool good() const { return result == 0; }
    // Returns the result for llama_decode: 0 if the batch can be computed, 2 if it was cancelled, or -3 if it fails.
    // After a failure, moe_edge_error() returns the reason.
    int32_t status() const { return result; }

  private:
    void lay_out(uint32_t & laid_out);
    void refuse(const std::string & sentence);

    llama_context & ctx;
    const uint32_t  n_ubatch;  // the context's own value
    int32_t         result = 0;
};

// Created by llama_context before it computes a micro-batch, and destroyed afterwards. Each micro-batch is one step of
// the store.
class moe_edge_step_hook {
  public:
    // Begins the step. The step ends early if the store, or the context's own abort callback, requests it.
    moe_edge_step_hook(llama_context & ctx, const llama_ubatch & ubatch);
    moe_edge_step_hook(const moe_edge_step_hook &) = delete;
    ~moe_edge_step_hook();

    // Returns whether the graph of an earlier step can be reused: whether that graph contains the same hooks (route
    // hook, token importance) that this step needs.
    bool may_reuse(const llm_graph_result * graph) const;

    // Ends the step after its graph was computed. status: the result of computing the graph. Returns the result of the
    // step, which is also a failure if the store or the logits have an error.
    ggml_status done(const llm_graph_result * graph, ggml_status status);

  private:
    // Checks the logits that were requested. Returns one sentence if a row contains NaN or no finite value, otherwise
    // an empty string.
    std::string check_logits(const llm_graph_result * graph) const;
    static bool should_stop(void * step);
    void        set_abort_callback(ggml_abort_callback callback, void * data) const;

    const llama_context & ctx;
    hook_model *          model = nullptr;
    moe_edge_threads *    threads;       // null: the context's own number of threads
    const int32_t         n_tokens;
    int                   watched  = 0;  // the hooks in its graph, as in hook_model
    uint64_t              began_us = 0;
};

// Called when an attention is added to a graph, with its inputs after their permutation: q [d, T, heads, streams] and k
// [d, n_kv, kv heads, streams]. Records the inputs, so that token importance (DyMoE eq. 1) can be computed from them.
void moe_edge_attention_hook(const llm_graph_context & graph, ggml_tensor * q, ggml_tensor * k, ggml_tensor * bias,
                             ggml_tensor * mask, ggml_tensor * sinks, float scale, int il);
// Called when an attention that is not flash attention is added to a graph, with its weights [n_kv, T, heads, streams].
// Records the weights, so that token importance can be computed from them.
void moe_edge_attention_weights(ggml_tensor * weights);

// Called for each MoE layer of a graph, between its router and its experts. Adds a node that reports the selected
// experts to the store. Returns the routing weights to use: `weights`, but 0 for experts that are skipped.
//
// experts: the layer's down matrices. logits: F32 [n_expert, T], or null. selected: I32 [k, T], k experts for each of T
// tokens. weights: F32 [1, k, T]. gating_op: enum llama_expert_gating_func_type.
ggml_tensor * moe_edge_route_hook(const llm_graph_context & graph, const ggml_tensor * experts, ggml_tensor * logits,
                                  ggml_tensor * selected, ggml_tensor * weights, int gating_op);

// Created by llama_context before it builds a graph only to reserve memory, and destroyed afterwards. Records which
// tensors of selected experts are passed to moe_edge_route_hook, so that built() can check the graph.
class moe_edge_reserve_hook {
  public:
    moe_edge_reserve_hook();
    moe_edge_reserve_hook(const moe_edge_reserve_hook &) = delete;
    ~moe_edge_reserve_hook();

    // Checks the complete graph, and throws an exception if the store cannot serve it. Only ggml_mul_mat_id may read
    // the experts of a store. Its ids must have been passed to moe_edge_route_hook as selected experts.
    void built(ggml_cgraph * graph) const;

    void announce(const ggml_tensor * selected) { choices.push_back(selected); }
    bool announced(const ggml_tensor * selected) const;

  private:
    std::vector<const ggml_tensor *> choices;
};
