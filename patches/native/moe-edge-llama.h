// What the patched llama.cpp calls. Each does nothing for a model without a store.

#pragma once

#include <iterator>
#include <string>

struct ggml_tensor;
struct llm_graph_context;

// Loader: the lower tiers of an expert file are not tensors of the model; it must neither
// count nor load them. weights: map from tensor name.
template <typename Map> void moe_edge_drop_lower_tiers(Map & weights) {
    for (auto it = weights.begin(); it != weights.end();) {
        it = it->first.find(".moe_edge.") != std::string::npos ? weights.erase(it) : std::next(it);
    }
}

// Loader: a placeholder; its data is read by the store, not by the loader.
bool moe_edge_is_placeholder(const ggml_tensor * tensor);

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
//   gate_inp: the layer's router [n_embd, n_expert]; x: its input [n_embd, T]
//   selected: I32 [k, T]; weights: F32 [1, k, T]; gating_op: llama_expert_gating_func_type
ggml_tensor * moe_edge_route_hook(const llm_graph_context & graph, ggml_tensor * gate_inp, ggml_tensor * x,
                                  ggml_tensor * selected, ggml_tensor * weights, int gating_op);
