#include "moe-edge-server.h"
#include "moe-edge-bounds.h"
#include "moe-edge-encoder.h"
#include "moe-edge-grammar.h"
#include "moe-edge-images.h"
#include "moe-edge-parse.h"
#include "moe-edge-prompts.h"
#include "moe-edge-server-queue.h"
#include "moe-edge-server-step.h"
#include "moe-edge-template-bounds.h"
#include "moe-edge-tools.h"
#include "../moe-edge.h"

#include "llama.h"
#include "llama-batch.h"

#include "common.h"
#include "json.h"
#include "log.h"
#include "server-common.h"
#include "server-context.h"
#include "server-http.h"
#include "server-queue.h"
#include "server-task.h"

#undef mtmd_batch_encode

// Undo macros of moe-edge-parse.h, which are only for upstream's code.
#undef common_chat_parse
#undef compute_diffs

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <exception>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

// The model and the context that upstream's code receives instead of loading them. They are set on the thread that
// creates a server.
thread_local llama_model *   given_model   = nullptr;
thread_local llama_context * given_context = nullptr;

// Upstream's cache of copies of earlier prompts, or nullptr if there is none. Set on the thread that creates a server.
thread_local server_prompt_cache * made_prompts = nullptr;

// The request that this thread is submitting.
thread_local moe_edge_request * beginning = nullptr;

// The request that this thread answers, from its first step until its stream has ended.
thread_local moe_edge_request * answering = nullptr;

// The server whose steps this thread computes.
thread_local moe_edge_server * running = nullptr;

const int32_t ABORTED = 2, FAILED = -2;

// A position before all positions that a sliding window may need. It is not -1, because upstream treats -1 as an empty
// memory and would abort the process.
const llama_pos BEFORE_ALL = -2;

// A number that is added to the stop type of an answer if the answer ended because the context was full.
const int ENDS_AT_CONTEXT = 256;

// Results of moe_edge_request_run. NO_MEMORY: an allocation failed. TOO_FAR_AHEAD: the client takes the output of a
// stream too slowly.
const int NO_MEMORY = -1, TOO_FAR_AHEAD = -2;

struct route {
    const char * path;
    server_http_context::handler_t server_routes::* handler;
};

const route ROUTES[] = {
    { "/v1/chat/completions",              &server_routes::post_chat_completions },
    { "/v1/chat/completions/input_tokens", &server_routes::post_chat_completions_tok },
    { "/v1/completions",                   &server_routes::post_completions_oai },
    { "/v1/responses",                     &server_routes::post_responses_oai },
    { "/v1/responses/input_tokens",        &server_routes::post_responses_tok_oai },
    { "/v1/messages",                      &server_routes::post_anthropic_messages },
    { "/v1/messages/count_tokens",         &server_routes::post_anthropic_count_tokens },
    { "/completion",                       &server_routes::post_completions },
    { "/infill",                           &server_routes::post_infill },
    { "/tokenize",                         &server_routes::post_tokenize },
    { "/detokenize",                       &server_routes::post_detokenize },
    { "/apply-template",                   &server_routes::post_apply_template },
    { "/v1/models",                        &server_routes::get_models },
    { "/props",                            &server_routes::get_props },
    { "/metrics",                          &server_routes::get_metrics },
};

const route * find_route(const char * path) {
    for (const route & each : ROUTES) {
        if (std::string(path) == each.path) {
            return &each;
        }
    }
    return nullptr;
}

common_params params_of(const moe_edge_server_config & config) {
    common_params params;
    params.model.path = config.model_name;  // only a name: the model is already loaded
    params.model_alias = { config.model_name };
    params.chat_template = config.chat_template ? config.chat_template : "";
    params.n_parallel = config.n_parallel;
    params.kv_unified = true;
    params.kv_unified_per_slot = config.n_slot_context;
    params.n_batch = params.n_ubatch = config.n_batch;
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = config.n_threads;
    params.n_predict = config.max_tokens;
    params.fit_params = params.warmup = false;
    params.cache_ram_mib = config.cache_mib;
    params.cache_idle_slots = false;
    params.n_ctx_checkpoints = config.n_checkpoints;
    params.sse_ping_interval = 0;  // the caller detects silence itself, including silence before the first part
    params.endpoint_slots = params.endpoint_props = false;
    params.endpoint_metrics = true;
    params.ui = false;
    params.mmproj.path = config.mmproj ? config.mmproj : "";
    params.mmproj_use_gpu = false;
    params.image_max_tokens = config.image_max_tokens;
    params.mtmd_batch_max_tokens = 1;  // one image at a time, whose memory is planned
    params.sampling.seed = config.seed;
    params.sampling.temp = config.temp;
    params.sampling.top_k = config.top_k;
    params.sampling.top_p = config.top_p;
    params.sampling.min_p = config.min_p;
    return params;
}

