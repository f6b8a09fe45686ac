// The C interface of moe-edge, which runs a Mixture-of-Experts model with a store of experts. The store keeps experts
// in a cache within a memory budget and reads the others from disk on demand. One store serves one loaded model and one
// llama_context that decodes at a time.

// Call order: moe_edge_store_create creates a store, which waits for a model. llama_model_load_* then loads a model
// with tensor_buft_overrides that place the expert tensors in moe_edge_buffer_type(). The model takes the store.
// llama_decode, llama_encode and llama_process work as without a store. At the end, llama_free is called before
// moe_edge_store_free and llama_model_free.

// Attaching: a model with expert tensors in moe_edge_buffer_type() takes the most recently created store that waits for
// a model. After the model is freed, the store waits again. A simulated store never waits, and a model that is loaded
// with no_alloc takes no store. Loading fails if no store waits, or if the model's tensors do not match the store's
// configuration. moe_edge_load_error() then returns the reason.

// Steps: each micro-batch (ubatch) that a context computes is one step. If a step fails, llama_decode returns
// MOE_EDGE_FAILED, and moe_edge_error() returns the reason. After a cancel, llama_decode returns 2. In both cases
// llama.cpp removes the micro-batch from its KV cells.

// Words: "layer" is always the index of a MoE layer, 0 .. n_layers-1, not counting dense layers. moe_edge_layer.il is
// the model's own layer number. A "tier" is one of the precisions in which the files store each expert. Tier 0 is the
// best, and a larger number is a worse precision. A "transition" changes the tier of a resident expert in the
// background. "Look-ahead" is the prediction of the experts that the next layers will select. Sizes are in bytes.
// Shapes are written as [rows, columns], row-major.

// Threads: unless its comment says otherwise, a function that takes a store may be called from any thread. The
// functions that set a callback or a phase must be called between steps, or from a callback on the decoding thread.

#pragma once

#include <stddef.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// The version of this interface. It increases with every change of a struct or a function below. A caller must compare
// it with moe_edge_abi_version() before it calls any other function.
#define MOE_EDGE_ABI_VERSION 23

#define MOE_EDGE_API __attribute__((visibility("default")))

#define MOE_EDGE_MAX_TIERS    5
#define MOE_EDGE_MAX_AHEAD    4
#define MOE_EDGE_MAX_PREFETCH 1024
#define MOE_EDGE_DEVICE_ALIGN 256
#define MOE_EDGE_SKIP         255  // tier of an expert that is skipped and contributes nothing
#define MOE_EDGE_ABSENT       254  // residency of an expert if one of its matrices is not in memory

// The value that llama_decode returns if a step failed and would also fail with fewer tokens. If moe_edge_error()
// returns NULL, the failure is llama.cpp's own.
#define MOE_EDGE_FAILED (-3)

// The matrices of an expert (matrix kinds). All experts of a layer have the same kinds: UP and DOWN, UP and GATE and
// DOWN, or GATE_UP and DOWN.
enum moe_edge_kind {
    MOE_EDGE_UP      = 0,
    MOE_EDGE_GATE    = 1,
    MOE_EDGE_GATE_UP = 2,
    MOE_EDGE_DOWN    = 3,
    MOE_EDGE_N_KINDS = 4,
};

// The phase of a token or a step. A step with at least one prompt token is prefill.
enum moe_edge_phase {
    MOE_EDGE_PREFILL = 0,
    MOE_EDGE_DECODE  = 1,
};

enum moe_edge_flags {
    MOE_EDGE_DIRECT_IO   = 1,  // use O_DIRECT if the file system supports it
    // Compute every request in exactly the requested tier. A better resident tier is evicted instead of used. Slow; for
    // measuring the quality loss of a tier.
    MOE_EDGE_EXACT_TIERS = 2,
    MOE_EDGE_SIMULATED   = 4,  // open no files: reads move no bytes and take virtual time
    // Hand an expert to an op only after all matrices of the expert are resident, if there are enough slots for that.
    // Slow; for comparisons only.
    MOE_EDGE_WHOLE_EXPERTS = 8,
    // Do demand reads and prefetches in the order of their requests, and cancel no read. Slow; for comparisons only,
    // and only with MOE_EDGE_SIMULATED.
    MOE_EDGE_RIGID       = 16,
};

