// Attaches stores to the models whose experts they hold.

#include "moe-edge-cpu.h"
#include "moe-edge-hook.h"
#include "moe-edge-devices.h"
#include "moe-edge-llama.h"
#include "moe-edge-util.h"

#include "llama-ext.h"
#include "llama-model-loader.h"

#include "ggml.h"

#include <algorithm>
#include <stdexcept>

moe_edge_registry moe_edge_attached;

namespace {

// load_error: the reason for which loading a model or creating a context failed last in this thread.
// returned_load_error: the reason that moe_edge_load_error() returned last.
thread_local std::string load_error, returned_load_error;

// The expert tensors of models that were loaded without data (no_alloc) point to this empty matrix. It cannot compute
// anything.
moe_edge_matrix unloaded;

// Copies a router's bias of n experts from the memory of its backend to `out`. Leaves `out` empty if `bias` is null.
// Returns false if the bias is not F32 or does not have n values.
bool read_bias(const ggml_tensor * bias, int32_t n, std::vector<float> & out) {
    if (bias) {
        if (bias->type != GGML_TYPE_F32 || ggml_nelements(bias) != n) {
            return false;
        }
        out.resize(n);
        ggml_backend_tensor_get(bias, out.data(), 0, n * sizeof(float));
    }
    return true;
}

// Reads the table of a layer in which the token's id determines the experts: [n_vocab, n_expert_used]. Returns an empty
// vector if the layer has no such table.
std::vector<int32_t> read_choices(const ggml_tensor * table, const moe_edge_store & store) {
    std::vector<int32_t> out;
    if (table && table->type == GGML_TYPE_I32 && table->ne[0] == store.n_expert_used) {
        out.resize(ggml_nelements(table));
        ggml_backend_tensor_get(table, out.data(), 0, ggml_nbytes(table));
        if (!std::all_of(out.begin(), out.end(), [&](int32_t e) { return e >= 0 && e < store.n_expert; })) {
            refuse("%s selects an expert that the model does not have", table->name);
        }
    }
    return out;
}

// Throws an exception that says why a store cannot serve the graph of a model. moe_edge_load_error() returns the same
// sentence.
template <typename... Args> [[noreturn]] void cannot_manage(const char * text, Args... args) {
    load_error = format(text, args...) + ": moe-edge cannot manage this model";
    throw std::runtime_error(load_error);
}

void bind(moe_edge_store & store, int32_t layer, int32_t kind, ggml_tensor * tensor) {
    if (!store.has_matrix(layer, kind, nullptr, 0)) {
        refuse("%s: the store has no such layer or matrix kind", tensor->name);
    }
    if (!tensor->buffer || ggml_backend_buffer_get_type(tensor->buffer) != moe_edge_placeholder_type(store.device)) {
        refuse("%s was not loaded into the buffer type that the store's experts must have", tensor->name);
    }
    for (int32_t t = 0; t < store.n_tiers; t++) {
        const auto & s = store.slices[layer][kind][t];
        const auto type = static_cast<ggml_type>(s.type);
        if (tensor->ne[2] != store.n_expert || tensor->ne[3] != 1 || tensor->ne[0] % ggml_blck_size(type) != 0 ||
            s.expert_bytes != ggml_row_size(type, tensor->ne[0]) * tensor->ne[1]) {
            refuse("%s: its shape does not fit the expert file's tier of type %s", tensor->name, ggml_type_name(type));
        }
        if (store.device && !store.device->computes(s.type)) {
            refuse("%s: the device has no kernel for the tier of type %s: give other tiers, or --device cpu", tensor->name,
                ggml_type_name(type));
        }
    }
    tensor->extra = &store.matrices[layer][kind];
}

// Copies the routers in half precision. The copies predict the experts of later layers (look-ahead), for which half
// precision is enough. The routers that select the experts do not change.
void copy_routers(hook_model & hook) {
    const int32_t n = hook.store->n_ahead > 0 ? hook.layers.size() : 0;
    hook.copies.reset(ggml_init({ (n + 1) * ggml_tensor_overhead(), nullptr, /* no_alloc */ true }));
    for (int32_t l = 1; l < n; l++) {  // no layer looks ahead to the first one
        auto & layer = hook.layers[l];
        const ggml_tensor * router = layer.router;
        if (!router || router->type != GGML_TYPE_F32 || !ggml_is_contiguous(router)) {
            continue;
        }
        const int64_t n_values = ggml_nelements(router);
        std::vector<float>       values(n_values);
        std::vector<ggml_fp16_t> halves(n_values);
        ggml_backend_tensor_get(router, values.data(), 0, n_values * sizeof(float));
        ggml_fp32_to_fp16_row(values.data(), halves.data(), n_values);

        ggml_tensor * copy = ggml_new_tensor_2d(hook.copies.get(), GGML_TYPE_F16, router->ne[0], router->ne[1]);
        ggml_format_name(copy, "%s.ahead", router->name);
        const auto type = ggml_backend_buffer_is_host(router->buffer) ? ggml_backend_cpu_buffer_type()
                                                                      : ggml_backend_buffer_get_type(router->buffer);
        ggml_backend_buffer_ptr buffer(ggml_backend_buft_alloc_buffer(type, ggml_backend_buft_get_alloc_size(type, copy)));
        if (!buffer) {
            refuse("no memory for a copy of %s in half precision", router->name);
        }
        ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        ggml_backend_tensor_alloc(buffer.get(), copy, ggml_backend_buffer_get_base(buffer.get()));
        ggml_backend_tensor_set(copy, halves.data(), 0, ggml_nbytes(copy));
        layer.ahead_router = copy;
        hook.copy_buffers.push_back(std::move(buffer));
    }
}

std::unique_ptr<hook_model> make_hook(moe_edge_store & store, const llama_model & model, size_t n_placeholders) {
    auto hook = std::make_unique<hook_model>(&store, model);
    for (int32_t l = 0; l < store.n_layers; l++) {
        const int32_t il = store.il[l];
        if (il < 0 || il >= (int32_t) model.layers.size()) {
            refuse("the model has no layer %d", il);
        }
        const auto & layer = model.layers[il];
        hook_layer each;
        each.model  = hook.get();
        each.layer  = l;
        each.router = each.ahead_router = layer.ffn_gate_inp;
        if (layer.ffn_gate_inp_s || !read_bias(layer.ffn_gate_inp_b, store.n_expert, each.router_bias) ||
            !read_bias(layer.ffn_exp_probs_b, store.n_expert, each.choice_bias)) {
            // The experts of this layer cannot be predicted: the layer scales its router's input, or one of its biases
            // is not F32 with one value for each expert.
            each.router = each.ahead_router = nullptr;
        }
        each.by_token = read_choices(layer.ffn_gate_tid2eid, store);
        for (int32_t k = 0; k < MOE_EDGE_N_KINDS; k++) {
            if (store.slices[l][k][0].expert_bytes == 0) {
                continue;
            }
            const std::string name = format("blk.%d.ffn_%s_exps.weight", il, KIND_NAMES[k]);
            auto * tensor = const_cast<ggml_tensor *>(model.get_tensor(name.c_str()));
            if (!tensor) {
                refuse("the model has no tensor %s", name.c_str());
            }
            bind(store, l, k, tensor);
            each.matrices[k] = &store.matrices[l][k];
            hook->bound.push_back(tensor);
            if (k == MOE_EDGE_DOWN) {
                each.experts = tensor;
            }
        }
        hook->layers.push_back(std::move(each));
    }
    if (hook->bound.size() != n_placeholders) {
        refuse("the model has expert tensors that the expert file does not list");
    }
    copy_routers(*hook);
    return hook;
}

// Requires the registry's lock.
void detach(const llama_model * model) {
    const auto it = moe_edge_attached.models.find(model);
    for (auto & layer : it->second->layers) {
        moe_edge_attached.by_experts.erase(layer.experts);
    }
    it->second->store->detach = nullptr;
    moe_edge_attached.models.erase(it);
}

void attach(const llama_model & model, size_t n_placeholders) {
    std::unique_lock<std::shared_mutex> lock(moe_edge_attached.mutex);
    moe_edge_store * store = moe_edge_latest_waiting();
    if (!store) {
        refuse("the model's experts need an expert store, but no store waits for a model: create a store before the model is loaded");
    }
    auto hook = make_hook(*store, model, n_placeholders);
    moe_edge_stop_waiting(store);
    for (auto & layer : hook->layers) {
        moe_edge_attached.by_experts[layer.experts] = &layer;
    }
    for (const auto & [name, tensor] : model.tensors_by_name) {
        moe_edge_tiles_for_prompts(tensor);
    }
    moe_edge_attached.models[&model] = std::move(hook);
    if (store->device) {
        store->device->expect_scratch(0);
    }
    store->detach = [&model] {
        std::unique_lock<std::shared_mutex> lock(moe_edge_attached.mutex);
        detach(&model);
    };
}

}  // namespace

