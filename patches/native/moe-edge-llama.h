// The functions that the patched llama.cpp calls. Each does nothing for a model without a store.

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

// Model loader: removes the lower tiers of an expert file, which the loader must neither count nor load because they
// are not tensors of the model. weights: a map from tensor names.
template <typename Map> void moe_edge_drop_lower_tiers(Map & weights) {
    for (auto it = weights.begin(); it != weights.end();) {
        it = it->first.find(".moe_edge.") != std::string::npos ? weights.erase(it) : std::next(it);
    }
}

// Model loader: returns whether graphs read only individual rows of this tensor, so that it can stay on disk in a
// managed model. This is the token embedding, unless it is also the output.
bool moe_edge_reads_rows(const llama_model_loader & loader, const std::string & name);

// Model loader: returns whether a tensor is a placeholder. The store reads its data, not the loader.
bool moe_edge_is_placeholder(const ggml_tensor * tensor);

// Model: called after its tensors are loaded. Attaches the store that waits for it. Throws an exception with one
// sentence if no store waits for the managed tensors, or if they do not match the store. A model without memory takes
// no store.
void moe_edge_model_loaded(const llama_model & model);

// Model: called before its tensors are destroyed. Its store waits for another model afterwards.
void moe_edge_model_freed(const llama_model & model);

// Context: exists while a batch of n_tokens is computed, or while a state of n_bytes is restored into the cache. The
// constructor asks the room callback for memory. The callback also sets the micro-batch size for this batch.
class moe_edge_room_hook {
  public:
    explicit moe_edge_room_hook(llama_context & ctx, uint32_t n_tokens, uint64_t n_bytes = 0);
    moe_edge_room_hook(const moe_edge_room_hook &) = delete;
    ~moe_edge_room_hook();

    bool good() const { return result == 0; }
    // Returns the result for llama_decode: 0 if there is memory; 2 if the batch was cancelled; -3 if it fails, in which
    // case the store has the reason.
    int32_t status() const { return result; }

  private:
    void lay_out(uint32_t & laid_out);
    void refuse(const std::string & sentence);

    llama_context & ctx;
    const uint32_t  n_ubatch;  // the context's own value
    int32_t         result = 0;
};

// Context: one step of the store, around the computation of one micro-batch.
class moe_edge_step_hook {
  public:
    // Begins the step. From now on, it stops early if the store or the context's own abort callback requests it.
    moe_edge_step_hook(llama_context & ctx, const llama_ubatch & ubatch);
    moe_edge_step_hook(const moe_edge_step_hook &) = delete;
    ~moe_edge_step_hook();

    // Whether the graph of an earlier step can be reused: it contains the same hooks.
    bool may_reuse(const llm_graph_result * graph) const;

    // Ends the computation with the graph's status. Returns the status of the step.
    ggml_status done(const llm_graph_result * graph, ggml_status status);

  private:
    // Returns one sentence if a row of requested logits contains NaN or has no finite value; otherwise an empty string.
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

// Graph: record the inputs of token importance (DyMoE eq. 1) for the expert layers after an attention. The first
// function is called before the attention, with q [d, T, heads, streams] and k [d, n_kv, kv heads, streams] after their
// permutation. The second is called if it is not flash attention, with its weights [n_kv, T, heads, streams]. Neither
// adds nodes to the graph; moe_edge_route_hook does, if the store asks for importance.
void moe_edge_attention_hook(const llm_graph_context & graph, ggml_tensor * q, ggml_tensor * k, ggml_tensor * bias,
                             ggml_tensor * mask, ggml_tensor * sinks, float scale, int il);
void moe_edge_attention_weights(ggml_tensor * weights);

// Graph: called after the routing weights of a MoE layer and before its experts. Returns the weights to use: the same
// values, or 0 for skipped experts.
//   experts: the layer's down matrices; logits: F32 [n_expert, T], or null
//   selected: I32 [k, T]; weights: F32 [1, k, T]; gating_op: llama_expert_gating_func_type
ggml_tensor * moe_edge_route_hook(const llm_graph_context & graph, const ggml_tensor * experts, ggml_tensor * logits,
                                  ggml_tensor * selected, ggml_tensor * weights, int gating_op);

// Context: exists while a graph is built only to reserve memory, with or without a store. moe_edge_route_hook announces
// each MoE layer of the graph to it.
class moe_edge_reserve_hook {
  public:
    moe_edge_reserve_hook();
    moe_edge_reserve_hook(const moe_edge_reserve_hook &) = delete;
    ~moe_edge_reserve_hook();

    // Throws an exception with one sentence unless managed experts are read only by announced expert products.
    void built(ggml_cgraph * graph) const;

    void announce(const ggml_tensor * selected) { choices.push_back(selected); }
    bool announced(const ggml_tensor * selected) const;

  private:
    std::vector<const ggml_tensor *> choices;
};
