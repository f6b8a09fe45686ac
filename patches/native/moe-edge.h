// moe-edge: single experts of a Mixture-of-Experts model, each with its own
// address and ggml type, kept within a memory budget and read from disk on demand.
//
// One store serves one loaded model and one llama_context that decodes at a time.
// Call order:
//
//   moe_edge_store_create      makes pools and I/O threads; nothing is read yet, and the store
//                              waits for a model
//   llama_model_load_*         with tensor_buft_overrides that send the expert tensors to
//                              moe_edge_buffer_type(): attaches the store to the model
//   llama_decode, llama_encode, llama_process, as without a store
//   llama_free, then moe_edge_store_free and llama_model_free in either order
//
// A model that has loaded with expert tensors in moe_edge_buffer_type() takes the store that was
// created last among those that wait. A store waits from its creation until a model takes it, and
// again once that model is freed; a simulated one never does. Where no store waits, or the tensors
// do not match what the store was created for, the load fails and moe_edge_load_error() says why;
// the store goes on waiting. A load with no_alloc, as memory fitting makes them, takes no store.
//
// Each micro-batch (ubatch) that a context computes is one step. Where it begins, complete
// transitions are published and what an aborted step left behind is cleared; where it ends, errors
// are looked for and the step callback is called. A step that failed makes llama_decode return
// MOE_EDGE_FAILED, and moe_edge_error() says why. It returns 2 after a cancel, as after the
// context's own abort callback. Both take the micro-batch's cells back, as upstream does.
//
// "layer" is always the index of a MoE layer, 0 .. n_layers-1, counted without the
// dense layers; moe_edge_layer.il is the model's own layer number.

#pragma once

#include <stddef.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Raised with every change of a struct or a function below. Callers compare it
// with moe_edge_abi_version() before anything else.
#define MOE_EDGE_ABI_VERSION 22

#define MOE_EDGE_API __attribute__((visibility("default")))

#define MOE_EDGE_MAX_TIERS    5
#define MOE_EDGE_MAX_AHEAD    4
#define MOE_EDGE_MAX_PREFETCH 1024
#define MOE_EDGE_DEVICE_ALIGN 256
#define MOE_EDGE_SKIP         255  // tier of an expert that contributes nothing
#define MOE_EDGE_ABSENT       254  // residency: no tier of this expert is in memory
#define MOE_EDGE_FAILED       (-3) // of llama_decode: the step failed, and would again with fewer tokens;
                                   // without a moe_edge_error, for a reason of llama.cpp's own

// Matrix kinds. A layer has either UP, GATE and DOWN, or UP and DOWN, or GATE_UP and DOWN.
enum moe_edge_kind {
    MOE_EDGE_UP      = 0,
    MOE_EDGE_GATE    = 1,
    MOE_EDGE_GATE_UP = 2,
    MOE_EDGE_DOWN    = 3,
    MOE_EDGE_N_KINDS = 4,
};

enum moe_edge_phase {
    MOE_EDGE_PREFILL = 0,
    MOE_EDGE_DECODE  = 1,
};

enum moe_edge_flags {
    MOE_EDGE_DIRECT_IO   = 1,  // O_DIRECT where the file system allows it
    MOE_EDGE_EXACT_TIERS = 2,  // a request drops a better copy in memory and computes what it asked
                               // for: to measure what a tier costs, not to be fast
    MOE_EDGE_SIMULATED   = 4,  // files are not opened, reads move no bytes and take virtual time
    // Both to compare with, not to be fast:
    MOE_EDGE_WHOLE_EXPERTS = 8,  // an op gets an expert once all matrices of it are there, as far as
                                 // slots go: where none of them is on its way, it gets what is there
    MOE_EDGE_RIGID       = 16, // with MOE_EDGE_SIMULATED alone: demand and prefetch are read in the order
                               // in which they were asked for, and no read is taken back
};

// How a store serves an expert that a token needs and the device does not have.
enum moe_edge_miss {
    MOE_EDGE_MISS_COPY    = 0,  // copy it to a slot, then compute it on the device
    MOE_EDGE_MISS_COMPUTE = 1,  // threads of the host compute it in host memory while the device computes
                                // other experts. It takes no slot; it may be copied to one afterwards
    MOE_EDGE_MISS_AUTO    = 2,  // choose for each expert the way that finishes its layer first
};