// How a store on a device serves an expert that a token needs and that is not in device memory (a cache miss).
enum moe_edge_miss {
    MOE_EDGE_MISS_COPY    = 0,  // copy it to a slot, then compute it on the device
    // Host threads compute the expert in host memory while the device computes other experts. The expert needs no slot
    // for that. Afterwards it may be copied to a slot for later steps.
    MOE_EDGE_MISS_COMPUTE = 1,
    MOE_EDGE_MISS_AUTO    = 2,  // choose for each expert the way that finishes its layer first
};

// The location of all experts of one (layer, matrix kind, tier) in a file. Expert e starts at byte offset +
// e*expert_bytes of files[file].
struct moe_edge_slices {
    uint64_t offset;
    uint64_t expert_bytes;  // 0: the layer has no such matrix
    int32_t  file;          // index in moe_edge_config.files
    int32_t  type;          // enum ggml_type
    int32_t  group;         // index of the slot group that holds these slices
    // The number of rows of the matrix if slots hold the CPU's own layout (moe_edge_interleaves). 0: slots hold the
    // bytes of the file.
    int32_t  interleaved_rows;
    // The CRC-32 of each expert, [n_expert], or NULL. If the first complete read of an expert has another checksum, the
    // read fails.
    const uint32_t * checksums;
    // The time in microseconds that the host threads need for the product of one of these experts and one token. The
    // caller measures it with moe_edge_measure_product(). Used for MOE_EDGE_MISS_AUTO. 0: the host must not compute
    // these experts.
    double   compute_us;
};

// The configuration of a slot group: slots of one size with a common LRU order. All slices (expert matrices) in a group
// have the same matrix kind. On a device, they also have the same tier, type and size.
//
// slot_bytes: at least moe_edge_slot_bytes() of every slice, or on a device moe_edge_device_slot_bytes().
struct moe_edge_group {
    uint64_t slot_bytes;
    int32_t  n_slots;
    int32_t  n_passing;  // most slots that streaming requests (moe_edge_decision) may hold; 0 means 1
    // The memory that contains the slots. MOE_EDGE_MISS_COPY: the memory of the store's device, or host memory if the
    // store has no device. MOE_EDGE_MISS_COMPUTE: host memory although the store has a device. Host threads then always
    // compute the experts in these slots.
    int32_t  place;
    int32_t  reserved;
};

struct moe_edge_layer {
    int32_t il;
    int32_t reserved;
    struct moe_edge_slices slices[MOE_EDGE_N_KINDS][MOE_EDGE_MAX_TIERS];
};

struct moe_edge_config {
    const char * const *           files;
    const struct moe_edge_layer *  layers;
    const struct moe_edge_group *  groups;
    // The device whose memory holds the slots, from moe_edge_device_find(). NULL: the slots are in host memory.
    void *   device;
    // The budget for all slots: the sum of slot_bytes*n_slots of the groups must not exceed it.
    uint64_t budget_bytes;
    // The budget of the host tier, a cache in host memory between the disk and the device of the store. At least
    // moe_edge_host_least_bytes().
    uint64_t host_bytes;
    // The bytes of weights per second that can be copied to the device, or 0 if unknown. Used for MOE_EDGE_MISS_AUTO.
    double   copy_bytes_per_s;
    // The microseconds that each synchronization of host and device takes, including the time to wake the host threads.
    // Used for MOE_EDGE_MISS_AUTO.
    double   round_trip_us;
    int32_t  misses;          // enum moe_edge_miss for layers with few tokens, on a device; other layers use COPY
    int32_t  n_host_threads;  // host threads that compute misses
    int32_t  n_files;
    int32_t  n_layers;
    int32_t  n_groups;
    int32_t  n_tiers;         // tier 0 is the best
    int32_t  n_expert;        // experts per layer
    int32_t  n_expert_used;   // k: the most experts that a token uses in a layer
    // The most tokens in one route event (n_ubatch). A larger event is not reported, and its experts are computed in
    // the default tier.
    int32_t  max_tokens;
    int32_t  n_ahead;         // most layers for which experts are predicted, 0 .. MOE_EDGE_MAX_AHEAD
    int32_t  n_io_threads;
    int32_t  flags;           // enum moe_edge_flags
    // The number of tokens at the end of each prompt in a step whose attention queries determine token importance. 0:
    // compute no importance. -1: all tokens, which is not possible with flash attention.
    int32_t  importance_window;
    int32_t  reserved;
};

struct moe_edge_store;

