// The C interface of llama.cpp's server without HTTP, which the caller implements. A request consists of a route and a
// body. Its answer is returned in parts while it is generated.
//
// Threads: different requests may run on different threads at the same time. Functions of the same request must not be
// called at the same time, with two exceptions: moe_edge_request_take during moe_edge_request_run, and
// moe_edge_request_cancel at any time. "The decode thread" is the thread that is in moe_edge_server_run.

#pragma once

#include <stddef.h>
#include <stdint.h>

// The version of this interface. It increases with every change of a struct or a function in this file.
#define MOE_EDGE_SERVER_ABI_VERSION 11

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

// The settings of a server: limits, and defaults for requests. Texts may be NULL.
typedef struct moe_edge_server_config {
    const char * model_name;     // the name reported by /v1/models
    const char * chat_template;  // replaces the model's own template
    int32_t      n_parallel;     // number of sequences of the context; each holds a conversation
    int32_t      n_slot_context; // maximum length of a sequence, in tokens
    int32_t      n_batch;        // batch size of the context, in tokens
    int32_t      n_threads;
    int32_t      max_tokens;     // maximum length of an answer, in tokens; -1: the rest of the context
    int32_t      cache_mib;      // memory for KV copies of earlier conversations, in MiB; 0: no copies
    // The number of checkpoints that are kept for each conversation; 0: none. A checkpoint is a position to which a
    // sequence can return. Used only if a sequence can return to no other positions (see moe_edge_server_has_part).
    int32_t      n_checkpoints;
    uint32_t     seed;           // UINT32_MAX: a new seed for each request
    int32_t      top_k;          // this and the following three: defaults of the sampler
    float        temp;
    float        top_p;
    float        min_p;
    int32_t      verbosity;      // verbosity of upstream's log on stderr; -1: no log
    int32_t      most_ahead;     // maximum size of the part of a stream that was not taken yet, in bytes
    const char * mmproj;         // file of the image encoder; NULL: images are refused
    int32_t      image_max_tokens;  // maximum number of tokens of an image, if the model can scale images; -1: the model's
} moe_edge_server_config;

// The memory and the tokens that images need with a model's image encoder.
typedef struct moe_edge_images {
    uint64_t weights;      // size of the image encoder's weights, in bytes
    uint64_t scratch;      // size of the encoder's temporary buffers for the largest image, in bytes
    uint64_t prepared;     // size of the largest image after it was scaled or cut into tiles, in bytes
    uint64_t min_pixels;   // smaller images are enlarged to this many pixels; 0: the model's tiles have a fixed size
    int32_t  part_tokens;  // maximum number of tokens of a tile, or of the image if it is not cut
    int32_t  is_whole;     // 1 if all tokens of a tile must be computed in one micro-batch
    int32_t  n_embd;       // width of the embedding of an image token
} moe_edge_images;

// Measures the memory and the tokens that images of up to most_pixels pixels need, without loading the encoder's
// weights. path: file of the image encoder. max_tokens: image_max_tokens of the configuration. Returns 0, or -1 on
// failure and writes the reason to `error`.
MOE_EDGE_SERVER_API int moe_edge_measure_images(
    const char * path, int32_t max_tokens, int64_t most_pixels, moe_edge_images * out, char * error, size_t error_size);

// Returns the MOE_EDGE_SERVER_ABI_VERSION with which the library was compiled.
MOE_EDGE_SERVER_API int moe_edge_server_abi_version(void);

// Creates a server for a loaded model and a context that has n_parallel sequences in one unified KV cache. The caller
// owns the model and the context, and must keep them until the server is freed. Empties the KV cache and decodes two
// tokens on the calling thread, to test whether the last token of a sequence can be removed. Returns NULL on failure
// and writes the reason to `error`.
MOE_EDGE_SERVER_API moe_edge_server * moe_edge_server_create(
    struct llama_model * model, struct llama_context * context, const moe_edge_server_config * config,
    char * error, size_t error_size);

// The type of a callback before each step, on the decode thread. is_answer: 1 if no token of the step belongs to a
// prompt. If the callback does not return 0, the step fails.
typedef int (*moe_edge_server_before_step)(void * user, int is_answer);

// Sets the callback that is called before each step. Must be called before moe_edge_server_run.
MOE_EDGE_SERVER_API void moe_edge_server_set_before_step(
    moe_edge_server * server, moe_edge_server_before_step callback, void * user);

// The type of a callback on the thread that runs a request. It is called once for each sequence of the request, before
// a prompt is read into the sequence. tokens: this prompt; empty if it is not known.
typedef void (*moe_edge_server_before_prompt)(void * user, int32_t sequence, const int32_t * tokens, int32_t n_tokens);