// Where the experts of one (layer, kind, tier) lie: expert e is the bytes
// [offset + e*expert_bytes, offset + (e+1)*expert_bytes) of files[file].
struct moe_edge_slices {
    uint64_t offset;
    uint64_t expert_bytes;  // 0: this layer has no such matrix
    int32_t  file;
    int32_t  type;          // enum ggml_type
    int32_t  group;         // the slot group that holds it
    int32_t  interleaved_rows;  // 0: slots hold the bytes as they are in the file; else the matrix's rows, and
                            // slots hold the CPU's own layout of it: see moe_edge_interleaves()
    const uint32_t * checksums;  // [n_expert] CRC-32 of each expert, or NULL. One that is read with another,
                            // when it is first read as a whole, is as one that could not be read
    double   compute_us;    // for MOE_EDGE_MISS_AUTO: what the host's threads take for one expert's product,
                            // of moe_edge_measure_product(); 0: they are not to compute it
};

// A slot group: slots of one size that evict each other in least-recently-used
// order. Layers may share a group or have one each, and so may tiers in host memory; matrix
// kinds may not share. slot_bytes must be at least moe_edge_slot_bytes() of every slice in it. In the
// memory of a device all slices of a group are of one tier, type and size, and slot_bytes is
// moe_edge_device_slot_bytes().
struct moe_edge_group {
    uint64_t slot_bytes;
    int32_t  n_slots;
    int32_t  n_passing;  // slots that passing requests may take from the others; 0 means 1
    int32_t  place;      // enum moe_edge_miss: MOE_EDGE_MISS_COPY, slots are where the store's are; or, on a
                         // device, MOE_EDGE_MISS_COMPUTE: slots are in the host's memory, whose threads
                         // compute what is in them, however many tokens there are
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
    void *   device;          // of moe_edge_device_find(): slots are in its memory, host memory and the
                              // files behind it; NULL: slots are in host memory
    uint64_t budget_bytes;    // sum of slot_bytes*n_slots must not exceed it; on a device each group
                              // starts at a multiple of MOE_EDGE_DEVICE_ALIGN, which comes on top
    uint64_t host_bytes;      // budget of the host memory behind a device: slices on their way, and
                              // those kept for the next time; moe_edge_host_least_bytes() at least
    // For MOE_EDGE_MISS_AUTO: the speed of copies to the device (0: unknown), and the time that is lost
    // when the host and the device wait for each other once, including the time to wake the host's
    // threads.
    double   copy_bytes_per_s;
    double   round_trip_us;
    int32_t  misses;          // enum moe_edge_miss: of layers with few tokens, on a device; others are copied
    int32_t  n_host_threads;  // that compute misses
    int32_t  n_files;
    int32_t  n_layers;
    int32_t  n_groups;
    int32_t  n_tiers;         // tier 0 is the best
    int32_t  n_expert;
    int32_t  n_expert_used;
    int32_t  max_tokens;      // n_ubatch: the most tokens of one route event; a larger one
                              // is not reported and computes in the default tier
    int32_t  n_ahead;         // look-ahead depth P, 0 .. MOE_EDGE_MAX_AHEAD
    int32_t  n_io_threads;
    int32_t  flags;           // enum moe_edge_flags
    int32_t  importance_window;  // token importance from the last W queries of each prompt in a step,
                              // 0: none, -1: from all of them, which needs an attention that is not flash
    int32_t  reserved;
};

struct moe_edge_store;

// What the router of one layer chose. Every array belongs to the store, lies at an
// address that does not change while the store lives, and is valid during the
// callback only.
struct moe_edge_event {
    int32_t layer;
    int32_t phase;             // enum moe_edge_phase of the step: prefill where any token is prompt
    int32_t n_tokens;          // T of this event (a last layer may see fewer than the batch)
    int32_t n_ahead;           // look-ahead layers present: layer+1 .. layer+n_ahead
    int32_t has_importance;
    int32_t n_used;            // experts that a token uses in this layer, k or fewer
    int64_t step;              // counts steps
    const int32_t * ids;       // [T, k]  row-major, one row a token; the first id again behind n_used
    const float   * weights;   // [T, k]  routing weights as the model will use them; 0 behind n_used
    const int32_t * tokens;    // [T]     position of each token in its ubatch
    const uint8_t * phases;    // [T]     enum moe_edge_phase of each token
    const int32_t * sequences; // [T]     sequence of each token, its first one if it has several
    const int32_t * ahead_ids; // [n_ahead, max_tokens, k] predicted top-k, best first; filled as ids are
    const float   * ahead;     // [n_ahead, max_tokens, k] predicted scores of those, eq. 6 of DyMoE
    const float   * importance; // [T]    attention that each token receives from its own sequence, eq. 1
                               // of DyMoE; of tokens that are not prompt it says nothing
    const uint8_t * resident;  // [n_layers, n_expert] as of moe_edge_get_resident
    const uint8_t * missing;   // [n_layers, n_expert] bits 1 << moe_edge_kind of the matrices in no tier
};