// Returns those of the sequences in `prompts` that have tokens in this batch.
std::vector<int32_t> prompts_in(const llama_batch_ext & batch, const std::set<int32_t> & prompts) {
    std::set<int32_t> found;
    for (const auto & token : batch.tokens) {
        std::copy_if(token.seq_ids.begin(), token.seq_ids.end(), std::inserter(found, found.end()),
                     [&](llama_seq_id sequence) { return prompts.count(sequence) > 0; });
    }
    return { found.begin(), found.end() };
}

}  // namespace

struct moe_edge_server {
    common_params    params;
    server_context   context;
    server_routes    routes;
    llama_context *  llama;
    const size_t     most_ahead;
    moe_edge_prompts prompts;  // used on the decode thread only
    std::atomic<bool> stopping{false}, has_ended{false};
    moe_edge_cancels cancels;
    // For each sequence, how its last answer ended: upstream's stop_type, plus ENDS_AT_CONTEXT if the context was full.
    std::vector<std::atomic<int>> ends;
    // Guards `works`, the functions that do_with_slot has posted for the decode thread. The key is a name that
    // do_with_slot has chosen. The decode thread runs a function with this mutex locked.
    std::mutex works_mutex;
    std::map<std::string, std::function<void(const moe_edge_slot &)>> works;
    // This mutex guards two maps: the request of each task, by the task's number; and for each sequence, the request
    // that decodes on it, or null.
    std::mutex tasks_mutex;
    std::map<int32_t, moe_edge_request *> tasks;
    std::vector<moe_edge_request *> decoding;
    moe_edge_server_before_step before_step = nullptr;
    void *           before_step_user = nullptr;
    moe_edge_server_before_prompt before_prompt = nullptr;
    void *           before_prompt_user = nullptr;

    moe_edge_server(const moe_edge_server_config & config, llama_context * llama)
        : params(params_of(config)), routes(params, context), llama(llama), most_ahead(config.most_ahead),
          prompts(llama, config.n_parallel, config.n_checkpoints), ends(config.n_parallel),
          decoding(config.n_parallel) {
        llama_set_abort_callback(llama, should_abort, this);
    }
    moe_edge_server(const moe_edge_server &) = delete;
    ~moe_edge_server() {
        llama_set_abort_callback(llama, nullptr, nullptr);
    }

    // Returns whether the running step must end early. The context calls this between two ops, and the store while it
    // waits for a read.
    static bool should_abort(void * server) {
        const auto & self = *static_cast<const moe_edge_server *>(server);
        return self.stopping || self.cancels.ends_step();
    }
};

struct moe_edge_request {
    moe_edge_server *     server;
    const route *         which;
    const std::vector<int32_t> sequences;
    std::atomic<bool>     cancelled{false};
    std::function<bool()> should_stop;
    server_http_req       asked;
    server_http_res_ptr   answer;  // declared after `asked`, to which it refers, so that it is destroyed first
    bool                  is_queued = false;  // upstream has accepted the request
    std::string           note;               // sentence for the log
    std::vector<moe_edge_prepared_grammar> grammars;  // grammars of its tasks, kept until they end
    std::chrono::steady_clock::time_point  begun;     // when it started to run
    int32_t               task = -1;                  // the task of its first sequence
    std::vector<int64_t>  token_times;                // token times of that task, guarded by the server's tasks_mutex

