// llama.cpp's server without HTTP, as plain C: a request goes in as a route and a body, its answer
// comes out as it is made. The caller brings a model and a context, and does HTTP.
//
// Thread safety: everything about one request is called by one thread at a time, except that another one may take
// what has come, and any may call moe_edge_request_cancel. Requests may run on many threads at once.

#pragma once

#include <stddef.h>
#include <stdint.h>

#define MOE_EDGE_SERVER_ABI_VERSION 10

#if defined(_WIN32)
#    define MOE_EDGE_SERVER_API __declspec(dllexport)
#else
#    define MOE_EDGE_SERVER_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

struct llama_model;
struct llama_context;

typedef struct moe_edge_server  moe_edge_server;
typedef struct moe_edge_request moe_edge_request;

// What the server does with requests that leave something open. Texts may be NULL.
typedef struct moe_edge_server_config {
    const char * model_name;     // that /v1/models says
    const char * chat_template;  // in the place of the model's own
    int32_t      n_parallel;     // sequences of the context, each a conversation
    int32_t      n_slot_context; // tokens that one of them may have
    int32_t      n_batch;        // of the context, tokens
    int32_t      n_threads;
    int32_t      max_tokens;     // of an answer, -1: what the context has room for
    int32_t      cache_mib;      // copies of earlier conversations' KV, 0: none
    int32_t      n_checkpoints;  // of a conversation whose memory cannot be cut, 0: none
    uint32_t     seed;           // UINT32_MAX: another one each time
    int32_t      top_k;
    float        temp;
    float        top_p;
    float        min_p;
    int32_t      verbosity;      // of upstream's own log, on stderr; -1: silent
    int32_t      most_ahead;     // bytes that a stream may have which nobody has taken yet
} moe_edge_server_config;

MOE_EDGE_SERVER_API int moe_edge_server_abi_version(void);

// Takes a loaded model and a context of n_parallel sequences that share their cells; both stay the
// caller's and outlive the server. It decodes two tokens on the calling thread, to learn whether the memory can drop the
// last tokens of a sequence. Returns NULL on failure, with the reason in error.
MOE_EDGE_SERVER_API moe_edge_server * moe_edge_server_create(
    struct llama_model * model, struct llama_context * context, const moe_edge_server_config * config,
    char * error, size_t error_size);

// Called on the thread that is in run, before each of its steps. is_answer: no token of the step belongs to a prompt. The
// step fails unless the callback returns 0.
typedef int (*moe_edge_server_before_step)(void * user, int is_answer);

// Before run. Without one, steps follow each other.
MOE_EDGE_SERVER_API void moe_edge_server_set_before_step(
    moe_edge_server * server, moe_edge_server_before_step callback, void * user);

// Called on the thread that runs a request, once for each of its sequences, before anything is read there: with the
// tokens of the one prompt that will be read, or with none where no such is known. Nothing decodes on it yet.
typedef void (*moe_edge_server_before_prompt)(void * user, int32_t sequence, const int32_t * tokens, int32_t n_tokens);

// Before run.
MOE_EDGE_SERVER_API void moe_edge_server_set_before_prompt(
    moe_edge_server * server, moe_edge_server_before_prompt callback, void * user);

// What somebody else knows of a sequence, and that goes with its tokens: noted at a place in it, and recalled if the
// sequence goes back to that place, or if a copy with it comes back. Called on the thread that is in run; `drop` also by
// moe_edge_server_free.
typedef struct moe_edge_server_notes {
    int64_t (*note)(void * user, int32_t sequence);               // of the sequence as it is; returns a number, -1 for nothing
    void    (*recall)(void * user, int32_t sequence, int64_t note);
    void    (*drop)(void * user, int64_t note);                   // it will not be recalled any more
    void *  user;
} moe_edge_server_notes;

// Before run.
MOE_EDGE_SERVER_API void moe_edge_server_set_notes(moe_edge_server * server, const moe_edge_server_notes * notes);

// On the thread that is in run, before a step is computed: copies of earlier conversations take so many bytes at most from
// now on; those go first that were used longest ago. Nothing where cache_mib is 0. Returns what they take now.
MOE_EDGE_SERVER_API uint64_t moe_edge_server_keep_prompts(moe_edge_server * server, uint64_t bytes);

// Answers requests until moe_edge_server_stop; every step is computed on this thread.
MOE_EDGE_SERVER_API void moe_edge_server_run(moe_edge_server * server);

// Any thread: whether a sequence's memory cannot be cut anywhere, so that it goes back to marks.
MOE_EDGE_SERVER_API int moe_edge_server_has_part(const moe_edge_server * server);

// The functions about a sequence from here on do their work between two steps, on the thread that is in run, once no
// request decodes on the sequence; or, after run has returned and every request is freed, on the calling thread. They are
// not called on the thread that is in run. They fail while the server ends.

// Returns once the steps of all requests that have ended are computed, however they ended. Returns 0, or -1 on failure.
MOE_EDGE_SERVER_API int moe_edge_server_settle(moe_edge_server * server);

// Lets a sequence forget all that it holds. If no request decodes on any sequence, the caller may use the context afterwards,
// until its next request. Returns 0, or -1 on failure.
MOE_EDGE_SERVER_API int moe_edge_server_forget(moe_edge_server * server, int32_t sequence);