struct moe_edge_prefetch_item {
    int16_t layer;
    int16_t expert;
    uint8_t tier;
    uint8_t kinds;             // bit mask of 1 << moe_edge_kind; 0 means all of the layer
    int16_t passing;           // as in moe_edge_decision
};

// The callback's answer, in arrays of the store. tier[] and passing[] are filled with 0 (the
// best; stays) before each call, and only entries of routed experts are read.
//
// A passing request does not count as a use: what it finds in memory keeps its place in the
// order of eviction; what it loads is evicted before anything else, and takes a slot from the
// others only while less than n_passing slots of the group hold such loads. A long prompt so
// streams through a few slots, and what decoding uses stays.
//
// A prefetch reads what is not in memory, as far as slots go. What is in memory counts as used,
// unless it is passing, and gives no slot to the rest of the list.
struct moe_edge_decision {
    uint8_t * tier;                       // [n_expert] tier index or MOE_EDGE_SKIP
    uint8_t * passing;                    // [n_expert] 0 or 1
    struct moe_edge_prefetch_item * prefetch;  // [MOE_EDGE_MAX_PREFETCH] most urgent first
    int32_t n_prefetch;
    int32_t renormalize;                  // 1: remaining weights of a token keep their sum
};

// Returns 0, or anything else to fail the running llama_decode.
typedef int (*moe_edge_route_cb)(void * user);

// A step that was computed. The arrays are valid during the callback only. A token that belongs to
// several sequences counts for each.
struct moe_edge_step {
    int64_t  step;                  // as in the events of the step
    uint64_t us;                    // from its beginning until it was computed
    int32_t  phase;                 // enum moe_edge_phase, as in the events
    int32_t  n_tokens;
    int32_t  n_starts;
    int32_t  n_prompt_ends;
    int32_t  n_ends;
    int32_t  reserved;
    const int32_t * starts;         // [n_starts] sequences with a token at position 0
    const int32_t * prompt_ends;    // [n_prompt_ends] sequences with a token of the prompt that has an output
    const int32_t * ends;           // [n_ends] sequences that moe_edge_sequence_end named since the last
                                    // such step, hence before the starts
};

// Returns 0, or anything else to fail the step that was computed.
typedef int (*moe_edge_step_cb)(const struct moe_edge_step * step, void * user);

// What the thread that decodes waits for.
enum moe_edge_wait {
    MOE_EDGE_WAIT_DISK       = 0,  // an expert that is read from disk
    MOE_EDGE_WAIT_HOST_TIER  = 1,  // a slot of the host tier, which an expert needs before it can be read
    MOE_EDGE_WAIT_COPY       = 2,  // a copy between host and device
    MOE_EDGE_WAIT_TRANSITION = 3,  // transitions that are published at a step boundary, or that hold a slot
    MOE_EDGE_WAIT_LAUNCH     = 4,  // the driver, which takes kernels to launch
    MOE_EDGE_N_WAITS         = 5,
};

