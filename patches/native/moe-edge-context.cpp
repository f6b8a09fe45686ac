// Implements the hooks in a llama_context: each micro-batch is computed as one step of the store.

#include "moe-edge-hook.h"
#include "moe-edge-cpu.h"
#include "moe-edge-llama.h"
#include "moe-edge-threads.h"
#include "moe-edge-util.h"

#include "llama-batch.h"
#include "llama-context.h"
#include "llama-impl.h"

#include "ggml-backend.h"

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>

namespace {

hook_model * attached_to(const llama_model & model) {
    std::shared_lock<std::shared_mutex> lock(moe_edge_attached.mutex);
    const auto it = moe_edge_attached.models.find(&model);
    return it == moe_edge_attached.models.end() ? nullptr : it->second.get();
}

// The contexts that adapt their number of threads to the load of the machine. The object is never destroyed, because a
// context may outlive this library's other static objects.
struct adapting_contexts {
    std::shared_mutex mutex;
    std::unordered_map<const llama_context *, std::unique_ptr<moe_edge_threads>> threads;
};

adapting_contexts & adapting = *new adapting_contexts;

moe_edge_threads * threads_of(const llama_context & ctx) {
    std::shared_lock<std::shared_mutex> lock(adapting.mutex);
    const auto it = adapting.threads.find(&ctx);
    return it == adapting.threads.end() ? nullptr : it->second.get();
}

void add_new(std::vector<int32_t> & sequences, int32_t sequence) {
    if (std::find(sequences.begin(), sequences.end(), sequence) == sequences.end()) {
        sequences.push_back(sequence);
    }
}

// Returns the phase and the sequence of each token of a micro-batch, for the store. whole: the batch passed to
// llama_decode, of which ubatch is a part. declared_phases: the phases that the caller has set; nullopt: infer them.
moe_edge_batch describe(
        const llama_ubatch & ubatch, const llama_batch & whole,
        const std::optional<moe_edge_token_phases> & declared_phases) {
    std::array<int32_t, LLAMA_MAX_SEQ> n_tokens = {};
    for (int32_t i = 0; i < whole.n_tokens; i++) {
        for (int32_t s = 0; s < whole.n_seq_id[i]; s++) {
            n_tokens[whole.seq_id[i][s]]++;
        }
    }
    const auto in_prompt = [&](llama_seq_id s) { return declared_phases ? declared_phases->in_prompt(s) : n_tokens[s] > 1; };
    moe_edge_batch out;
    for (uint32_t i = 0; i < ubatch.n_tokens; i++) {
        const llama_seq_id * first = ubatch.seq_id[i];
        const llama_seq_id * last  = first + ubatch.n_seq_id[i];
        const bool prompt = std::any_of(first, last, in_prompt) || (!declared_phases && !ubatch.output[i]);
        out.phases.push_back(prompt ? MOE_EDGE_PREFILL : MOE_EDGE_DECODE);
        out.sequences.push_back(*first);
        for (const llama_seq_id * s = first; s < last; s++) {
            out.members.insert(*s);
            if (ubatch.pos[i] == 0) {
                add_new(out.starts, *s);
            }
            if (prompt && ubatch.output[i]) {
                add_new(out.prompt_ends, *s);
            }
        }
    }
    return out;
}

// Prefetches the experts of all layers in which the token's id alone determines the experts. Called at the start of a
// micro-batch, before any layer is computed.
void load_chosen(const hook_model & model, const llama_ubatch & ubatch) {
    moe_edge_store & store = *model.store;
    if (store.n_ahead == 0 || !ubatch.token) {
        return;
    }
    const auto tier = static_cast<uint8_t>(store.default_tier);
    std::vector<moe_edge_prefetch_item> list;
    for (const auto & layer : model.layers) {
        std::vector<bool> listed(layer.by_token.empty() ? 0 : store.n_expert);
        for (uint32_t t = 0; t < ubatch.n_tokens && !listed.empty(); t++) {
            const int32_t * experts = &layer.by_token[(size_t) ubatch.token[t] * store.n_expert_used];
            for (const int32_t * e = experts; e < experts + store.n_expert_used; e++) {
                if (!listed[*e]) {
                    listed[*e] = true;
                    list.push_back({ layer.layer, *e, tier, 0, store.in_prefill() });
                }
            }
        }
    }
    if (!list.empty()) {
        store.prefetch(list.data(), list.size());
    }
}

// Returns null if a token can be sampled from this row of n logits. Otherwise returns the fault, as the beginning of
// the phrase "... the logits of a token". Single values of -inf are no fault.
const char * fault_of(const float * row, int64_t n) {
    int n_nan = 0, n_finite = 0;
    for (int64_t i = 0; i < n; i++) {
        n_nan    += row[i] != row[i];
        n_finite += std::fabs(row[i]) <= FLT_MAX;
    }
    return n_nan ? "NaN among" : n_finite == 0 ? "no finite value in" : nullptr;
}

// Looks for a row of a step's logits from which no token can be sampled. Returns one sentence about the first such row,
// or an empty string.
std::string logits_fault(const ggml_tensor * logits, int64_t n_rows) {
    std::vector<float> copy;
    for (int64_t i = 0; logits && i < std::min(n_rows, logits->ne[1]); i++) {
        const auto * row = reinterpret_cast<const float *>(static_cast<const char *>(logits->data) + i * logits->nb[1]);
        if (!ggml_backend_buffer_is_host(logits->buffer)) {
            copy.resize(logits->ne[0]);
            ggml_backend_tensor_get(logits, copy.data(), i * logits->nb[1], copy.size() * sizeof(float));
            row = copy.data();
        }
        if (const char * fault = fault_of(row, logits->ne[0])) {
            return std::string("the model computed ") + fault + " the logits of a token: its file is damaged or was "
                   "converted wrongly. `moe-edge verify FILE` names a tensor with such values";
        }
    }
    return "";
}

}  // namespace