    // The members below are shared by the thread that makes the answer and the thread that takes the output.
    std::mutex  mutex;
    int         status    = 0;      // HTTP status; 0: not known yet
    bool        is_stream = false;
    bool        awaited   = false;  // the last take returned nothing
    std::string come, taken;

    moe_edge_request(moe_edge_server * server, const route * which, std::string body, std::vector<int32_t> sequences)
        : server(server),
          which(which),
          sequences(std::move(sequences)),
          should_stop([this] { return cancelled || this->server->stopping; }),
          asked{ {}, {}, which->path, "", std::move(body), {}, should_stop } {}
    moe_edge_request(const moe_edge_request &) = delete;
    ~moe_edge_request() {
        std::lock_guard<std::mutex> lock(server->tasks_mutex);
        for (auto it = server->tasks.begin(); it != server->tasks.end();) {
            it = it->second == this ? server->tasks.erase(it) : std::next(it);
        }
        std::replace(server->decoding.begin(), server->decoding.end(), this, static_cast<moe_edge_request *>(nullptr));
    }
};

namespace {

// Runs upstream's handler for a request until the answer is complete, or until the first output of a stream. If the
// handler throws, the answer is an error: HTTP status 400 before the request is queued, and 500 afterwards.
void begin(moe_edge_request & request) {
    std::string complaint = "the request was given up";
    moe_edge_bounded counted(MOE_EDGE_GRAMMAR, request.should_stop, 0);
    moe_edge_bounded rendered = moe_edge_template_bounds(request.should_stop, request.asked.body.size());
    beginning = &request;
    try {
        request.answer = (request.server->routes.*request.which->handler)(request.asked);
    } catch (const std::exception & failure) {
        complaint = failure.what();  // upstream's reason for not accepting the request
    } catch (const moe_edge_refused & refused) {
        complaint = refused.reason;
    }
    beginning = nullptr;
    if (!request.answer) {
        const error_type type = request.is_queued ? ERROR_TYPE_SERVER : ERROR_TYPE_INVALID_REQUEST;
        request.answer = std::make_unique<server_http_res>();
        request.answer->status = request.is_queued ? 500 : 400;
        request.answer->data = safe_json_to_str({ { "error", format_error_response(complaint, type) } });
    }
}

// Appends output to the output that waits to be taken, and notifies the thread that takes it. Returns false if more
// than most_ahead bytes are waiting.
bool add(moe_edge_request & request, const std::string & part, int ready) {
    std::lock_guard<std::mutex> lock(request.mutex);
    request.come += part;
    if (request.awaited && !part.empty() && ready >= 0) {
        request.awaited = false;
        const ssize_t written = write(ready, "", 1);
        (void) written;  // if the pipe is full, the reader is already notified
    }
    return request.come.size() <= request.server->most_ahead;
}

int answer(moe_edge_request & request, int ready) {
    begin(request);
    server_http_res & answer = *request.answer;
    {
        std::lock_guard<std::mutex> lock(request.mutex);
        request.status    = answer.status;
        request.is_stream = answer.is_stream();
    }
    if (!answer.is_stream()) {
        add(request, answer.data, ready);
        return 0;
    }
    std::string part;
    for (bool more = true; more;) {
        part.clear();
        more = answer.next(part);
        if (!add(request, part, ready) && more) {
            return TOO_FAR_AHEAD;
        }
    }
    return 0;
}

}  // namespace

bool moe_edge_server_ends() {
    return running && running->stopping;
}

// Runs `work` with a slot on the decode thread, when no request decodes on the slot. Returns false if the server ends
// before the work is done.
static bool do_with_slot(
        moe_edge_server * server, int32_t sequence, const std::function<void(const moe_edge_slot &)> & work) {
    bool is_done = false;
    std::string name;
    try {
        server_response_reader reader = server->context.get_response_reader();
        server_task task(SERVER_TASK_TYPE_SLOT_SAVE);
        task.id      = reader.get_new_id();
        task.id_slot = task.slot_action.id_slot = sequence;
        task.slot_action.filepath = name = std::to_string(task.id);
        {
            std::lock_guard<std::mutex> lock(server->works_mutex);
            server->works[name] = [&](const moe_edge_slot & slot) {
                work(slot);
                is_done = true;
            };
        }
        reader.post_task(std::move(task));
        if (server->has_ended) {
            running = server;
            moe_edge_server_finish(reader.queue_tasks);
            running = nullptr;
        }
        reader.next([server] { return server->stopping.load(); });
    } catch (const std::exception &) {
    }
    // Make sure that the decode thread does not use `work` after this function returns. If the decode thread is running
    // `work`, it holds this mutex until the end. If it has not started, erasing the entry prevents the start.
    std::lock_guard<std::mutex> lock(server->works_mutex);
    server->works.erase(name);
    return is_done;
}

