// Defines the store of one model's experts: its cache entries, its pools of slots, its reads from disk, and the tables
// in which ops find experts. One mutex guards all fields. Weight bytes are read without the mutex: a slot is either
// being filled by the I/O threads, or it is complete and pinned by the op that reads it.

// Cache entries: a matrix kind is one of the matrices of an expert (up, gate, gate_up or down). A tier is one of the
// precisions in which the expert file stores a matrix; tier 0 is the best. Each (layer, kind, expert) has one cache
// entry, which holds the bytes of at most one tier. A request for a better tier than the resident one is a miss: the
// better tier is loaded and then replaces the resident one. A request for a worse tier is a hit and uses the better one
// (DyMoE 4.4.2).

// Prefetches: a prefetch takes a slot only when its read starts, or on a device when its copy starts. A prefetch that
// is cancelled earlier has evicted nothing.

// Devices: if the slots are on a device, the I/O threads read into the host tier, and a load ends with one copy to its
// slot. The slot counts as complete when the copy is enqueued. An op that reads the slot first waits for the copy.

#pragma once

#include "moe-edge-cells.h"
#include "moe-edge-host-tier.h"
#include "moe-edge-reads.h"
#include "moe-edge-slots.h"
#include "moe-edge-table.h"
#include "moe-edge-workers.h"

#include "ggml.h"

#include <array>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

// The tokens of a step's micro-batch. Empty for a store without a model: all its tokens have the phase of the step
// (prefill or decode) and belong to sequence 0.
struct moe_edge_batch {
    std::vector<uint8_t> phases;     // [n_tokens] enum moe_edge_phase
    std::vector<int32_t> sequences;  // [n_tokens] first sequence of each token
    std::vector<int32_t> window;     // tokens whose queries are used for importance, ascending
    std::vector<int32_t> starts, prompt_ends;  // as in moe_edge_step
    std::set<int32_t>    members;    // all sequences of the tokens
};

// The phases of tokens, as declared with moe_edge_set_phase or moe_edge_set_prompts.
struct moe_edge_token_phases {
    int32_t           usual;    // enum moe_edge_phase of tokens outside `prompts`
    std::set<int32_t> prompts;  // sequences whose tokens belong to a prompt, whatever `usual` says

    bool in_prompt(int32_t sequence) const { return usual == MOE_EDGE_PREFILL || prompts.count(sequence) > 0; }
};

struct moe_edge_store final : private moe_edge_reads::owner {
  public:
    moe_edge_store(const moe_edge_config & config);
    ~moe_edge_store();
    moe_edge_store(const moe_edge_store &) = delete;
    moe_edge_store & operator=(const moe_edge_store &) = delete;

    // Called by the hooks.
    void    begin_step(int32_t phase);
    void    begin_step(moe_edge_batch micro_batch);
    void    close_step();           // ends the step of a model, whether it was computed or aborted
    const moe_edge_batch & step_batch() const { return batch; }  // empty if no step is running
    // Reports a computed step to the step callback. Returns false, and the step fails, if the callback refuses it.
    bool    end_step(uint64_t us);
    void    end_sequence(int32_t sequence);
    void    describe_tokens();      // fills phases and sequences of `event`
    // Calls the route callback for the experts that a router has selected, and applies the callback's decision. Returns
    // false if the step failed or was aborted.
    bool    route();
    bool    simulate_route(int32_t layer, int32_t n_tokens, int32_t n_ahead, bool has_importance);
    uint64_t simulate_compute(uint64_t ns);
    void    simulate_speed(uint64_t bandwidth, uint64_t latency_us);
    void    apply(int32_t layer, const int32_t * ids, const uint8_t * tiers, const uint8_t * passing, int32_t n);

    void    prefetch(const moe_edge_prefetch_item * list, int32_t n);