// Return values of llama_decode.
const int32_t DECODE_ABORTED = 2, DECODE_FAILED = -3;

// After the room callback has granted memory for a batch, this many more tokens may be computed without calling it
// again.
const uint32_t TOKENS_AHEAD = 256;

moe_edge_room_hook::moe_edge_room_hook(llama_context & ctx, uint32_t n_tokens, uint64_t n_bytes)
    : ctx(ctx), n_ubatch(ctx.cparams.n_ubatch) {
    const auto * model = attached_to(ctx.model);
    if (model && n_tokens > 0) {
        model->store->progress.done = 0;
    }
    if (!model || !model->store->room_callback || ctx.backends.size() > 1) {
        return;
    }
    auto & given = model->store->given;
    if (n_bytes == 0 && n_tokens <= std::min(given.tokens, given.at_once) && !ctx.scratch.gives_back(n_tokens)) {
        given.tokens -= n_tokens;
        return;
    }
    if (ctx.scratch.gives_back(n_tokens)) {
        ctx.scratch.drop(ctx.backend_cpu);
    }
    moe_edge_room room = { ctx.scratch.touched(ctx.backend_cpu), n_bytes, (int32_t) n_tokens, (int32_t) n_ubatch, 0, 0 };
    given = {};
    if (model->store->room_callback(&room, model->store->room_user) != 0) {
        refuse("there is not enough memory for the step");
        return;
    }
    if (room.drop_scratch) {
        ctx.scratch.drop(ctx.backend_cpu);
    }
    given = { n_bytes ? 0 : TOKENS_AHEAD, (uint32_t) room.at_once };
    ctx.cparams.n_ubatch = std::min(n_ubatch, given.at_once);
    try {
        lay_out(model->store->laid_out);
    } catch (const std::exception & error) {
        model->store->laid_out = 0;
        refuse(std::string("memory for the step cannot be allocated: ") + error.what());
    }
}

// Ends the batch before anything is computed, and makes it fail with this sentence. A batch that was cancelled
// meanwhile counts as cancelled instead.
void moe_edge_room_hook::refuse(const std::string & sentence) {
    moe_edge_store & store = *attached_to(ctx.model)->store;
    const bool is_aborted = ctx.abort_callback && ctx.abort_callback(ctx.abort_callback_data);
    result = store.is_cancelled() || is_aborted ? DECODE_ABORTED : DECODE_FAILED;
    if (result == DECODE_FAILED) {
        store.fail(sentence);
    }
}

// Lays out the context's scratch buffers again if its micro-batch size differs from that of the last layout. laid_out:
// the micro-batch size of the last layout, or 0 for the context's full size; receives the new size.
void moe_edge_room_hook::lay_out(uint32_t & laid_out) {
    if (ctx.cparams.n_ubatch == (laid_out ? laid_out : n_ubatch)) {
        return;
    }
    laid_out = ctx.cparams.n_ubatch;
    ctx.sched_need_reserve = true;
    ctx.sched_reserve();
}

moe_edge_room_hook::~moe_edge_room_hook() {
    ctx.cparams.n_ubatch = n_ubatch;
}