// Computes a batch. in_prompt: the sequences whose tokens in this batch belong to a prompt.
static int32_t compute(
        llama_context * context, llama_process_type type, llama_batch_ext & batch, const std::vector<int32_t> & in_prompt) {
    const bool answers = in_prompt.empty();
    if (running->before_step && running->before_step(running->before_step_user, answers) != 0) {
        return FAILED;
    }
    moe_edge_set_prompts(context, in_prompt.data(), int32_t(in_prompt.size()));
    int32_t status = 0;
    moe_edge_server_compute(!answers, [&] {
        status = llama_process(context, type, &batch);
        if (!answers && status == 0) {
            llama_synchronize(context);
        }
    });
    return status;
}

// Called by upstream's code instead of llama_process.
int32_t moe_edge_server_step(
        llama_context * context, llama_process_type type, llama_batch_ext * step, const std::set<int32_t> & prompts,
        const moe_edge_undo_slot & undo) {
    return moe_edge_compute_step(running->cancels, context, *step, prompts, undo, [&](llama_batch_ext & part) {
        return compute(context, type, part, prompts_in(part, prompts));
    });
}

// Computes tokens of an image. Upstream's mtmd-helper.cpp calls this function instead of llama_process.
extern "C" int32_t moe_edge_image_step(llama_context * context, llama_process_type type, llama_batch_ext * step) {
    const int32_t sequence = *step->tokens[0].seq_ids.begin();
    const int32_t status = running->cancels.begin_image(sequence) ? compute(context, type, *step, { sequence }) : ABORTED;
    running->cancels.end();
    return status;
}

int32_t moe_edge_encode_images(int32_t sequence, mtmd_batch * images) {
    int32_t status = ABORTED;
    if (running->cancels.begin_image(sequence)) {
        moe_edge_server_compute(true, [&] { status = mtmd_batch_encode(images); });
    }
    running->cancels.end();
    return status;
}

bool moe_edge_encoding_ends(void *) {
    return running && moe_edge_server::should_abort(running);
}

void moe_edge_image_failed(const moe_edge_slot & slot) {
    moe_edge_return_to_memory(running->llama, slot.number, slot.prompt.tokens.pos_next(), slot.prompt);
}

size_t moe_edge_largest_step() {
    return beginning ? size_t(beginning->server->params.n_batch) : SIZE_MAX;
}

size_t moe_edge_server_work(const char * path, const moe_edge_slot & slot) {
    std::lock_guard<std::mutex> lock(running->works_mutex);
    const auto found = running->works.find(path);
    if (found == running->works.end()) {
        return 0;
    }
    const auto work = std::move(found->second);
    running->works.erase(found);
    try {
        work(slot);
    } catch (const std::exception &) {
        return 0;
    }
    return 1;
}

// Records which request decodes on a slot from now on. If this request was cancelled before it received the slot, marks
// the slot's sequence as cancelled now.
void moe_edge_server_launched(int32_t slot, int32_t task) {
    std::lock_guard<std::mutex> lock(running->tasks_mutex);
    const auto found = running->tasks.find(task);
    running->decoding[slot] = found == running->tasks.end() ? nullptr : found->second;
    running->cancels.forget(slot);
    if (running->decoding[slot] && running->decoding[slot]->cancelled) {
        running->cancels.cancel({ slot });
    }
}

void moe_edge_server_place(const moe_edge_slot & slot, server_task & task) {
    running->prompts.place(slot, task);
}

void moe_edge_server_answer_begins(int32_t slot, size_t n_tokens) {
    running->prompts.note(slot, n_tokens);
}