    int32_t transition(const moe_edge_prefetch_item * list, int32_t n);
    void    set_transition_rate(uint64_t bytes_per_s);
    uint64_t limit(uint64_t bytes);  // throws std::runtime_error
    int32_t loading();            // number of cache entries that are being loaded
    double  tokens_done() const;  // tokens of the running batch; fractional within a micro-batch
    void    get_states(uint8_t * now, uint8_t * target);
    void    get_landed(uint8_t * out);
    void    take_counts(uint32_t * out);

    bool    has_matrix(int32_t layer, int32_t kind, const int32_t * experts, int32_t n);

    // The next functions are called by the executors, and documented in moe_edge_ops.
    void    begin(moe_edge_matrix & m, const int32_t * experts, int32_t n);
    int32_t routed_to(const moe_edge_matrix & m, int32_t * out);
    int32_t next(moe_edge_matrix & m, moe_edge_ready * out);
    bool    begin_layer(moe_edge_matrix * const * matrices, int32_t n, std::vector<moe_edge_ready> * out);
    void    release(moe_edge_matrix & m, const moe_edge_ready * ready, int32_t n, moe_edge_ticket after);
    void    wait(const moe_edge_ready * ready, int32_t n);
    void    multiply(const std::vector<moe_edge_product> & products, uint64_t began_us);
    bool    fixed() const { return tables_fixed; }
    bool    in_prefill() const { return phase == MOE_EDGE_PREFILL; }
    // Whether the step runs without route nodes, which report the selected experts to the store. This is possible if
    // the expert tables do not change during the step. A device must then count the tokens of each expert itself.
    bool    runs_unwatched() const { return tables_fixed && (!device || device->counts_routing()); }
    void    waited(int32_t cause, uint64_t ns);  // any thread
    bool    serve_unwatched(const moe_edge_matrix & m, const int32_t * experts, const int32_t * first, int32_t n,
                            moe_edge_ready * out);

    int32_t warm(const moe_edge_prefetch_item * list, int32_t n,
                 void (*progress)(int32_t, int32_t, void *), void * user);
    void    fail(const std::string & sentence);
    const char * error();
    void    cancel(bool on) { cancelled = on; }  // next() polls the flag, so a signal handler may set it
    // Whether the running step must end early: it failed, it was cancelled, or the context's abort callback requests
    // it.
    bool    aborted() const {
        return failed.load() || is_cancelled();
    }
    bool    is_cancelled() const { return cancelled.load() || (abort_callback && abort_callback(abort_user)); }
    void    get_stats(moe_edge_stats * out);
    void    get_resident(uint8_t * out);
    void    reset_stats();
    std::string check();  // an empty string, or the violated invariant

    std::function<void()> detach;  // set while tensors of a model point into the store

    // Constant after construction.
    int32_t n_layers, n_expert, n_expert_used, n_tiers, max_tokens, n_ahead, importance_window;
    bool    exact_tiers, whole_experts, rigid;  // from moe_edge_flags
    moe_edge_device * device = nullptr;  // the device whose memory holds the slots; null for host memory
    std::vector<int32_t> il;  // [n_layers] layer numbers of the model
    std::vector<std::array<std::array<moe_edge_slices, MOE_EDGE_MAX_TIERS>, MOE_EDGE_N_KINDS>> slices;
    std::vector<std::array<moe_edge_matrix, MOE_EDGE_N_KINDS>> matrices;  // [n_layers]

    std::atomic<bool> cancelled { false };
    ggml_abort_callback abort_callback = nullptr;  // the callback of the context whose step is running
    void *            abort_user    = nullptr;
    // The progress of the running batch. done: tokens of completed micro-batches. in_step: tokens of the running
    // micro-batch. layer: the MoE layer whose experts were started last, counted from 1.
    struct { std::atomic<int32_t> done { 0 }, in_step { 0 }, layer { 0 }; } progress;
    moe_edge_route_cb callback      = nullptr;
    void *            callback_user = nullptr;
    uint32_t          callback_phases = 0;  // bit mask of 1 << moe_edge_phase
    int32_t           default_tier  = 0;
    std::optional<moe_edge_token_phases> declared_phases;  // nullopt: infer the phases from the batch
    moe_edge_step_cb  step_callback = nullptr;
    void *            step_user     = nullptr;
    moe_edge_room_cb  room_callback = nullptr;
    void *            room_user     = nullptr;