// Sets the callback that is called before the prompts of a request are read. Must be called before moe_edge_server_run.
MOE_EDGE_SERVER_API void moe_edge_server_set_before_prompt(
    moe_edge_server * server, moe_edge_server_before_prompt callback, void * user);

// Callbacks that save and restore data that the caller keeps for each sequence, such as the state of a policy. A note
// is a saved copy of this data, which the caller stores. The server calls `note` at certain positions of a sequence to
// save the data. When the sequence returns to such a position, the server calls `recall` to restore it. When a note is
// no longer needed, the server calls `drop`. The callbacks are called on the decode thread, and `drop` also by
// moe_edge_server_free.
typedef struct moe_edge_server_notes {
    // Saves the caller's current state of a sequence as a note. Returns the note's number, or -1 if nothing was saved.
    int64_t (*note)(void * user, int32_t sequence);
    void    (*recall)(void * user, int32_t sequence, int64_t note);
    void    (*drop)(void * user, int64_t note);                   // deletes a note, which will not be recalled again
    void *  user;
} moe_edge_server_notes;

// Sets the callbacks that save and restore the caller's state of sequences. Must be called before moe_edge_server_run.
MOE_EDGE_SERVER_API void moe_edge_server_set_notes(moe_edge_server * server, const moe_edge_server_notes * notes);

// Limits the copies of earlier conversations to this many bytes from now on, and drops the least recently used copies
// above the limit. Returns the size of all copies in bytes. Has no effect if cache_mib is 0. Must be called on the
// decode thread, before a step is computed.
MOE_EDGE_SERVER_API uint64_t moe_edge_server_keep_prompts(moe_edge_server * server, uint64_t bytes);

// Computes the answers to all requests until moe_edge_server_stop is called. Every step is computed on the calling
// thread, which is the decode thread.
MOE_EDGE_SERVER_API void moe_edge_server_run(moe_edge_server * server);

// Returns 1 if a sequence can return only to checkpoints. This is so if its memory is recurrent or has sliding windows,
// because such a memory cannot remove an arbitrary number of last tokens. Returns 0 otherwise. May be called from any
// thread.
MOE_EDGE_SERVER_API int moe_edge_server_has_part(const moe_edge_server * server);

// The next six functions, from moe_edge_server_settle to moe_edge_server_restore, do their work on the decode thread,
// when no request decodes on their sequence. The caller waits meanwhile. They must be called from another thread, or
// after moe_edge_server_run has returned and all requests are freed. They fail while the server is stopping.

// Waits until every request that has ended, for whatever reason, has stopped computing. Returns 0, or -1 on failure.
MOE_EDGE_SERVER_API int moe_edge_server_settle(moe_edge_server * server);

// Removes all tokens from a sequence. Returns 0, or -1 on failure. If no request decodes on any sequence, the caller
// may then use the context itself until it runs the next request.
MOE_EDGE_SERVER_API int moe_edge_server_forget(moe_edge_server * server, int32_t sequence);

// Copies the first n_most tokens of a sequence to `tokens`. Returns the number of tokens in the sequence, or -1 on
// failure.
MOE_EDGE_SERVER_API int64_t moe_edge_server_tokens(
    moe_edge_server * server, int32_t sequence, int32_t * tokens, size_t n_most);

// Returns how many tokens of a prompt would be reused from this sequence, or from a copy in memory. Returns -1 on
// failure. is_another receives 1 if reading the prompt would remove tokens of another conversation from the sequence.
MOE_EDGE_SERVER_API int64_t moe_edge_server_match(
    moe_edge_server * server, int32_t sequence, const int32_t * prompt, size_t n_prompt, int * is_another);

// A checkpoint in a file: a position to which the memory of a sequence can return, and its data.
typedef struct moe_edge_server_mark {
    uint64_t offset;    // position of the data in the file, in bytes
    uint64_t n_bytes;
    int32_t  n_tokens;  // number of tokens before the checkpoint
    int32_t  pos_min;   // first position in the data
    int32_t  pos_max;   // last position in the data; -1: unknown
} moe_edge_server_mark;

// Writes the tokens and the llama.cpp state of a sequence to a file, followed by the data of its checkpoints. Returns
// the size of the part before the checkpoints in bytes, or -1 on failure. n_tokens receives the number of tokens.
// n_marks is the capacity of `marks`, and receives the number of checkpoints.
MOE_EDGE_SERVER_API int64_t moe_edge_server_save(
    moe_edge_server * server, int32_t sequence, const char * path, int32_t * n_tokens, moe_edge_server_mark * marks,
    int32_t * n_marks);