void moe_edge_server_token(int32_t task) {
    const auto now = std::chrono::steady_clock::now();
    std::lock_guard<std::mutex> lock(running->tasks_mutex);
    const auto found = running->tasks.find(task);
    if (found != running->tasks.end() && found->second->task == task) {
        moe_edge_request & request = *found->second;
        request.token_times.push_back(std::chrono::duration_cast<std::chrono::microseconds>(now - request.begun).count());
    }
}

void moe_edge_answer_ended(int32_t slot, int stop, bool truncated) {
    if (answering && slot >= 0) {
        answering->server->ends[slot] = stop + (truncated ? ENDS_AT_CONTEXT : 0);
    }
}

void moe_edge_prompts_made(server_prompt_cache * prompts) {
    made_prompts = prompts;
}

void moe_edge_note(const std::string & sentence) {
    if (answering) {
        answering->note = sentence;
    }
}

std::vector<server_task> & moe_edge_server_begin(std::vector<server_task> & tasks) {
    if (beginning) {
        for (server_task & task : tasks) {
            moe_edge_prepare_grammar(
                llama_get_model(beginning->server->llama), task.params.sampling, beginning->should_stop, beginning->grammars);
        }
        beginning->is_queued = true;
        beginning->task = tasks.empty() ? -1 : tasks[0].id;
        std::lock_guard<std::mutex> lock(beginning->server->tasks_mutex);
        for (const server_task & task : tasks) {
            beginning->server->tasks[task.id] = beginning;
        }
    }
    const size_t n = beginning ? beginning->sequences.size() : 0;
    for (size_t i = 0; n && i < tasks.size(); i++) {
        tasks[i].id_slot = beginning->sequences[i % n];
        beginning->server->ends[tasks[i].id_slot] = STOP_TYPE_NONE;
    }
    const auto call = n ? beginning->server->before_prompt : nullptr;
    const bool is_known = tasks.size() == 1 || (tasks.size() <= n && !tasks[0].is_parent());
    for (size_t i = 0; call && i < n; i++) {
        const llama_tokens prompt = is_known && i < tasks.size() ? moe_edge_keys(tasks[i].tokens) : llama_tokens();
        call(beginning->server->before_prompt_user, beginning->sequences[i], prompt.data(), int32_t(prompt.size()));
    }
    return tasks;
}