    // The limits that the latest call of room_callback has set. The callback makes memory available for batches.
    // tokens: how many tokens may be computed before the next call. at_once: the most tokens per micro-batch.
    struct { uint32_t tokens, at_once; } given = {};
    uint32_t laid_out = 0;  // micro-batch size that scratch is laid out for; 0: the context's own

    // The arguments of the route callback. It reads the experts that a router has selected from `event`, and writes
    // their tiers to `decision`. Both point to the arrays below.
    moe_edge_event    event    = {};
    moe_edge_decision decision = {};
    std::vector<int32_t> ids, tokens, sequences, ahead_ids;
    std::vector<uint8_t> phases;
    std::vector<float>   weights, ahead, importance;
    std::vector<uint8_t> resident_view, missing_view, tier_out, passing_out;
    std::vector<moe_edge_prefetch_item> prefetch_out;

  private:
    struct op_state {
        std::vector<int32_t> remaining;  // cache entries that were not handed out yet
        bool waited = false;
    };

    // Locks the store's mutex for a function that the decoding thread calls. If the store has no threads of its own
    // (moe_edge_in_turn), does all queued reads and copies before it unlocks the mutex.
    class call_lock {
      public:
        explicit call_lock(moe_edge_store & store) : store(store), lock(store.mutex) { store.stats.locks[store.phase]++; }
        ~call_lock() {
            if (store.in_turn) {
                store.work_in_turn(lock);
            }
        }
        std::unique_lock<std::mutex> & operator*() { return lock; }

      private:
        moe_edge_store & store;
        std::unique_lock<std::mutex> lock;
    };

    int32_t cell_index(int32_t layer, int32_t kind, int32_t expert) const {
        return (layer * MOE_EDGE_N_KINDS + kind) * n_expert + expert;
    }
    int32_t layer_of(int32_t cell) const { return cell / (MOE_EDGE_N_KINDS * n_expert); }
    int32_t kind_of(int32_t cell) const { return cell / n_expert % MOE_EDGE_N_KINDS; }
    int32_t expert_of(int32_t cell) const { return cell % n_expert; }
    const moe_edge_slices & slice_of(int32_t cell, int32_t tier) const {
        return slices[layer_of(cell)][kind_of(cell)][tier];
    }
    bool has_kind(int32_t layer, int32_t kind) const { return slices[layer][kind][0].expert_bytes > 0; }
    moe_edge_pool & pool_of(int32_t cell, int32_t tier) { return pools[slice_of(cell, tier).group]; }
    // Whether the bytes of this entry in this tier (a slice) go through the host tier, a cache in host memory, on their
    // way to a slot on the device. If not, they are read from disk directly into the slot.
    bool    staged(int32_t cell, int32_t tier) const { return host && !pools[slice_of(cell, tier).group].on_host; }
    // Returns the offset of a slice from the start of its first block in the file. Direct reads write whole blocks to
    // the slot, so the slice starts at this offset in the slot, too.
    uint64_t offset_in_block(int32_t cell, int32_t tier) const {
        const auto & s = slice_of(cell, tier);
        return (s.offset + expert_of(cell) * s.expert_bytes) % MOE_EDGE_BLOCK;
    }
    std::string name_of(int32_t cell, int32_t tier) const;