// A route event: the experts that the router of one layer has selected for the tokens of a step. The store owns all
// arrays. Their addresses never change during the lifetime of the store, and their contents are valid only during the
// route callback.
struct moe_edge_event {
    int32_t layer;
    int32_t phase;             // enum moe_edge_phase of the step: prefill if any token belongs to a prompt
    int32_t n_tokens;          // T: tokens of this event. The last layer may have fewer than the micro-batch.
    int32_t n_ahead;           // number of layers with predicted experts: layer+1 .. layer+n_ahead
    int32_t has_importance;
    int32_t n_used;            // experts that each token uses in this layer, at most k
    int64_t step;              // number of the step
    const int32_t * ids;       // [T, k]  selected experts. Entries after the first n_used repeat the row's first id.
    const float   * weights;   // [T, k]  routing weights as the model applies them; 0 after the first n_used
    const int32_t * tokens;    // [T]     index of each token in its micro-batch
    const uint8_t * phases;    // [T]     enum moe_edge_phase of each token
    const int32_t * sequences; // [T]     sequence of each token; the first one if a token has several
    const int32_t * ahead_ids; // [n_ahead, max_tokens, k] predicted experts, best first; padded like ids
    const float   * ahead;     // [n_ahead, max_tokens, k] predicted scores of ahead_ids, eq. 6 of DyMoE
    // The attention that each prompt token receives from its own sequence, [T], eq. 1 of DyMoE. Undefined for tokens
    // that do not belong to a prompt.
    const float   * importance;
    const uint8_t * resident;  // [n_layers, n_expert] as returned by moe_edge_get_resident
    const uint8_t * missing;   // [n_layers, n_expert] bit mask of 1 << moe_edge_kind: matrices that are not in memory
};

struct moe_edge_prefetch_item {
    int16_t layer;
    int16_t expert;
    uint8_t tier;
    uint8_t kinds;             // bit mask of 1 << moe_edge_kind; 0 means all matrices of the expert
    int16_t passing;           // 1: a streaming request, see moe_edge_decision
};

// The output of the route callback: the tiers of the experts that a router has selected, and the experts to prefetch.
// Before each call, the store sets tier[] to 0 (the best tier) and passing[] to 0. After the call, it reads only the
// entries of selected experts.
struct moe_edge_decision {
    uint8_t * tier;                       // [n_expert] tier index, or MOE_EDGE_SKIP
    // 1: a streaming request, from a long prompt that needs nearly all experts. It does not count as a use of the
    // expert, and the expert is evicted first. Streamed experts evict other experts only while they hold fewer than
    // moe_edge_group.n_passing slots.
    uint8_t * passing;                    // [n_expert] 0 or 1
    // Experts to prefetch if they are absent. Prefetching an expert of the list does not evict another expert of the
    // list.
    struct moe_edge_prefetch_item * prefetch;  // [MOE_EDGE_MAX_PREFETCH] most urgent first
    int32_t n_prefetch;
    int32_t renormalize;                  // 1: scale a token's remaining weights so that their sum is as before skipping
};

// The type of the route callback. It is called for each MoE layer, on the thread that decodes. It returns 0, or another
// value to make the running llama_decode fail.
typedef int (*moe_edge_route_cb)(void * user);

// The report of a computed step, which the step callback receives. The arrays are valid only during the callback. A
// token that belongs to several sequences counts for each of them.
struct moe_edge_step {
    int64_t  step;                  // number of the step, as in its route events
    uint64_t us;                    // duration in microseconds
    int32_t  phase;                 // enum moe_edge_phase, as in the route events
    int32_t  n_tokens;
    int32_t  n_starts;
    int32_t  n_prompt_ends;
    int32_t  n_ends;
    int32_t  reserved;
    const int32_t * starts;         // [n_starts] sequences with a token at position 0
    const int32_t * prompt_ends;    // [n_prompt_ends] sequences with a prompt token that has an output
    // The sequences that ended between the previous call of the step callback and this one, as declared with
    // moe_edge_sequence_end, [n_ends]. They ended before the sequences in `starts` began.
    const int32_t * ends;
};

// The type of the step callback. It returns 0, or another value to make the step fail although it was computed.
typedef int (*moe_edge_step_cb)(const struct moe_edge_step * step, void * user);