struct moe_edge_stats {
    // by phase: [prefill, decode]; requests, hits, routed and computed once a step for each expert
    uint64_t requests[2];          // matrices asked for
    uint64_t hits[2];              // asked-for tier or better was resident when asked
    uint64_t demand_bytes[2];      // read because a token needed them
    uint64_t prefetch_bytes[2];
    uint64_t wait_us[2];           // compute threads waited for I/O
    uint64_t host_hits[2];         // loads of a device whose slice was in host memory
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
    uint64_t slot_bytes;           // of the slots that may be used: all of them, or what moe_edge_store_limit left
    uint64_t read_us;              // summed over I/O threads
    uint64_t experts_promoted;     // transitions published, by direction
    uint64_t experts_demoted;
    uint64_t transitions_begun;
    uint64_t transitions_rejected; // no free slot, or the expert is not resident or under way already
    uint64_t transitions_failed;   // the read failed, or a token needed the slot; the old version stayed
    uint64_t transition_bytes;     // read in the background
    uint64_t table_writes;         // changes of an entry of an expert table
    uint64_t host_bytes;           // host memory behind the device, all of it allocated at the start
    int32_t  direct_io;            // 1 if every file is read with O_DIRECT
    int32_t  host_pinned;          // 1 if the memory behind host_bytes is pinned
    int32_t  misses;               // enum moe_edge_miss in effect: the configured one, or copy if
                                   // auto was configured and the speed of copies is not known
    int32_t  reserved;
};

MOE_EDGE_API int32_t moe_edge_abi_version(void);

// Whether this CPU has a layout of its own for matrices of n_out rows of n_in numbers, with kernels that are faster
// than those for the bytes as they are in the file. It takes as many bytes.
MOE_EDGE_API int32_t moe_edge_interleaves(int32_t type, int64_t n_in, int64_t n_out);

// The CRC-32 of n bytes behind those that crc is of; 0 is that of none. As zlib's.
MOE_EDGE_API uint32_t moe_edge_crc32(uint32_t crc, const void * data, uint64_t n);

// Bytes a slot needs for a slice of this length at this file offset: direct reads
// cover whole 4096-byte blocks.
MOE_EDGE_API uint64_t moe_edge_slot_bytes(uint64_t offset, uint64_t expert_bytes);

// Bytes that a slice takes on a device: what kernels may read behind its end is part of it. A
// multiple of the type's block bytes. n_cols: the length of a row. 0 for a type that ggml does not have.
MOE_EDGE_API uint64_t moe_edge_device_slot_bytes(int32_t type, uint64_t expert_bytes, int64_t n_cols);

// The smallest host_bytes that works with this configuration.
MOE_EDGE_API uint64_t moe_edge_host_least_bytes(const struct moe_edge_config * config);

struct moe_edge_device_info {
    char     name[128];
    uint64_t free_bytes;
    uint64_t total_bytes;
};

struct moe_edge_bandwidths {
    double  pinned_bytes_per_s;    // host to device; 0 where pinning is refused
    double  pageable_bytes_per_s;
    double  round_trip_us;         // a copy of few bytes, until the host knows that it is done
    double  compute_bytes_per_s;   // weights in Q4_K that the host's threads multiply with one token
};

// A device of this process by name: "cuda0", "cuda1", ... or "host", main memory in the place of a
// device, "host:DELAY" with copies that take up to DELAY microseconds; both for tests. It lives as
// long as the process. NULL, with one sentence in err, if there is none.
MOE_EDGE_API void * moe_edge_device_find(const char * name, char * err, size_t err_size);
MOE_EDGE_API int moe_edge_device_describe(void * device, struct moe_edge_device_info * out);
// As moe_edge_buffer_type, for a store on this device.
MOE_EDGE_API void * moe_edge_device_buffer_type(void * device);
// By moving bytes bytes, 1 MiB or more, and computing with them; takes as much device memory and
// twice as much of the host's. 0, or -1 where there is not enough or the device is lost.
MOE_EDGE_API int moe_edge_device_measure(void * device, uint64_t bytes, int32_t n_threads, struct moe_edge_bandwidths * out);

// What n_threads of the host take to multiply experts of this type, [n_out, n_in] each, with one token, as
// they do for misses: asleep before, and with weights that no cache holds. each_us: one expert more;
// wake_us: what the first one takes beyond that. 0, or -1 for a type or a shape that cannot be.
MOE_EDGE_API int moe_edge_measure_product(int32_t type, int64_t n_in, int64_t n_out, int32_t n_threads, double * each_us, double * wake_us);

// Whether stores that are created from now on do their reads and their copies in turn: on the thread that decodes,
// at the end of the call that asks for them, without threads of their own and without a limit on the rate of
// transitions. For counts that are the same in every run, not for speed.
MOE_EDGE_API void moe_edge_in_turn(int32_t on);