extern "C" {

llama_model * moe_edge_server_model(const char *, llama_model_params) {
    return given_model;
}

llama_context * moe_edge_server_context(llama_model *, llama_context_params) {
    return given_context;
}

// Returns `found`, the special token that upstream returns, if the model's file names it with this key. Otherwise
// returns LLAMA_TOKEN_NULL, because upstream then returns a default that may be any token of this model.
static llama_token named_token(const char * key, llama_token found) {
    char text[32] = "";
    const bool is_named = given_model && llama_model_meta_val_str(given_model, key, text, sizeof text) > 0;
    return is_named && std::to_string(found) == text ? found : LLAMA_TOKEN_NULL;
}

llama_token moe_edge_template_bos(const llama_vocab * vocab) {
    return named_token("tokenizer.ggml.bos_token_id", llama_vocab_bos(vocab));
}

llama_token moe_edge_template_eos(const llama_vocab * vocab) {
    return named_token("tokenizer.ggml.eos_token_id", llama_vocab_eos(vocab));
}

void moe_edge_server_model_free(llama_model *) {}
void moe_edge_server_context_free(llama_context *) {}

// Upstream calls this function instead of llama_memory_seq_pos_min, to learn the first position in the memory of a
// sequence. If the next token needs an earlier position, upstream returns to a checkpoint, or computes the whole prompt
// again. This is never necessary for a prompt that only appends tokens to the sequence. For such a prompt, this
// function returns BEFORE_ALL instead of the real position.
llama_pos moe_edge_server_pos_min(llama_memory_t memory, llama_seq_id sequence) {
    const llama_pos first = llama_memory_seq_pos_min(memory, sequence);
    return running && running->prompts.take_continues(sequence) && first >= 0 ? BEFORE_ALL : first;
}

int moe_edge_server_abi_version(void) {
    return MOE_EDGE_SERVER_ABI_VERSION;
}

moe_edge_server * moe_edge_server_create(
        llama_model * model, llama_context * context, const moe_edge_server_config * config,
        char * error, size_t error_size) {
    common_log_set_verbosity_thold(config->verbosity);
    given_model = model;
    given_context = context;
    made_prompts = nullptr;
    std::string reason = "llama.cpp's server cannot be started with this model";
    std::unique_ptr<moe_edge_server> server;
    try {
        server = std::make_unique<moe_edge_server>(*config, context);
        moe_edge_bounded rendered = moe_edge_template_bounds([] { return false; }, 0);
        moe_edge_check_template(model, server->params.chat_template);
        server->params.chat_template = moe_edge_template_with_tools(model, server->params.chat_template);
        if (server->context.load_model(server->params)) {
            server->prompts.set_copies(made_prompts);
            server->routes.update_meta(server->context);
            llama_detach_threadpool(context);  // upstream's threads would spin while Python decides
        } else {
            server.reset();
            moe_edge_try_template(model, config->chat_template ? config->chat_template : "");
        }
    } catch (const std::exception & failure) {
        server.reset();
        reason = failure.what();
    } catch (const moe_edge_refused & refused) {
        server.reset();
        reason = refused.reason + " (--chat-template FILE sets another template)";
    }
    given_model = nullptr;
    given_context = nullptr;
    if (!server) {
        snprintf(error, error_size, "%s", reason.c_str());
    }
    return server.release();
}

void moe_edge_server_set_before_step(moe_edge_server * server, moe_edge_server_before_step callback, void * user) {
    server->before_step      = callback;
    server->before_step_user = user;
}

void moe_edge_server_set_before_prompt(moe_edge_server * server, moe_edge_server_before_prompt callback, void * user) {
    server->before_prompt      = callback;
    server->before_prompt_user = user;
}

void moe_edge_server_set_notes(moe_edge_server * server, const moe_edge_server_notes * notes) {
    server->prompts.set_notes(*notes);
}

void moe_edge_server_run(moe_edge_server * server) {
    if (!server->stopping) {
        running = server;
        server->context.start_loop();
        running = nullptr;
    }
    server->has_ended = true;
}

uint64_t moe_edge_server_keep_prompts(moe_edge_server * server, uint64_t bytes) {
    return server->prompts.keep(bytes);
}

int moe_edge_server_has_part(const moe_edge_server * server) {
    return server->prompts.has_part;
}

int moe_edge_server_settle(moe_edge_server * server) {
    return do_with_slot(server, 0, [](const moe_edge_slot &) {}) ? 0 : -1;
}

int moe_edge_server_forget(moe_edge_server * server, int32_t sequence) {
    const auto forget = [server](const moe_edge_slot & slot) { server->prompts.forget(slot); };
    return do_with_slot(server, sequence, forget) ? 0 : -1;
}

int64_t moe_edge_server_tokens(moe_edge_server * server, int32_t sequence, int32_t * tokens, size_t n_most) {
    int64_t n = -1;
    do_with_slot(server, sequence, [&](const moe_edge_slot & slot) {
        const llama_tokens held = moe_edge_keys(slot.prompt.tokens);
        std::copy_n(held.begin(), std::min(held.size(), n_most), tokens);
        n = int64_t(held.size());
    });
    return n;
}

int moe_edge_server_ending(moe_edge_server * server, int32_t sequence, int * at_context) {
    const int end = server->ends[sequence];
    *at_context = end >= ENDS_AT_CONTEXT;
    return end % ENDS_AT_CONTEXT;
}

int64_t moe_edge_server_match(
        moe_edge_server * server, int32_t sequence, const int32_t * prompt, size_t n_prompt, int * is_another) {
    int64_t n = -1;
    const llama_tokens tokens(prompt, prompt + n_prompt);
    do_with_slot(server, sequence, [&](const moe_edge_slot & slot) {
        const moe_edge_match found = server->prompts.match(slot, tokens);
        *is_another = found.is_another;
        n = int64_t(found.spared);
    });
    return n;
}

size_t moe_edge_server_as_held(
        moe_edge_server * server, const int32_t * prompt, size_t n_prompt, const int32_t * held, size_t n_held,
        int32_t * tokens, size_t n_most) {
    const llama_vocab * vocab = llama_model_get_vocab(llama_get_model(server->llama));
    const llama_tokens made = moe_edge_as_held(vocab, { prompt, prompt + n_prompt }, { held, held + n_held });
    std::copy_n(made.begin(), std::min(made.size(), n_most), tokens);
    return made.size();
}

int64_t moe_edge_server_save(
        moe_edge_server * server, int32_t sequence, const char * path, int32_t * n_tokens, moe_edge_server_mark * marks,
        int32_t * n_marks) {
    int64_t n_bytes = -1;
    std::vector<moe_edge_server_mark> made;
    const int32_t n_most = std::exchange(*n_marks, 0);
    do_with_slot(server, sequence, [&](const moe_edge_slot & slot) {
        n_bytes   = int64_t(server->prompts.save(slot, path, made));
        *n_tokens = slot.prompt.n_tokens();
    });
    if (n_bytes <= 0 || int32_t(made.size()) > n_most) {
        return -1;
    }
    std::copy(made.begin(), made.end(), marks);
    *n_marks = int32_t(made.size());
    return n_bytes;
}

int moe_edge_server_restore(
        moe_edge_server * server, int32_t sequence, const char * path, const moe_edge_server_mark * marks, int32_t n_marks) {
    bool is_good = false;
    const std::vector<moe_edge_server_mark> wanted(marks, marks + n_marks);
    do_with_slot(server, sequence, [&](const moe_edge_slot & slot) { is_good = server->prompts.restore(slot, path, wanted); });
    return is_good ? 0 : -1;
}

void moe_edge_server_stop(moe_edge_server * server) {
    server->stopping = true;
    server->context.terminate();
}

void moe_edge_server_free(moe_edge_server * server) {
    delete server;
}

moe_edge_request * moe_edge_request_create(
        moe_edge_server * server, const char * path, const char * body, size_t body_size,
        const int32_t * sequences, size_t n_sequences) {
    try {
        const route * which = find_route(path);
        return which ? new moe_edge_request(
            server, which, std::string(body, body_size), { sequences, sequences + n_sequences }) : nullptr;
    } catch (...) {
        return nullptr;
    }
}

int moe_edge_request_run(moe_edge_request * request, int ready) {
    answering = request;
    request->begun = std::chrono::steady_clock::now();
    int status = NO_MEMORY;
    try {
        status = answer(*request, ready);
    } catch (...) {
    }
    answering = nullptr;
    return status;
}

int moe_edge_request_take(moe_edge_request * request, const char ** data, size_t * size, int * is_stream) {
    std::lock_guard<std::mutex> lock(request->mutex);
    request->taken.clear();
    request->taken.swap(request->come);
    request->awaited = request->taken.empty();
    *data      = request->taken.data();
    *size      = request->taken.size();
    *is_stream = request->is_stream;
    return request->status;
}

const char * moe_edge_request_note(const moe_edge_request * request) {
    return request->note.empty() ? nullptr : request->note.c_str();
}

size_t moe_edge_request_token_times(moe_edge_request * request, const int64_t ** times) {
    std::lock_guard<std::mutex> lock(request->server->tasks_mutex);
    *times = request->token_times.data();
    return request->token_times.size();
}

void moe_edge_request_cancel(moe_edge_request * request) {
    moe_edge_server & server = *request->server;
    std::lock_guard<std::mutex> lock(server.tasks_mutex);
    request->cancelled = true;
    std::vector<int32_t> sequences;
    for (size_t i = 0; i < server.decoding.size(); i++) {
        if (server.decoding[i] == request) {
            sequences.push_back(int32_t(i));
        }
    }
    server.cancels.cancel(sequences);
}

void moe_edge_request_free(moe_edge_request * request) {
    delete request;
}

const char * moe_edge_server_route(int number) {
    const int n_routes = sizeof(ROUTES) / sizeof(ROUTES[0]);
    return number >= 0 && number < n_routes ? ROUTES[number].path : nullptr;
}

}  // extern "C"