// The causes for which the thread that decodes may wait during a step.
enum moe_edge_wait {
    MOE_EDGE_WAIT_DISK       = 0,  // an expert that is read from disk
    MOE_EDGE_WAIT_HOST_TIER  = 1,  // a slot of the host tier, which an expert needs before it can be read
    MOE_EDGE_WAIT_COPY       = 2,  // a copy between host and device
    MOE_EDGE_WAIT_TRANSITION = 3,  // transitions that are published at a step boundary, or that hold a slot
    MOE_EDGE_WAIT_LAUNCH     = 4,  // the GPU driver, until it has accepted a kernel launch
    MOE_EDGE_N_WAITS         = 5,
};

struct moe_edge_stats {
    // Counters with [2] are separate for prefill and decode steps. In requests, hits, routed and computed, an expert
    // counts once per step, for any number of tokens.
    uint64_t requests[2];          // requested matrices
    uint64_t hits[2];              // requests whose tier, or a better one, was resident
    uint64_t demand_bytes[2];      // read because a token needed them
    uint64_t prefetch_bytes[2];
    uint64_t wait_us[2];           // time in which compute threads waited for I/O
    uint64_t host_hits[2];         // loads to a device whose slice was in the host tier
    uint64_t copy_bytes[2];        // copied to a device
    uint64_t host_computed[2];     // matrices that the host computed, without a slot on the device
    uint64_t host_computed_bytes[2];
    uint64_t callback_us[2];       // inside the route callback
    uint64_t callbacks[2];
    uint64_t locks[2];             // times that the thread that decodes took the store's lock
    uint64_t waits[2][MOE_EDGE_N_WAITS];      // waits of the thread that decodes, by enum moe_edge_wait
    uint64_t waited_ns[2][MOE_EDGE_N_WAITS];  // their duration
    uint64_t routed[2][MOE_EDGE_MAX_TIERS + 1];  // experts by decided tier; last: skip
    uint64_t computed[2][MOE_EDGE_MAX_TIERS];    // matrices by the tier really computed
    uint64_t waves;                // extra passes because experts had to be waited for
    uint64_t promotions;
    uint64_t evictions;
    uint64_t prefetch_used;
    uint64_t prefetch_wasted;
    uint64_t prefetch_cancelled;
    uint64_t slot_bytes_in_use;
    uint64_t slot_bytes_peak;
    uint64_t budget_bytes;
    uint64_t slot_bytes;           // size of the usable slots: all, or those within the limit of moe_edge_store_limit
    uint64_t read_us;              // sum over all I/O threads
    uint64_t experts_promoted;     // published transitions, by direction
    uint64_t experts_demoted;
    uint64_t transitions_begun;
    uint64_t transitions_rejected; // no free slot, or the expert is not resident or already in transition
    uint64_t transitions_failed;   // the read failed, or a token needed the slot; the old version stayed
    uint64_t transition_bytes;     // read in the background
    uint64_t table_writes;         // changes of an entry of an expert table
    uint64_t host_bytes;           // memory of the host tier of the device, all of it allocated at the start
    int32_t  direct_io;            // 1 if every file is read with O_DIRECT
    int32_t  host_pinned;          // 1 if the memory of host_bytes is pinned
    // The enum moe_edge_miss in effect. It is the configured value, or MOE_EDGE_MISS_COPY if MOE_EDGE_MISS_AUTO was
    // configured and the speed of copies is not known.
    int32_t  misses;
    int32_t  reserved;
};

// Returns the MOE_EDGE_ABI_VERSION with which the library was compiled.
MOE_EDGE_API int32_t moe_edge_abi_version(void);

// Returns 1 if this CPU has its own layout for matrices of n_out rows of n_in values of this type, and 0 otherwise. The
// kernels for that layout are faster than those for the layout of the file. A matrix has the same size in both layouts.
MOE_EDGE_API int32_t moe_edge_interleaves(int32_t type, int64_t n_in, int64_t n_out);

// Extends a CRC-32 checksum by n bytes and returns the new checksum, as zlib's crc32 does. crc: the checksum of all
// bytes before `data`; 0 if there are none.
MOE_EDGE_API uint32_t moe_edge_crc32(uint32_t crc, const void * data, uint64_t n);

// Returns the bytes that a slot needs for an expert of expert_bytes bytes at this file offset. A slot is larger than
// the expert, because direct reads cover whole 4096-byte blocks.
MOE_EDGE_API uint64_t moe_edge_slot_bytes(uint64_t offset, uint64_t expert_bytes);

// Returns the bytes that a slot for an expert takes in device memory, a multiple of the type's block size. They include
// the padding that kernels may read after the expert. n_cols: number of values in a row. Returns 0 for a type that ggml
// lacks.
MOE_EDGE_API uint64_t moe_edge_device_slot_bytes(int32_t type, uint64_t expert_bytes, int64_t n_cols);