    // construction (moe-edge-open.cpp)
    void    open_files(const moe_edge_config & config);
    void    make_pools(const moe_edge_config & config);
    uint64_t pool_bytes(const moe_edge_group & group) const;
    void    lay_out_one_by_one(const moe_edge_config & config, char * at_host);
    void    lay_out_in_turn(const moe_edge_config & config);
    char *  map_pools(uint64_t total, int32_t flags);
    void    keep_checksums();
    void    open_device(const moe_edge_config & config);
    void    close_all();
    static int64_t row_length(const moe_edge_slices & s);
    static const moe_edge_kernels * kernels_of(const moe_edge_slices & s);

    // Whether the routed tokens of this step are counted only by the executor on the device.
    bool    device_counts() const { return device && runs_unwatched(); }
    // Whether the route callback is called in steps of this phase, MOE_EDGE_PREFILL or MOE_EDGE_DECODE.
    bool    asks(int32_t in_phase) const { return callback && (callback_phases >> in_phase & 1) != 0; }

    // All functions below require the mutex.

    // copies from the host tier (moe-edge-staging.cpp)
    int32_t slice_id(int32_t cell, int32_t tier) const { return cell * n_tiers + tier; }
    moe_edge_queue & queue_of(const moe_edge_load & load) { return load.in_host_tier() ? copies : reads.queue; }
    void    copy_loop();
    void    work_in_turn(std::unique_lock<std::mutex> & lock);
    int32_t cause_of_wait(const op_state & op) const;
    void    start_copy();
    moe_edge_ticket ahead_in_flight();
    void    transfer(int32_t cell);
    bool    landed(int32_t cell) const;
    int32_t reserve_host(std::unique_lock<std::mutex> & lock);
    int32_t host_class(int32_t cell, int32_t tier) const {
        return size_classes[(layer_of(cell) * MOE_EDGE_N_KINDS + kind_of(cell)) * n_tiers + tier];
    }
    void    drop_host(int32_t cell);
    void    check_device();
    void    fix_tables();
    void    collect_counts();

    // cache misses that the host computes (moe-edge-in-place.cpp)
    void    open_in_place(const moe_edge_config & config);
    void    choose_places(int32_t layer, int32_t kind, const int32_t * experts, int32_t n, int32_t n_tokens);
    double  compute_seconds(int32_t layer, int32_t kind, int32_t expert) const;
    uint64_t missing_bytes(int32_t layer, int32_t kind, int32_t expert) const;
    bool    is_missing(int32_t layer, int32_t kind, int32_t of_kind, int32_t expert) const;
    bool    try_in_place(int32_t cell);
    void    use_in_place(int32_t cell, moe_edge_ready * out);
    void    count_in_place(const moe_edge_slices & s);
    void    keep_used(int32_t layer, int32_t expert);

    // loads (moe-edge-loads.cpp)
    bool    begin_read(std::unique_lock<std::mutex> * lock, moe_edge_read & read) override;
    void    end_read(std::unique_lock<std::mutex> * lock, const moe_edge_read & read, const std::string & why,
                     uint64_t took_us, uint32_t crc) override;
    void    wake() override;
    void    break_load(const moe_edge_read & read, const std::string & sentence);
    void    compare(const moe_edge_read & read);
    void    lay_out(const moe_edge_read & read) const;  // without the mutex
    moe_edge_read_key read_key(int32_t cell) const;
    void    enqueue(int32_t cell);
    void    dequeue(int32_t cell);  // no effect if the load is not queued
    void    start_load(int32_t cell, moe_edge_load load);
    bool    try_load(int32_t cell, int32_t tier, bool passing, moe_edge_purpose purpose = moe_edge_purpose::DEMAND);
    void    load_or_wait(int32_t cell);
    void    load_ahead(int32_t cell, int32_t tier, bool passing, moe_edge_purpose purpose);
    bool    claim_slot(int32_t cell);
    bool    passes_for(int32_t cell, const moe_edge_load & load);
    void    cancel_read(int32_t cell);
    void    abandon(int32_t cell);
    void    free_load(int32_t cell);
    void    discard_load(int32_t cell);
    void    settle(int32_t cell);
    void    publish(int32_t cell);
    bool    may_go(int32_t cell) const;
    int32_t least_useful(const moe_edge_pool & pool, const moe_edge_claim & claim) const;
    int32_t take_slot(moe_edge_pool & pool, int32_t cell, const moe_edge_claim & claim);
    bool    revoke(const moe_edge_pool & pool);
    void    serve_waiting(moe_edge_pool & pool);
    void    serve_waiting(const moe_edge_matrix & m);  // in the pools of all tiers of this matrix
    moe_edge_ready hand_out(const moe_edge_matrix & m, int32_t cell);
    void    drop_tier(int32_t cell);
    void    evict(int32_t cell);
    void    touch(int32_t cell);
    void    set_entry(int32_t cell, const moe_edge_entry & entry);
    void    point_to_slot(int32_t cell);  // updates the table entry to the resident tier
    void    update_resident(int32_t cell);