// NULL on failure, with one sentence in err. The store waits for a model, unless it is simulated.
MOE_EDGE_API struct moe_edge_store * moe_edge_store_create(
        const struct moe_edge_config * config, char * err, size_t err_size);
MOE_EDGE_API void moe_edge_store_free(struct moe_edge_store * store);

// How many bytes slots may take from now on: at most what the groups were made with, which any larger number stands for.
// All groups keep the same share of their slots. Free slots go first, then those that are next to be evicted. Slots that
// are read to, that a transition holds or an op of the step still needs go as soon as these let go of them. Memory behind
// the limit goes back to the system at once, in pieces of 2 MiB. A higher limit makes slots of it again, which are empty.
// Returns how many bytes of slots are still to come, 0 where the limit holds; the same call again says it again. -1, with
// one sentence in err, and nothing has changed: below one slot of each group, which is the least that a step needs; where
// slots are on a device, whose memory stays divided as it was; and while a step of a model or a warm start runs. Between
// the steps of a model it may be called from any thread, and from the step callback.
MOE_EDGE_API int64_t moe_edge_store_limit(struct moe_edge_store * store, uint64_t bytes, char * err, size_t err_size);

// How many matrices are being loaded, transitions included; from any thread. A caller that waits for a limit between steps
// reads this before each call of moe_edge_store_limit: if it was 0 and bytes are still to come, they never will.
MOE_EDGE_API int32_t moe_edge_store_loading(struct moe_edge_store * store);

// How many tokens of the running batch of a model are computed, or of the last one between two: those of complete
// micro-batches, and of the running one a share by its MoE layers. From any thread, without a lock.
MOE_EDGE_API double moe_edge_tokens_done(const struct moe_edge_store * store);

// ggml_backend_buffer_type_t for the expert tensors: placeholders without memory.
MOE_EDGE_API void * moe_edge_buffer_type(void);

// Why a load of a model with managed tensors failed in this thread, or its first context: no store
// waited for it, its tensors do not match the store's, or its graph reads them in another way than a
// store serves them. A model that is loaded without memory (no_alloc) takes no store, and its context
// fails for the latter alike. NULL where nothing failed for that, or the sentence was asked for
// already; it is valid until the next load.
MOE_EDGE_API const char * moe_edge_load_error(void);

// What a context and its model take without the store's slots, in bytes: [host, other memories].
struct moe_edge_memory {
    uint64_t weights[2];
    uint64_t cache[2];
    uint64_t scratch[2];
};

// context: struct llama_context *.
MOE_EDGE_API void moe_edge_get_memory(void * context, struct moe_edge_memory * out);

// Of all contexts of this process, in the host's memory: what their caches, the scratch that graphs
// compute in, and the work buffers of ggml's CPU backend may take, and what of that is in memory
// now, in bytes: [reserved, resident]. A recurrent memory is not among them, nor is what a GPU's
// library pins. The kernel is asked page by page: 0.3 ms for each GiB that is reserved, and 0.7 more
// for each that is resident.
struct moe_edge_touched {
    uint64_t cache[2];
    uint64_t scratch[2];
    uint64_t work[2];
    uint64_t used;       // bytes of the caches' cells that hold a token
    uint64_t cells_end;  // behind the last of these cells, in the cache where it lies furthest
};

MOE_EDGE_API void moe_edge_get_touched(struct moe_edge_touched * out);

// From the next step on a context of the CPU (struct llama_context *) decodes with `most` threads at most: with as many
// as find a core beside whatever else runs. Steps of more than a few tokens take all of them. 0 ends that; it is called
// so before the context is freed.
MOE_EDGE_API void moe_edge_adapt_threads(void * context, int32_t most);

// Binds one tensor to the store, without a llama_model: tensor is a struct ggml_tensor * in
// moe_edge_buffer_type(), an operand of ggml_mul_mat_id. It must not outlive the store.
MOE_EDGE_API int moe_edge_store_bind(struct moe_edge_store * store, int32_t layer, int32_t kind,
        void * tensor, char * err, size_t err_size);

// Event and decision live as long as the store.
MOE_EDGE_API const struct moe_edge_event * moe_edge_store_event(struct moe_edge_store * store);
MOE_EDGE_API struct moe_edge_decision *    moe_edge_store_decision(struct moe_edge_store * store);