// Returns the smallest value of host_bytes (the budget of the host tier) that works with the rest of this
// configuration.
MOE_EDGE_API uint64_t moe_edge_host_least_bytes(const struct moe_edge_config * config);

struct moe_edge_device_info {
    char     name[128];
    uint64_t free_bytes;
    uint64_t total_bytes;
};

struct moe_edge_bandwidths {
    double  pinned_bytes_per_s;    // host to device; 0 if memory cannot be pinned
    double  pageable_bytes_per_s;
    double  round_trip_us;         // a copy of few bytes, until the host knows that it is done
    double  compute_bytes_per_s;   // weights in Q4_K that the host's threads multiply with one token
};

// Returns a device of this process by name, or NULL with one sentence in err. A device lives until the process ends.
// The names are "cuda0", "cuda1", and so on. For tests, "host" uses main memory as a device, and the copies of
// "host:DELAY" take up to DELAY microseconds.
MOE_EDGE_API void * moe_edge_device_find(const char * name, char * err, size_t err_size);
// Writes the name and the memory of a device to out. Always returns 0.
MOE_EDGE_API int moe_edge_device_describe(void * device, struct moe_edge_device_info * out);
// Returns the ggml_backend_buffer_type_t in which the expert tensors of a model must be placed if its store is on this
// device.
MOE_EDGE_API void * moe_edge_device_buffer_type(void * device);
// Makes a device repeat each copy of an expert from host memory, so that the expert is copied `times` times to the same
// address. This imitates a link that is slower by that factor, and changes nothing else. Takes effect immediately, also
// in moe_edge_device_measure. For measurements. Returns 0, or -1 if `times` is below 1.
MOE_EDGE_API int moe_edge_device_copy_times(void * device, int32_t times);
// Measures how fast a device receives data and how fast the host computes, with `bytes` bytes (at least 1 MiB) and
// n_threads host threads. Allocates `bytes` on the device and twice as much in host memory, and frees both. Returns 0,
// or -1 if there is not enough memory or the device is lost.
MOE_EDGE_API int moe_edge_device_measure(void * device, uint64_t bytes, int32_t n_threads, struct moe_edge_bandwidths * out);

// Measures how long n_threads host threads take to multiply experts of this type and of shape [n_out, n_in] with one
// token. The conditions are those of a cache miss: the threads sleep first, and the weights are in no CPU cache.
// each_us receives the time for each expert, wake_us the additional time for the first expert. Returns 0, or -1 if the
// type or shape is not valid.
MOE_EDGE_API int moe_edge_measure_product(int32_t type, int64_t n_in, int64_t n_out, int32_t n_threads, double * each_us, double * wake_us);

// Makes all stores that are created from now on work without threads of their own, if `on` is not 0. The decoding
// thread does all reads and copies, and the rate of transitions is not limited. Counters are then the same in every
// run. Slow.
MOE_EDGE_API void moe_edge_in_turn(int32_t on);

// Creates a store. The store waits for a model, unless it is simulated. Returns NULL on failure, with one sentence in
// err.
MOE_EDGE_API struct moe_edge_store * moe_edge_store_create(
        const struct moe_edge_config * config, char * err, size_t err_size);
// Frees a store, and detaches it from its model if it has one. The context must have been freed before. NULL is allowed.
MOE_EDGE_API void moe_edge_store_free(struct moe_edge_store * store);

// Limits the memory of the slots to `bytes` from now on, by evicting experts. Returns how many bytes of slots above the
// limit are still in use; 0 means that the limit is in effect. `bytes` above the configured size means no limit.
//
// Returns -1 with one sentence in err if the limit cannot be set: `bytes` is less than one slot of each group, the
// slots are on a device, or a step of a model or a warm start is running. May be called from any thread between steps,
// and from the step callback.
MOE_EDGE_API int64_t moe_edge_store_limit(struct moe_edge_store * store, uint64_t bytes, char * err, size_t err_size);

// Returns the number of expert matrices that are being loaded. May be called from any thread. A caller can wait for
// these loads if moe_edge_store_limit reports that slots above the limit are in use. If none is being loaded and such
// slots are still in use, only another step can release them.
MOE_EDGE_API int32_t moe_edge_store_loading(struct moe_edge_store * store);