bool moe_edge_is_placeholder(const ggml_tensor * tensor) {
    return tensor->buffer && moe_edge_is_placeholder_type(ggml_backend_buffer_get_type(tensor->buffer));
}

bool moe_edge_reads_rows(const llama_model_loader & loader, const std::string & name) {
    return loader.lazy.mode == LLAMA_LAZY_MODE_ON && name == "token_embd.weight" && loader.get_weight("output.weight");
}

void moe_edge_model_loaded(const llama_model & model) {
    std::vector<ggml_tensor *> placeholders;
    for (const auto & [name, tensor] : model.tensors_by_name) {
        if (moe_edge_is_placeholder(tensor)) {
            placeholders.push_back(tensor);
        }
    }
    if (model.hparams.no_alloc) {
        for (ggml_tensor * tensor : placeholders) {
            tensor->extra = &unloaded;
        }
        return;
    }
    load_error.clear();
    if (placeholders.empty()) {
        return;
    }
    try {
        attach(model, placeholders.size());
    } catch (const std::exception & e) {
        load_error = e.what();
        throw;
    }
}

void moe_edge_reserve_hook::built(ggml_cgraph * graph) const {
    for (int i = 0; i < ggml_graph_n_nodes(graph); i++) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        for (int s = 0; s < GGML_MAX_SRC; s++) {
            const ggml_tensor * src = node->src[s];
            if (!src || !moe_edge_is_placeholder(src)) {
                continue;
            }
            if (node->op != GGML_OP_MUL_MAT_ID || s != 0) {
                cannot_manage("%s is read by %s, and not only by products of experts", src->name, ggml_op_desc(node));
            }
            if (!announced(node->src[2])) {
                cannot_manage("the graph selects the experts of %s in a way that moe-edge does not support", src->name);
            }
        }
    }
}