// phases: bit mask of 1 << moe_edge_phase, the steps in which cb is called. In the others, and
// where cb is NULL, every routed expert is asked for in tier default_tier, without a callback; one
// that is resident in a better tier counts as asked for in that one.
MOE_EDGE_API void moe_edge_set_callback(
        struct moe_edge_store * store, moe_edge_route_cb cb, void * user, int32_t default_tier, uint32_t phases);

// cb is called by the thread that decodes, at the end of each step that was computed without an
// error, but not for a warm-up; NULL: none. With one, a step ends when the device has computed it.
MOE_EDGE_API void moe_edge_set_step_callback(struct moe_edge_store * store, moe_edge_step_cb cb, void * user);

// What a batch of a model takes beside the slots, before it takes it.
struct moe_edge_room {
    struct moe_edge_touched touched;  // now: of all caches, and of this context's scratch and work buffer
    uint64_t n_bytes;      // of a state that is brought back into the cache
    int32_t  n_tokens;     // of the batch; 0 before a state
    int32_t  at_once;      // in: the most tokens of a micro-batch; out: those of this batch's
    int32_t  drop_scratch; // out: 1 gives back what scratch and work buffer still hold
    int32_t  reserved;
};

// cb is called on the CPU by the thread that decodes, before a batch is computed and before a state is brought back, in
// which slots may give way (moe_edge_store_limit); NULL: none. What it gives is good for 256 tokens more in steps of
// no more tokens, for which it is not asked. Where it does not return 0 the batch fails, and nothing was computed.
typedef int (*moe_edge_room_cb)(struct moe_edge_room * room, void * user);
MOE_EDGE_API void moe_edge_set_room_callback(struct moe_edge_store * store, moe_edge_room_cb cb, void * user);

// Sets the phase of every token from the next step on: enum moe_edge_phase. With -1, the default, the store infers the
// phase from the batch: a token belongs to a prompt if its sequence has several tokens in the batch that llama_decode got,
// or if the token has no output. This takes the last token of a prompt for a token of an answer if the batch has no other
// token of that prompt.
MOE_EDGE_API void moe_edge_set_phase(struct moe_edge_store * store, int32_t phase);

// Sets the phase of every token from the next step on, by its sequence: a token belongs to a prompt if one of its sequences
// is among these n. Replaces what moe_edge_set_phase set, and the other way round. context: struct llama_context *. Does
// nothing if the context's model has no store.
MOE_EDGE_API void moe_edge_set_prompts(void * context, const int32_t * sequences, int32_t n);

// This sequence, or all of them for -1, was dropped: its cells were removed from the context's memory. The next step that
// is reported to the step callback reports this as well, if an earlier report was of a step with tokens of the sequence.
MOE_EDGE_API void moe_edge_sequence_end(struct moe_edge_store * store, int32_t sequence);

// A step of a store without a model begins: what the context does before each micro-batch.
MOE_EDGE_API void moe_edge_begin_step(struct moe_edge_store * store, int32_t phase);

// NULL, or one sentence about why the last step failed, until the next one begins; the step's
// output is void then, as it is after a cancel.
MOE_EDGE_API const char * moe_edge_error(struct moe_edge_store * store);

// Stops the running step, and each that begins until it is called with 0.
MOE_EDGE_API void moe_edge_cancel(struct moe_edge_store * store, int32_t on);

MOE_EDGE_API void moe_edge_get_stats(struct moe_edge_store * store, struct moe_edge_stats * out);
MOE_EDGE_API void moe_edge_reset_stats(struct moe_edge_store * store);

// out [n_layers, n_expert]: the tier that every matrix is resident in, or a better one; the
// worst of its matrices' tiers, that is. MOE_EDGE_ABSENT if one of them is not in memory.
MOE_EDGE_API void moe_edge_get_resident(struct moe_edge_store * store, uint8_t * out);

// Loads (layer, expert, all kinds) in a tier before the first token, as far as free
// slots go; blocks until read. Returns how many experts were loaded, or -1 on error.
MOE_EDGE_API int32_t moe_edge_warm(
        struct moe_edge_store * store, const struct moe_edge_prefetch_item * list, int32_t n,
        void (*progress)(int32_t done, int32_t total, void * user), void * user);

// Verifies every invariant of the store; 0, or an error sentence in err. For tests.
MOE_EDGE_API int moe_edge_check(struct moe_edge_store * store, char * err, size_t err_size);