// Returns how many tokens of the running batch of a model have been computed, or of the last batch if no batch is
// running. The running micro-batch counts in proportion to its completed MoE layers. May be called from any thread;
// takes no lock.
MOE_EDGE_API double moe_edge_tokens_done(const struct moe_edge_store * store);

// Returns the ggml_backend_buffer_type_t in which the expert tensors of a model must be placed. The tensors are then
// placeholders without memory, and the store has their data.
MOE_EDGE_API void * moe_edge_buffer_type(void);

// Returns why loading a model whose experts need a store, or creating its first context, has failed in this thread.
// Returns NULL if nothing failed, or if the reason was already returned. The string is valid until the next call in
// this thread.
MOE_EDGE_API const char * moe_edge_load_error(void);

// The memory in bytes that a context and its model take, without the slots of the store. Element 0 of each array: host
// memory. Element 1: other memories.
struct moe_edge_memory {
    uint64_t weights[2];
    uint64_t cache[2];
    uint64_t scratch[2];
};

// Writes the memory that a context and its model take to `out`. context is a struct llama_context *.
MOE_EDGE_API void moe_edge_get_memory(void * context, struct moe_edge_memory * out);

// The host memory of all contexts of this process, in bytes: KV caches, scratch buffers of graphs, and work buffers of
// ggml's CPU backend. Element 0 of each array: reserved memory. Element 1: resident memory. Recurrent memories and
// memory that a GPU library has pinned are not included.
struct moe_edge_touched {
    uint64_t cache[2];
    uint64_t scratch[2];
    uint64_t work[2];
    uint64_t used;       // bytes of the KV cells that hold a token
    uint64_t cells_end;  // index after the last used KV cell; the maximum over all caches
};

// Writes to `out` how many bytes of host memory the contexts of this process have reserved, and how many of these are
// resident. May be called from any thread. Takes up to about 1 ms per GiB.
MOE_EDGE_API void moe_edge_get_touched(struct moe_edge_touched * out);

// Makes a context on the CPU (a struct llama_context *) adapt its number of threads to the load of the machine,
// starting with the next step. Decode steps then use as many threads as find a free core, at most `most`. Steps with
// more than a few tokens use `most` threads. With `most` 0 the context no longer adapts; this call is required before
// the context is freed.
MOE_EDGE_API void moe_edge_adapt_threads(void * context, int32_t most);

// Binds one expert tensor to a matrix of the store without a llama_model. tensor is a struct ggml_tensor * in
// moe_edge_buffer_type() and the first operand of a ggml_mul_mat_id. It must not outlive the store. Returns 0, or -1
// with one sentence in err.
MOE_EDGE_API int moe_edge_store_bind(struct moe_edge_store * store, int32_t layer, int32_t kind,
        void * tensor, char * err, size_t err_size);

// Returns the store's route event. The store fills it before each call of the route callback, which reads it. The
// pointer is valid as long as the store exists.
MOE_EDGE_API const struct moe_edge_event * moe_edge_store_event(struct moe_edge_store * store);
// Returns the object to which the route callback writes its decision about the experts of the route event: their tiers
// and the experts to prefetch. The pointer is valid as long as the store exists.
MOE_EDGE_API struct moe_edge_decision *    moe_edge_store_decision(struct moe_edge_store * store);

// Sets the route callback, which decides about the experts of each layer. phases: the steps in which it is called, as a
// bit mask of 1 << moe_edge_phase. In other steps, or if cb is NULL, every selected expert is requested in
// default_tier, or in its resident tier if that is better.
MOE_EDGE_API void moe_edge_set_callback(
        struct moe_edge_store * store, moe_edge_route_cb cb, void * user, int32_t default_tier, uint32_t phases);

// Sets the step callback, or removes it with NULL. It is called on the thread that decodes, at the end of each step
// that was computed without an error, except for warm-up steps. With a callback, a step ends only after the device has
// finished computing it.
MOE_EDGE_API void moe_edge_set_step_callback(struct moe_edge_store * store, moe_edge_step_cb cb, void * user);

// The arguments of the room callback: the memory, in addition to the slots, that a batch of a model is about to take.
struct moe_edge_room {
    struct moe_edge_touched touched;  // current use: of all KV caches, and of this context's scratch and work buffers
    uint64_t n_bytes;      // size of a state that is about to be restored into the KV cache
    int32_t  n_tokens;     // tokens of the batch; 0 if a state is restored
    int32_t  at_once;      // in: largest micro-batch of the context; out: largest micro-batch of this batch
    int32_t  drop_scratch; // out: 1 frees the memory that scratch and work buffers still hold
    int32_t  reserved;
};

