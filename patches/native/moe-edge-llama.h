// What the patched llama.cpp calls. Each does nothing for a model without a store.

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

// Loader: the lower tiers of an expert file are not tensors of the model; it must neither
// count nor load them. weights: map from tensor name.
template <typename Map> void moe_edge_drop_lower_tiers(Map & weights) {
    for (auto it = weights.begin(); it != weights.end();) {
        it = it->first.find(".moe_edge.") != std::string::npos ? weights.erase(it) : std::next(it);
    }
}

// Loader: whether a graph reads nothing but rows of this tensor, which then stays on disk where
// experts are managed: the token embedding, where it is not the output as well.
bool moe_edge_reads_rows(const llama_model_loader & loader, const std::string & name);

// Loader: a placeholder; its data is read by the store, not by the loader.
bool moe_edge_is_placeholder(const ggml_tensor * tensor);

// Model: its tensors are loaded. Attaches the store that waits for it; throws a sentence where
// managed tensors have no store, or another one's. A model without memory takes none.
void moe_edge_model_loaded(const llama_model & model);

// Model: it goes, while its tensors are still there. Its store waits for another one.
void moe_edge_model_freed(const llama_model & model);

// Context: before a batch of n_tokens, or before a state of n_bytes is brought back, which adds to
// the cache. Whoever gives memory out makes room, and says in micro-batches of how many tokens the
// batch is computed while this lives.
class moe_edge_room_hook {
  public:
    explicit moe_edge_room_hook(llama_context & ctx, uint32_t n_tokens, uint64_t n_bytes = 0);
    moe_edge_room_hook(const moe_edge_room_hook &) = delete;
    ~moe_edge_room_hook();

    // False: there is none, and the store has the reason.
    bool good() const { return is_good; }

  private:
    void lay_out(uint32_t & laid_out);

    llama_context & ctx;
    const uint32_t  n_ubatch;  // of the context
    bool            is_good = true;
};

// Context: one step of the store around the computing of one micro-batch.
class moe_edge_step_hook {
  public:
    // The step begins, and stops early from here on where the store says so or the context's own
    // abort callback does.
    moe_edge_step_hook(llama_context & ctx, const llama_ubatch & ubatch);
    moe_edge_step_hook(const moe_edge_step_hook &) = delete;
    ~moe_edge_step_hook();

    // Whether the graph of an earlier step serves this one: the same of ours is in both.
    bool may_reuse(const llm_graph_result * graph) const;

    // The graph was computed, or stopped, with this status. Returns the step's.
    ggml_status done(const llm_graph_result * graph, ggml_status status);

  private:
    // A sentence if a row of logits that was asked for is NaN, or has no finite value; else empty.
    std::string check_logits(const llm_graph_result * graph) const;
    static bool should_stop(void * step);
    void        set_abort_callback(ggml_abort_callback callback, void * data) const;

    const llama_context & ctx;
    hook_model *          model = nullptr;
    moe_edge_threads *    threads;       // null: as many as the context was made with
    const int32_t         n_tokens;
    int                   watched  = 0;  // what of ours is in its graph, as in hook_model
    uint64_t              began_us = 0;
};

// Graph: what token importance (DyMoE eq. 1) is computed from, for the expert layers behind an
// attention. The first is called before it:
//   q [d, T, heads, streams], k [d, n_kv, kv heads, streams]: after their permutation
// the second where it is no flash attention and so has its weights [n_kv, T, heads, streams].
// They add nothing to the graph; moe_edge_route_hook does, if the store asks for it.
void moe_edge_attention_hook(const llm_graph_context & graph, ggml_tensor * q, ggml_tensor * k, ggml_tensor * bias,
                             ggml_tensor * mask, ggml_tensor * sinks, float scale, int il);
void moe_edge_attention_weights(ggml_tensor * weights);

// Graph: behind the routing weights of a MoE layer and before its experts. Returns the
// weights to use: the same values, except 0 for skipped experts.
//   experts: the layer's down matrices; logits: F32 [n_expert, T], null where there are none
//   selected: I32 [k, T]; weights: F32 [1, k, T]; gating_op: llama_expert_gating_func_type
ggml_tensor * moe_edge_route_hook(const llm_graph_context & graph, const ggml_tensor * experts, ggml_tensor * logits,
                                  ggml_tensor * selected, ggml_tensor * weights, int gating_op);

// Context: while it is there, a graph is built that is not computed: memory is reserved by it, with or
// without a store. moe_edge_route_hook announces each of its layers.
class moe_edge_reserve_hook {
  public:
    moe_edge_reserve_hook();
    moe_edge_reserve_hook(const moe_edge_reserve_hook &) = delete;
    ~moe_edge_reserve_hook();

    // Throws a sentence unless experts that are managed are read by products of experts that were
    // announced, and by nothing else.
    void built(ggml_cgraph * graph) const;

    void announce(const ggml_tensor * selected) { choices.push_back(selected); }
    bool announced(const ggml_tensor * selected) const;

  private:
    std::vector<const ggml_tensor *> choices;
};