// Copies the first n_most tokens that a sequence holds. Returns how many it holds, -1 on failure.
MOE_EDGE_SERVER_API int64_t moe_edge_server_tokens(
    moe_edge_server * server, int32_t sequence, int32_t * tokens, size_t n_most);

// Returns how many tokens of a prompt would not be read again, because the sequence or a copy in memory has them; -1 on
// failure. is_another: whether reading the prompt would take tokens of another conversation from the sequence.
MOE_EDGE_SERVER_API int64_t moe_edge_server_match(
    moe_edge_server * server, int32_t sequence, const int32_t * prompt, size_t n_prompt, int * is_another);

// A place in a sequence to which its memory can go back, with data in a file.
typedef struct moe_edge_server_mark {
    uint64_t offset;    // of the data in the file
    uint64_t n_bytes;
    int32_t  n_tokens;  // before the place
    int32_t  pos_min;   // positions that the data has
    int32_t  pos_max;   // -1: not known
} moe_edge_server_mark;

// Writes what a sequence holds to a file: its tokens and llama.cpp's state, and after these the data of its marks. Returns
// the bytes of the first part, -1 on failure. n_tokens: gets how many tokens it has. n_marks: how many marks have room in
// `marks`; gets how many there are.
MOE_EDGE_SERVER_API int64_t moe_edge_server_save(
    moe_edge_server * server, int32_t sequence, const char * path, int32_t * n_tokens, moe_edge_server_mark * marks,
    int32_t * n_marks);

// Replaces what a sequence holds by what a file has; the latest marks are used, as many as n_checkpoints allows. More may
// follow in the file. Returns 0, or -1 on failure: the sequence is then empty.
MOE_EDGE_SERVER_API int moe_edge_server_restore(
    moe_edge_server * server, int32_t sequence, const char * path, const moe_edge_server_mark * marks, int32_t n_marks);

// Any thread: how the last answer on a sequence ended. Returns 0 if it did not end by itself, 1 at a token that ends answers,
// 2 at a stop word, 3 at a limit. at_context: whether that limit was the context.
MOE_EDGE_SERVER_API int moe_edge_server_ending(moe_edge_server * server, int32_t sequence, int * at_context);

// Any thread: writes a prompt with the tokens of `held` wherever both stand for the same text between control tokens. Copies
// the first n_most tokens and returns how many there are.
MOE_EDGE_SERVER_API size_t moe_edge_server_as_held(
    moe_edge_server * server, const int32_t * prompt, size_t n_prompt, const int32_t * held, size_t n_held,
    int32_t * tokens, size_t n_most);

// Any thread, any time: the running step ends early, every request ends, and so does run.
MOE_EDGE_SERVER_API void moe_edge_server_stop(moe_edge_server * server);

// After run has returned and every request is freed.
MOE_EDGE_SERVER_API void moe_edge_server_free(moe_edge_server * server);

// route: a path of moe_edge_server_route. NULL for another one, and where there is no memory. The body is copied.
// sequences: those that prompts are read into, by turns, of one that decodes; other answers to a prompt get any that
// are free. Without any, llama.cpp chooses.
MOE_EDGE_SERVER_API moe_edge_request * moe_edge_request_create(
    moe_edge_server * server, const char * route, const char * body, size_t body_size,
    const int32_t * sequences, size_t n_sequences);

// Answers the request, to its end. ready: a file descriptor that gets a byte when something has come for one who
// found nothing at the last moe_edge_request_take; -1 where nobody waits. Returns 0, or where it ended before its end: -1
// where there was no memory for it, -2 where it is a stream of which most_ahead bytes were not taken.
MOE_EDGE_SERVER_API int moe_edge_request_run(moe_edge_request * request, int ready);

// Beside moe_edge_request_run: what has come since the last call, valid until the next one. It is whole events where
// the answer is a stream (is_stream), else all of the answer or nothing. Returns the HTTP status, 0 while that is not known.
MOE_EDGE_SERVER_API int moe_edge_request_take(
    moe_edge_request * request, const char ** data, size_t * size, int * is_stream);

// After moe_edge_request_run: a sentence for the server's log about how the answer was made, or NULL. Valid until the
// request is freed.
MOE_EDGE_SERVER_API const char * moe_edge_request_note(const moe_edge_request * request);

// After moe_edge_request_run: when each token of the first answer was known, in microseconds since run began. Returns how many
// there are. Valid until the request is freed.
MOE_EDGE_SERVER_API size_t moe_edge_request_token_times(moe_edge_request * request, const int64_t ** times);

// Any thread: the request ends soon, and with it the work for it.
MOE_EDGE_SERVER_API void moe_edge_request_cancel(moe_edge_request * request);

// Not beside moe_edge_request_run. Ends the work where it has not ended.
MOE_EDGE_SERVER_API void moe_edge_request_free(moe_edge_request * request);

// The routes by number from 0; NULL behind the last one.
MOE_EDGE_SERVER_API const char * moe_edge_server_route(int number);

// Tries a chat template without a model. question: a JSON object with `template`, `bos_token`, `eos_token` and `cases`, a
// list of objects with a `request` for /v1/chat/completions and texts that a model answers (`answers`). Returns a JSON
// list, valid until the thread's next call, with an object for each case: `prompt`, `grammar`, the messages that a client
// would get (`answers`), or `error`.
MOE_EDGE_SERVER_API const char * moe_edge_server_try_template(const char * question);

#ifdef __cplusplus
}
#endif