// The type of the room callback, which makes memory available for a batch, for example with moe_edge_store_limit. If it
// does not return 0, the batch fails without computing anything.
typedef int (*moe_edge_room_cb)(struct moe_edge_room * room, void * user);
// Sets the room callback, which makes memory available for the KV cache and for computing, or removes it with NULL. On
// the CPU, the thread that decodes calls it before a batch is computed and before a state is restored. The next 256
// tokens are then computed without another call, unless a larger batch arrives.
MOE_EDGE_API void moe_edge_set_room_callback(struct moe_edge_store * store, moe_edge_room_cb cb, void * user);

// Sets the phase of every token from the next step on: an enum moe_edge_phase, or -1 to infer the phase (the default).
// An inferred phase is prefill if the token's sequence has several tokens in the batch passed to llama_decode, or if
// the token has no output.
MOE_EDGE_API void moe_edge_set_phase(struct moe_edge_store * store, int32_t phase);

// Declares that, from the next step on, the tokens of these n sequences belong to prompts, and all other tokens do not.
// Replaces the setting of moe_edge_set_phase. context is a struct llama_context *. Does nothing if the context's model
// has no store.
MOE_EDGE_API void moe_edge_set_prompts(void * context, const int32_t * sequences, int32_t n);

// Notifies the store that a sequence was removed from the context's memory. -1: all sequences. The next step report
// lists the sequence as ended if an earlier reported step had tokens of it.
MOE_EDGE_API void moe_edge_sequence_end(struct moe_edge_store * store, int32_t sequence);

// Begins a step of a store without a model; phase is an enum moe_edge_phase. If the store has a model, its context
// begins a step before each micro-batch.
MOE_EDGE_API void moe_edge_begin_step(struct moe_edge_store * store, int32_t phase);

// Returns one sentence that says why the last step failed, or NULL if it did not fail. The string is valid until the
// next step begins. The output of a failed or cancelled step is undefined.
MOE_EDGE_API const char * moe_edge_error(struct moe_edge_store * store);

// Makes the running step end early if `on` is 1, and every later step until this function is called with 0. May be
// called from any thread and from a signal handler.
MOE_EDGE_API void moe_edge_cancel(struct moe_edge_store * store, int32_t on);

// Writes the statistics since the store was created, or since the last moe_edge_reset_stats, to `out`.
MOE_EDGE_API void moe_edge_get_stats(struct moe_edge_store * store, struct moe_edge_stats * out);
// Sets all counters of the statistics to 0. Sizes and settings keep their values, and slot_bytes_peak becomes
// slot_bytes_in_use.
MOE_EDGE_API void moe_edge_reset_stats(struct moe_edge_store * store);

// Writes to out [n_layers, n_expert] in which tier (precision, 0 is the best) each expert is resident. If the matrices
// of an expert are in different tiers, writes the largest number, which is the worst precision. Writes MOE_EDGE_ABSENT
// if a matrix of the expert is not in memory.
MOE_EDGE_API void moe_edge_get_resident(struct moe_edge_store * store, uint8_t * out);

// Loads the listed experts into free slots (a warm start), and blocks until all are read. Leaves out experts for which
// no slot is free. progress, if not NULL, is called on this thread with the number of matrices that have been read, and
// their total. Must not run during a step. Returns the number of loaded experts, or -1 if an index is out of range, a
// read failed, or the store was cancelled.
MOE_EDGE_API int32_t moe_edge_warm(
        struct moe_edge_store * store, const struct moe_edge_prefetch_item * list, int32_t n,
        void (*progress)(int32_t done, int32_t total, void * user), void * user);

// Verifies all invariants of the store, for tests. Returns 0, or -1 with one sentence in err.
MOE_EDGE_API int moe_edge_check(struct moe_edge_store * store, char * err, size_t err_size);

// Prefetches the listed experts, the most urgent first. May be called at any time, also outside the route callback.
// Experts that get no slot are dropped.
MOE_EDGE_API void moe_edge_prefetch(
        struct moe_edge_store * store, const struct moe_edge_prefetch_item * list, int32_t n);

// Starts to change the tiers of the listed resident experts in the background (transitions). Each matrix of an expert
// needs a free slot for its new tier. The expert changes its tier at a step boundary, after all its matrices are
// complete. It keeps its old tier if a read fails or a token needs the slots. Returns the number of started
// transitions, or -1 if an index is out of range. The fields kinds and passing of the list's items are ignored.
MOE_EDGE_API int32_t moe_edge_transition(
        struct moe_edge_store * store, const struct moe_edge_prefetch_item * list, int32_t n);