    // the limit on slot memory (moe-edge-limit.cpp)
    void    fit();
    void    move_slot(moe_edge_pool & pool, int32_t slot);
    uint64_t bytes_beyond() const;
    std::vector<std::pair<char *, char *>> unused_pieces() const;
    std::string check_limit() const;
    bool    lies_in_slot(int32_t cell, const moe_edge_entry & entry);

    // Waits until a read completes, or for at most `ms` milliseconds. Returns how many microseconds it waited.
    uint64_t wait_done(std::unique_lock<std::mutex> & lock, int ms);
    // Requests experts of a layer for the running step. kind: one matrix kind, or MOE_EDGE_N_KINDS for all kinds.
    // passing: 1 for each expert that should be evicted first, because a long prompt requests it; null for none.
    void    apply_locked(int32_t layer, int32_t kind, const int32_t * experts, const uint8_t * tiers,
                         const uint8_t * passing, int32_t n, int32_t n_tokens);
    bool    check_layer(int32_t layer, int32_t kind, const int32_t * experts, int32_t n);
    void    open_step(int32_t new_phase);
    void    drop_step();
    void    ask(int32_t cell);
    bool    ask_for_load(int32_t cell);
    void    prefetch_locked(int32_t layer, const moe_edge_prefetch_item * list, int32_t n);
    void    cancel_stale(int32_t layer);
    bool    transits(const moe_edge_prefetch_item & t);
    bool    in_transition(int32_t cell) const;
    bool    admit(const moe_edge_prefetch_item & t);
    bool    conclude(const moe_edge_prefetch_item & t);
    void    conclude_transitions();
    bool    whole(int32_t cell) const;
    bool    whole_comes(int32_t cell) const;
    void    fail_locked(const std::string & sentence);