// Reads ahead without a route event, most urgent first, as far as slots go.
MOE_EDGE_API void moe_edge_prefetch(
        struct moe_edge_store * store, const struct moe_edge_prefetch_item * list, int32_t n);

// Transitions of resident experts to another tier, better or worse, in the background: after
// all other reads, one part at a time, within the rate below. Nothing is evicted for them, and
// no op waits for them. A transition is admitted where every pool has a free slot for its
// matrices now; the expert keeps its old version until a step boundary finds the new one
// complete, all matrices at once, and is not evicted meanwhile. A read that fails leaves the old
// version, and counts; so does a token that could not go on without a slot that a transition holds. kinds and passing are ignored. Returns how many were admitted, -1 for
// an index that the model does not have.
MOE_EDGE_API int32_t moe_edge_transition(
        struct moe_edge_store * store, const struct moe_edge_prefetch_item * list, int32_t n);

// Bytes per second that transitions may read, or copy to a device from its host memory, in bursts of
// one part; 0, the start: no limit.
MOE_EDGE_API void moe_edge_set_transition_rate(struct moe_edge_store * store, uint64_t bytes_per_s);

// Both [n_layers, n_expert]. resident: as moe_edge_get_resident. target: the tier that a transition
// brings, until the step boundary that ends it; that of resident where none is under way.
MOE_EDGE_API void moe_edge_get_states(struct moe_edge_store * store, uint8_t * resident, uint8_t * target);

// out [n_layers, n_expert]: 1 where a transition is complete, so that the next step boundary
// publishes it. For tests.
MOE_EDGE_API void moe_edge_get_landed(struct moe_edge_store * store, uint8_t * out);

// out [n_layers, n_expert]: how many tokens each expert was chosen for since the last call, as
// far as the hook saw them: no warm-up, and in the last layer only tokens with an output.
MOE_EDGE_API void moe_edge_take_counts(struct moe_edge_store * store, uint32_t * out);

// The store without a model: what the hook (apply) and the executor (use) do for one
// layer. For tests and other front ends. ids: distinct experts; tiers: one per id,
// NULL for the default tier; passing: 0 or 1 per id, NULL for none. After apply, every kind of the layer must be used once.
// Several threads may do this at once, each on its own layer. visit gets memory of the device
// where the store is on one, once its bytes are there.
MOE_EDGE_API int moe_edge_apply(struct moe_edge_store * store, int32_t layer,
        const int32_t * ids, const uint8_t * tiers, const uint8_t * passing, int32_t n_ids);
MOE_EDGE_API int moe_edge_use(struct moe_edge_store * store, int32_t layer, int32_t kind,
        const int32_t * ids, int32_t n_ids,
        void (*visit)(int32_t expert, int32_t tier, int32_t type, const void * data, uint64_t bytes, void * user),
        void * user);

// A store with MOE_EDGE_SIMULATED, driven by one thread that plays the graph: for each step
// moe_edge_begin_step, then for each layer moe_edge_sim_route and moe_edge_sim_use of every
// kind. Its clock starts at 0 and moves in moe_edge_sim_advance, and wherever a caller waits
// for a read. How long reads take: patches/native/moe-edge-transport.h.

// bytes_per_s 0, which is how a store starts: bytes take no time.
MOE_EDGE_API void moe_edge_sim_speed(struct moe_edge_store * store, uint64_t bytes_per_s, uint64_t latency_us);

// Lets ns nanoseconds pass, in which something is computed; returns the time, in nanoseconds.
MOE_EDGE_API uint64_t moe_edge_sim_advance(struct moe_edge_store * store, uint64_t ns);

// The route event of a layer. The caller has filled the event's arrays, up to n_tokens and
// n_ahead, importance where has_importance. 0, or -1 when the step failed.
MOE_EDGE_API int moe_edge_sim_route(struct moe_edge_store * store, int32_t layer, int32_t n_tokens, int32_t n_ahead,
        int32_t has_importance);

// moe_edge_use, where computing one expert takes ns nanoseconds, and a skipped one none.
MOE_EDGE_API int moe_edge_sim_use(struct moe_edge_store * store, int32_t layer, int32_t kind,
        const int32_t * ids, int32_t n_ids, uint64_t ns);

#ifdef __cplusplus
}
#endif