// Limits transitions (background changes of tier) to this many bytes per second, read from disk or copied from the host
// tier to a device. 0, the default, means no limit.
MOE_EDGE_API void moe_edge_set_transition_rate(struct moe_edge_store * store, uint64_t bytes_per_s);

// Writes the tiers of all experts to two arrays [n_layers, n_expert]. resident: the tiers now, as in
// moe_edge_get_resident. target: the tier to which a transition is moving the expert, or the same as in resident if
// there is no transition.
MOE_EDGE_API void moe_edge_get_states(struct moe_edge_store * store, uint8_t * resident, uint8_t * target);

// Writes to out [n_layers, n_expert] 1 for each expert that gets a new tier at the next step boundary, because its
// transition (moe_edge_transition) has read all bytes. Writes 0 for all other experts. For tests.
MOE_EDGE_API void moe_edge_get_landed(struct moe_edge_store * store, uint8_t * out);

// Writes to out [n_layers, n_expert] for how many tokens each expert was selected since the last call, and resets the
// counts. Warm-up steps are not counted. In the last layer, only tokens with an output are counted.
MOE_EDGE_API void moe_edge_take_counts(struct moe_edge_store * store, uint32_t * out);

// Requests experts of a layer from a store without a model, as the route hook does for a model. ids: distinct experts.
// tiers: one for each id; NULL means the default tier. passing: for each id 1 if the request is a streaming one
// (moe_edge_decision), otherwise 0; NULL means 0. Returns 0, or -1 if the step failed or was cancelled.
MOE_EDGE_API int moe_edge_apply(struct moe_edge_store * store, int32_t layer,
        const int32_t * ids, const uint8_t * tiers, const uint8_t * passing, int32_t n_ids);
// Computes with the experts that moe_edge_apply requested, as an executor does. Calls visit for each expert after its
// bytes are complete. data: null for a skipped expert; device memory if the store is on a device. Must be called once
// for every matrix kind of the layer. Several threads may use different layers at the same time. Returns 0, or -1 if
// the step failed or was cancelled.
MOE_EDGE_API int moe_edge_use(struct moe_edge_store * store, int32_t layer, int32_t kind,
        const int32_t * ids, int32_t n_ids,
        void (*visit)(int32_t expert, int32_t tier, int32_t type, const void * data, uint64_t bytes, void * user),
        void * user);

// The functions below simulate a model, with a store that was created with MOE_EDGE_SIMULATED. One thread of the caller
// calls them instead of computing a graph: for each step moe_edge_begin_step, then for each layer moe_edge_sim_route,
// and moe_edge_sim_use for every matrix kind. The virtual clock advances in moe_edge_sim_advance, and whenever a caller
// waits for a read.

// Sets the speed of simulated reads. latency_us: the latency of each read. With bytes_per_s 0, the default,
// transferring bytes takes no time.
MOE_EDGE_API void moe_edge_sim_speed(struct moe_edge_store * store, uint64_t bytes_per_s, uint64_t latency_us);

// Advances the virtual clock of a simulated store by ns nanoseconds, which stand for computing. Returns the new time in
// nanoseconds, or 0 if the store is not simulated.
MOE_EDGE_API uint64_t moe_edge_sim_advance(struct moe_edge_store * store, uint64_t ns);

// Simulates a layer's router: calls the route callback, and requests the selected experts. The caller must first fill
// the arrays of moe_edge_store_event() with the selected experts of n_tokens tokens. It must also fill in the predicted
// experts of the next n_ahead layers, and `importance` if has_importance is not 0. Returns 0, or -1 if the step failed.
MOE_EDGE_API int moe_edge_sim_route(struct moe_edge_store * store, int32_t layer, int32_t n_tokens, int32_t n_ahead,
        int32_t has_importance);

// Computes with the experts that moe_edge_sim_route requested, as moe_edge_use does. Each expert takes ns nanoseconds of
// virtual time, and a skipped expert takes none. Returns 0, or -1 if the step failed.
MOE_EDGE_API int moe_edge_sim_use(struct moe_edge_store * store, int32_t layer, int32_t kind,
        const int32_t * ids, int32_t n_ids, uint64_t ns);

#ifdef __cplusplus
}
#endif