// Replaces the contents of a sequence with the contents of a file. marks: the checkpoints in the file, of which the
// latest are restored, at most n_checkpoints of the configuration. Returns 0, or -1 on failure; the sequence is then
// empty.
MOE_EDGE_SERVER_API int moe_edge_server_restore(
    moe_edge_server * server, int32_t sequence, const char * path, const moe_edge_server_mark * marks, int32_t n_marks);

// Returns how the last answer on a sequence ended: 1 at an end-of-generation token, 2 at a stop word, 3 at a limit, or
// 0 if it did not end by itself. at_context receives 1 if the limit was the size of the context. May be called from any
// thread.
MOE_EDGE_SERVER_API int moe_edge_server_ending(moe_edge_server * server, int32_t sequence, int * at_context);

// Makes a prompt share more tokens with `held`, the tokens of a sequence. A model often generates other tokens than its
// tokenizer makes from the same text. If a text between control tokens is the same in both lists, its tokens in the
// prompt are replaced by those of `held`. Copies the first n_most tokens of the result to `tokens` and returns the
// total number. May be called from any thread.
MOE_EDGE_SERVER_API size_t moe_edge_server_as_held(
    moe_edge_server * server, const int32_t * prompt, size_t n_prompt, const int32_t * held, size_t n_held,
    int32_t * tokens, size_t n_most);

// Ends the running step early, ends every request, and makes moe_edge_server_run return. May be called from any thread
// at any time.
MOE_EDGE_SERVER_API void moe_edge_server_stop(moe_edge_server * server);

// Frees a server. Must be called after moe_edge_server_run has returned and every request is freed.
MOE_EDGE_SERVER_API void moe_edge_server_free(moe_edge_server * server);

// Creates a request and copies its body. route: one of the paths of moe_edge_server_route. sequences: the sequences on
// which the request decodes its prompts, in this order. If n_sequences is 0, llama.cpp chooses the sequences. Returns
// NULL if the route is unknown or there is no memory.
MOE_EDGE_SERVER_API moe_edge_request * moe_edge_request_create(
    moe_edge_server * server, const char * route, const char * body, size_t body_size,
    const int32_t * sequences, size_t n_sequences);

// Runs a request until it ends. Returns 0 if the request was answered, or -1 if there was no memory. Returns -2 if the
// caller takes the output of a stream too slowly, so that more than most_ahead bytes (moe_edge_server_config) wait.
// ready: a file descriptor, or -1. If the last moe_edge_request_take returned nothing, one byte is written to `ready`
// when new output is available.
MOE_EDGE_SERVER_API int moe_edge_request_run(moe_edge_request * request, int ready);

// Returns the HTTP status of a request, or 0 if it is not known yet. data and size receive the output since the last
// call, valid until the next call. is_stream receives 1 for a stream, whose output consists of complete events.
// Otherwise the output is the whole answer or nothing. May be called while moe_edge_request_run is running.
MOE_EDGE_SERVER_API int moe_edge_request_take(
    moe_edge_request * request, const char ** data, size_t * size, int * is_stream);

// Returns a sentence about the answer of a request for the server's log, or NULL. Must be called after
// moe_edge_request_run. Valid until the request is freed.
MOE_EDGE_SERVER_API const char * moe_edge_request_note(const moe_edge_request * request);

// Returns the number of tokens of a request's first answer. times receives an array with the time at which each token
// was known, in microseconds since the start of moe_edge_request_run. The array is valid until the request is freed.
// Must be called after moe_edge_request_run.
MOE_EDGE_SERVER_API size_t moe_edge_request_token_times(moe_edge_request * request, const int64_t ** times);

// Cancels a request: its answer and its computation end soon. May be called from any thread.
MOE_EDGE_SERVER_API void moe_edge_request_cancel(moe_edge_request * request);

// Frees a request, and ends its work if it has not ended. Must not be called while moe_edge_request_run is running.
MOE_EDGE_SERVER_API void moe_edge_request_free(moe_edge_request * request);

// Returns the path of the route with this number, starting with 0, or NULL after the last route.
MOE_EDGE_SERVER_API const char * moe_edge_server_route(int number);

// Tests a chat template without a model, and returns a JSON list with one result for each case. The list is valid until
// the thread's next call. question: a JSON object with `template`, `bos_token`, `eos_token` and `cases`. A case is an
// object with a `request` for /v1/chat/completions, and with `answers`, the texts that a model might answer. A result
// is an object with `prompt`, `grammar` and `answers`, the messages that a client would receive. After an error, the
// result is an object with `error`.
MOE_EDGE_SERVER_API const char * moe_edge_server_try_template(const char * question);

#ifdef __cplusplus
}
#endif