    std::mutex              mutex;
    std::condition_variable done_cv;   // ops wait for complete cache entries
    void *                      memory = nullptr;  // memory of all pools; with a device, of the pools in its memory
    void *                      mapped = nullptr;  // the mapping of the slots in host memory
    uint64_t                    mapped_bytes = 0;
    bool                        split = false;     // some pools of a store on a device are in host memory
    std::vector<moe_edge_pool>  pools;
    std::vector<int32_t>        group_of_slot;     // group of each slot, by rising address; empty with a device
    uint64_t                    owed_bytes = 0;    // bytes above the limit that were still in use after the last fit()
    bool                        running = false;   // a step of a model or a warm start is running
    std::vector<moe_edge_cell>  cells;
    moe_edge_checksums          checksums;  // indexed by slice_id
    std::vector<op_state>       ops;   // [n_layers * N_KINDS]
    std::unique_ptr<moe_edge_host_tier> host;          // with a device only
    std::vector<int32_t>        size_classes;          // of the host tier: [layer, kind, tier]
    double                      copy_s_per_byte = 0.0;  // for copying a missing expert; infinite if unknown
    double                      round_trip_s = 0.0;
    // HOSTED_PRIOR_S: the initial value, in seconds, of the two sums below. HOSTED_KEPT: at each step, the part of a
    // sum above that value is multiplied by this factor. Old measurements thus lose weight.
    static constexpr double     HOSTED_PRIOR_S = 1e-3, HOSTED_KEPT = 0.98;
    // The time in seconds that the host threads needed for missing experts: as estimated, and as measured. The ratio of
    // the two sums corrects later estimates.
    double                      hosted_expected_s = HOSTED_PRIOR_S;
    double                      hosted_took_s     = HOSTED_PRIOR_S;
    int32_t                     misses = MOE_EDGE_MISS_COPY;
    std::vector<int8_t>         places;                // [n_expert] enum moe_edge_miss, for one layer at a time
    std::unique_ptr<moe_edge_workers> workers;         // set if the host may compute experts
    moe_edge_queue              copies;                // loads that only need a copy, not enqueued yet
    moe_edge_ticket             ahead_copy = 0;        // the latest prefetch copy
    std::condition_variable     copy_cv;               // the copy thread waits for copies
    std::thread                 copy_thread;
    std::vector<moe_edge_matrix *> all_matrices, down_matrices;
    bool                        directed = false;      // a caller has passed tiers to apply()
    std::vector<moe_edge_prefetch_item> transitions;  // the transitions in progress
    std::vector<moe_edge_pool *> unserved;            // pools to which revoked transitions returned slots
    int32_t                     transition_seq = 0;
    int64_t                 n_decided = 0;  // number of cache entries with decided()
    bool                    tables_fixed = false;  // the tables are static until the next step
    uint64_t                table_changes = 0;     // number of changes to all tables
    uint64_t                fixed_changes = 0;  // value of table_changes when the tables were last found to be static
    bool                    stopping = false;      // tells the copy thread to end
    std::atomic<bool>       failed { false };
    std::string             failure;
    std::string             failed_read;  // message of the most recent failed read
    moe_edge_stats          stats = {};
    struct {
        std::atomic<uint64_t> n { 0 }, ns { 0 };
    } waits[2][MOE_EDGE_N_WAITS];
    const bool              in_turn;  // see moe_edge_in_turn()
    int32_t                 phase = MOE_EDGE_PREFILL;
    moe_edge_batch          batch;           // the micro-batch of the running step
    std::set<int32_t>       live, ended;     // sequences: seen in steps; ended but not reported yet
    std::vector<int32_t>    ends;            // the ended sequences in the current report
    int32_t                 ahead_seq = 0;
    uint64_t                clock = 0;  // counts requests; orders the LRU lists
    uint64_t                n_lists = 0;  // number of prefetch lists so far
    std::vector<uint8_t>    resident;  // [n_layers, n_expert], as in moe_edge_get_resident
    std::vector<uint8_t>    missing;   // [n_layers, n_expert] bit masks, as in moe_edge_event
    std::vector<uint32_t>   counts;    // [n_layers, n_expert] routed tokens since take_counts
    uint64_t                n_uncollected = 0;  // steps since collect_counts
    struct unwatched_uses {
        std::atomic<uint32_t> tokens { 0 }, steps { 0 };
    };
    std::vector<unwatched_uses> unwatched;  // [n_layers, n_expert] counted by the host's ops since collect_counts
    std::vector<uint8_t>    seen;      // [n_expert] scratch space of route()
    std::vector<int32_t>    routed;
    std::vector<std::vector<int32_t>> routed_of;  // [n_layers] experts of the last route event
    std::vector<uint8_t>    routed_tiers, routed_passing;
    // The last member, so that its threads end before the other members are destroyed.
    moe_edge_reads          reads { *this, mutex };
};

bool moe_edge_is_in_turn();  // the latest argument of moe_edge_in_turn()

// Makes a store wait for a model: the next model with managed experts that is loaded takes it (moe-edge.h).
void moe_edge_await_model(moe_edge_store * store);
moe_edge_store * moe_edge_latest_waiting();  // null if no store waits
void moe_edge_stop_waiting(const moe_edge_store * store);