void moe_edge_model_freed(const llama_model & model) {
    std::unique_lock<std::shared_mutex> lock(moe_edge_attached.mutex);
    const auto it = moe_edge_attached.models.find(&model);
    if (it != moe_edge_attached.models.end()) {
        moe_edge_store * store = it->second->store;
        detach(&model);
        moe_edge_await_model(store);
    }
}

// ---- C interface

int moe_edge_store_bind(moe_edge_store * store, int32_t layer, int32_t kind, void * operand, char * err, size_t err_size) {
    try {
        bind(*store, layer, kind, static_cast<ggml_tensor *>(operand));
        return 0;
    } catch (const std::exception & e) {
        write_error(err, err_size, e.what());
        return -1;
    }
}

const char * moe_edge_load_error(void) {
    returned_load_error = std::move(load_error);
    load_error.clear();
    return returned_load_error.empty() ? nullptr : returned_load_error.c_str();
}

void moe_edge_get_memory(void * context, moe_edge_memory * out) {
    *out = {};
    for (const auto & [type, taken] : llama_get_memory_breakdown(static_cast<llama_context *>(context))) {
        const int where = !ggml_backend_buft_is_host(type) && type != moe_edge_buffer_type();
        out->weights[where] += taken.model;
        out->cache[where]   += taken.context;
        out->scratch[where] += taken.compute;
    }
}