moe_edge_step_hook::moe_edge_step_hook(llama_context & ctx, const llama_ubatch & ubatch)
    : ctx(ctx), model(attached_to(ctx.model)), threads(threads_of(ctx)), n_tokens(ubatch.n_tokens) {
    if (threads) {
        ctx.cparams.n_threads = ctx.cparams.n_threads_batch = threads->count(n_tokens);
    }
    if (ctx.backends.size() == 1) {  // otherwise a device may still be reading its inputs
        ctx.scratch.step(n_tokens, ctx.backend_cpu);
    }
    began_us = now_us();
    if (model) {
        model->store->abort_callback = ctx.abort_callback;
        model->store->abort_user     = ctx.abort_callback_data;
        model->store->begin_step(describe(ubatch, ctx.balloc->get_batch(), model->store->declared_phases));
        load_chosen(*model, ubatch);
        const moe_edge_store & store = *model->store;
        const bool scores = store.importance_window != 0 && store.in_prefill() && ubatch.n_tokens > 1;
        watched = store.runs_unwatched() || ctx.cparams.warmup ? 0 : scores ? 2 : 1;
        set_abort_callback(should_stop, this);
    }
}

moe_edge_step_hook::~moe_edge_step_hook() {
    if (model) {
        set_abort_callback(ctx.abort_callback, ctx.abort_callback_data);
        model->store->abort_callback = nullptr;
        model->store->close_step();
    }
}

bool moe_edge_step_hook::should_stop(void * step) {
    return static_cast<const moe_edge_step_hook *>(step)->model->store->aborted();
}

// Sets the abort callback of the context's backends. The abort callback of the context itself does not change.
void moe_edge_step_hook::set_abort_callback(ggml_abort_callback callback, void * data) const {
    for (const auto & backend : ctx.backends) {
        auto * reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend.get()));
        auto * set = reg ? ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_abort_callback") : nullptr;
        if (set) {
            reinterpret_cast<ggml_backend_set_abort_callback_t>(set)(backend.get(), callback, data);
        }
    }
}

bool moe_edge_step_hook::may_reuse(const llm_graph_result * graph) const {
    if (!model) {
        return true;
    }
    const auto it = model->watched.find(graph);
    return it != model->watched.end() && it->second == watched;
}

ggml_status moe_edge_step_hook::done(const llm_graph_result * graph, ggml_status status) {
    if (threads && status == GGML_STATUS_SUCCESS) {
        const uint64_t now = now_us();
        threads->step(n_tokens, now - began_us, now, moe_edge_compute_delay_us);
    }
    if (!model) {
        const std::string fault = status == GGML_STATUS_SUCCESS ? check_logits(graph) : "";
        if (!fault.empty()) {
            LLAMA_LOG_ERROR("%s\n", fault.c_str());
            return GGML_STATUS_FAILED;
        }
        return status;
    }
    auto & store = *model->store;
    model->watched[graph] = watched;
    if (store.step_callback) {
        ggml_backend_sched_synchronize(ctx.sched.get());  // otherwise the time would only be that of the launches
    }
    const uint64_t us = now_us() - began_us;
    if (store.error()) {
        return GGML_STATUS_FAILED;
    }
    if (store.aborted()) {  // checked after the last op, too, because an op may have stopped halfway
        return GGML_STATUS_ABORTED;
    }
    if (status != GGML_STATUS_SUCCESS || ctx.cparams.warmup) {
        return status;
    }
    const std::string fault = check_logits(graph);
    if (!fault.empty()) {
        store.fail(fault);
        return GGML_STATUS_FAILED;
    }
    return store.end_step(us) ? GGML_STATUS_SUCCESS : GGML_STATUS_FAILED;
}

// Checks the logits of all tokens that have an output. Skips warm-up steps, because no token is sampled from their
// logits.
std::string moe_edge_step_hook::check_logits(const llm_graph_result * graph) const {
    const ggml_tensor * logits = graph->get_logits();
    if (!logits || logits->type != GGML_TYPE_F32 || !logits->buffer || ctx.n_outputs <= 0 || ctx.cparams.warmup) {
        return "";
    }
    if (!ggml_backend_buffer_is_host(logits->buffer)) {
        ggml_backend_sched_synchronize(ctx.sched.get());
    }
    return logits_fault(logits, ctx.n_outputs);
}

void moe_edge_set_prompts(void * context, const int32_t * sequences, int32_t n) {
    if (const auto * model = attached_to(static_cast<const llama_context *>(context)->get_model())) {
        model->store->declared_phases = moe_edge_token_phases { MOE_EDGE_DECODE, { sequences, sequences + n } };
    }
}

void moe_edge_adapt_threads(void * context, int32_t most) {
    const auto * ctx = static_cast<const llama_context *>(context);
    std::unique_lock<std::shared_mutex> lock(adapting.mutex);
    adapting.threads.erase(ctx);
    if (most > 0) {
        adapting.threads.emplace(ctx, std::make_unique<moe_edge_threads>(most));
    }
}
