// A store without experts: the functions that orchestrator.native calls, over static
// arrays, and stub_step, which plays the part of llama_decode.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include STUB_HEADER

#define MAX_TOKENS 8
#define K 2
#define N_AHEAD 1
#define N_LAYERS 2
#define N_EXPERT 4

struct moe_edge_store {
    struct moe_edge_event event;
    struct moe_edge_decision decision;
    struct moe_edge_stats stats;
    moe_edge_route_cb cb;
    void * user;
    uint32_t callback_phases;
    moe_edge_step_cb step_cb;
    int32_t said_phase;
    int32_t ended;
    const char * error;
    int cancelled;
    int32_t seen_prefetch;
    int32_t seen_renormalize;
    int32_t ids[MAX_TOKENS*K];
    float weights[MAX_TOKENS*K];
    int32_t tokens[MAX_TOKENS];
    uint8_t phases[MAX_TOKENS];
    int32_t sequences[MAX_TOKENS];
    int32_t ahead_ids[N_AHEAD*MAX_TOKENS*K];
    float ahead[N_AHEAD*MAX_TOKENS*K];
    uint8_t resident[N_LAYERS*N_EXPERT], missing[N_LAYERS*N_EXPERT];
    uint8_t target[N_LAYERS*N_EXPERT];
    uint8_t tier[N_EXPERT];
    uint8_t passing[N_EXPERT];
    float importance[MAX_TOKENS];
    uint32_t counts[N_LAYERS*N_EXPERT];
    uint64_t rate;
    struct moe_edge_prefetch_item prefetch[MOE_EDGE_MAX_PREFETCH];
};

static int live;

int stub_live(void) { return live; }

int32_t moe_edge_abi_version(void) { return STUB_ABI; }
void moe_edge_adapt_threads(void * context, int32_t most) { (void) context; (void) most; }
uint32_t moe_edge_crc32(uint32_t crc, const void * data, uint64_t n) { (void) data; (void) n; return crc; }
int32_t moe_edge_interleaves(int32_t type, int64_t n_in, int64_t n_out) { (void) type; (void) n_in; (void) n_out; return 0; }
uint64_t moe_edge_slot_bytes(uint64_t offset, uint64_t bytes) {
    return (offset + bytes + 4095) / 4096 * 4096 - offset / 4096 * 4096;
}
uint64_t moe_edge_device_slot_bytes(int32_t type, uint64_t bytes, int64_t row) { (void) type; (void) row; return bytes; }
uint64_t moe_edge_host_least_bytes(const struct moe_edge_config * c) { (void) c; return 0; }
void * moe_edge_device_find(const char * name, char * err, size_t n) {
    snprintf(err, n, "the stub has no device %s", name);
    return NULL;
}
int moe_edge_device_describe(void * device, struct moe_edge_device_info * out) { (void) device; (void) out; return -1; }
void * moe_edge_device_buffer_type(void * device) { return device; }
int moe_edge_measure_product(int32_t type, int64_t n_in, int64_t n_out, int32_t n_threads, double * each_us, double * wake_us) {
    (void) type; (void) n_in; (void) n_out; (void) n_threads; (void) each_us; (void) wake_us;
    return -1;
}

int moe_edge_device_measure(void * device, uint64_t bytes, int32_t n_threads, struct moe_edge_bandwidths * out) {
    (void) device; (void) bytes; (void) n_threads; (void) out;
    return -1;
}
void moe_edge_get_memory(void * context, struct moe_edge_memory * out) { (void) context; (void) out; }
void moe_edge_get_touched(struct moe_edge_touched * out) { (void) out; }

struct moe_edge_store * moe_edge_store_create(const struct moe_edge_config * c, char * err, size_t n) {
    if (c->n_layers != N_LAYERS || c->n_expert != N_EXPERT || c->layers[1].slices[3][0].group != 1 ||
        c->groups[1].n_slots != 5 || strcmp(c->files[0], "experts.gguf") != 0) {
        snprintf(err, n, "store: the layout is not the stub's");
        return NULL;
    }
    struct moe_edge_store * s = calloc(1, sizeof(*s));
    s->event = (struct moe_edge_event) {
        .n_tokens = 1, .ids = s->ids, .weights = s->weights, .tokens = s->tokens,
        .phases = s->phases, .sequences = s->sequences,
        .ahead_ids = s->ahead_ids, .ahead = s->ahead, .importance = s->importance, .resident = s->resident,
        .missing = s->missing,
    };
    s->decision = (struct moe_edge_decision) { .tier = s->tier, .passing = s->passing, .prefetch = s->prefetch };
    live++;
    return s;
}
void moe_edge_store_free(struct moe_edge_store * s) { free(s); live--; }
int64_t moe_edge_store_limit(struct moe_edge_store * s, uint64_t bytes, char * err, size_t n) {
    (void) s; (void) bytes;
    snprintf(err, n, "the stub has no slots");
    return -1;
}
void * moe_edge_buffer_type(void) { return NULL; }
const char * moe_edge_load_error(void) { return NULL; }
const struct moe_edge_event * moe_edge_store_event(struct moe_edge_store * s) { return &s->event; }
struct moe_edge_decision * moe_edge_store_decision(struct moe_edge_store * s) { return &s->decision; }
void moe_edge_set_callback(struct moe_edge_store * s, moe_edge_route_cb cb, void * user, int32_t tier, uint32_t phases) {
    (void) tier; s->cb = cb; s->user = user; s->callback_phases = phases;
}
void moe_edge_set_room_callback(struct moe_edge_store * s, moe_edge_room_cb cb, void * user) { (void) s; (void) cb; (void) user; }
void moe_edge_set_step_callback(struct moe_edge_store * s, moe_edge_step_cb cb, void * user) { (void) user; s->step_cb = cb; }
void moe_edge_set_phase(struct moe_edge_store * s, int32_t phase) { s->said_phase = phase; }
void moe_edge_sequence_end(struct moe_edge_store * s, int32_t sequence) { s->ended = sequence; }
void moe_edge_begin_step(struct moe_edge_store * s, int32_t phase) {
    s->event.phase = phase; s->event.step++; s->error = NULL;
    memcpy(s->resident, s->target, sizeof(s->resident));
}
const char * moe_edge_error(struct moe_edge_store * s) { return s->error; }
void moe_edge_cancel(struct moe_edge_store * s, int32_t on) { s->cancelled = on; }
void moe_edge_get_stats(struct moe_edge_store * s, struct moe_edge_stats * out) { *out = s->stats; }
void moe_edge_reset_stats(struct moe_edge_store * s) { memset(&s->stats, 0, sizeof(s->stats)); }
void moe_edge_get_resident(struct moe_edge_store * s, uint8_t * out) { memcpy(out, s->resident, sizeof(s->resident)); }
int32_t moe_edge_warm(struct moe_edge_store * s, const struct moe_edge_prefetch_item * list, int32_t n,
        void (*progress)(int32_t, int32_t, void *), void * user) {
    int32_t done = 0;
    for (; done < n && !s->cancelled; done++) {
        const int at = list[done].layer*N_EXPERT + list[done].expert;
        s->resident[at] = s->target[at] = list[done].tier;
        progress(done + 1, n, user);
    }
    return done;
}
int moe_edge_check(struct moe_edge_store * s, char * err, size_t n) {
    snprintf(err, n, "store: %lld steps", (long long) s->event.step);
    return s->event.step > 100;
}
void moe_edge_prefetch(struct moe_edge_store * s, const struct moe_edge_prefetch_item * l, int32_t n) {
    (void) s; (void) l; (void) n;
}
int32_t moe_edge_transition(struct moe_edge_store * s, const struct moe_edge_prefetch_item * l, int32_t n) {
    for (int32_t i = 0; i < n; i++) {
        if (l[i].expert >= N_EXPERT) return -1;
        s->target[l[i].layer*N_EXPERT + l[i].expert] = l[i].tier;
    }
    return n;
}
void moe_edge_set_transition_rate(struct moe_edge_store * s, uint64_t bytes_per_s) { s->rate = bytes_per_s; }
void moe_edge_get_states(struct moe_edge_store * s, uint8_t * resident, uint8_t * target) {
    memcpy(resident, s->resident, sizeof(s->resident));
    memcpy(target, s->target, sizeof(s->target));
}
void moe_edge_get_landed(struct moe_edge_store * s, uint8_t * out) {
    for (int i = 0; i < N_LAYERS*N_EXPERT; i++) out[i] = s->resident[i] != s->target[i];
}
void moe_edge_take_counts(struct moe_edge_store * s, uint32_t * out) {
    memcpy(out, s->counts, sizeof(s->counts));
    memset(s->counts, 0, sizeof(s->counts));
}
void moe_edge_get_outputs(struct moe_edge_store * s, uint64_t * tokens, double * squares) {
    (void) s;
    for (int i = 0; i < N_LAYERS*N_EXPERT; i++) tokens[i] = 0, squares[i] = 0;
}
int moe_edge_apply(struct moe_edge_store * s, int32_t layer, const int32_t * ids, const uint8_t * tiers, const uint8_t * passing, int32_t n) {
    (void) s; (void) layer; (void) ids; (void) tiers; (void) n; return 0;
}
int moe_edge_use(struct moe_edge_store * s, int32_t layer, int32_t kind, const int32_t * ids, int32_t n,
        void (*visit)(int32_t, int32_t, int32_t, const void *, uint64_t, void *), void * user) {
    (void) s; (void) layer; (void) kind; (void) ids; (void) n; (void) visit; (void) user; return 0;
}

void moe_edge_sim_speed(struct moe_edge_store * s, uint64_t bandwidth, uint64_t us) {
    (void) s; (void) bandwidth; (void) us;
}
uint64_t moe_edge_sim_advance(struct moe_edge_store * s, uint64_t ns) { (void) s; return ns; }
int moe_edge_sim_route(struct moe_edge_store * s, int32_t layer, int32_t n_tokens, int32_t n_ahead, int32_t importance) {
    (void) s; (void) layer; (void) n_tokens; (void) n_ahead; (void) importance; return 0;
}
int moe_edge_sim_use(struct moe_edge_store * s, int32_t layer, int32_t kind, const int32_t * ids, int32_t n, uint64_t ns) {
    (void) s; (void) layer; (void) kind; (void) ids; (void) n; (void) ns; return 0;
}

// One route event of two tokens: expert ids 2l, 2l+1 and 3, 0 at layer l.
int stub_step(struct moe_edge_store * s, int32_t layer) {
    const int32_t ids[] = { 2*layer, 2*layer + 1, 3, 0 };
    memcpy(s->ids, ids, sizeof(ids));
    for (int i = 0; i < 4; i++) s->counts[layer*N_EXPERT + ids[i]]++;
    for (int i = 0; i < 4; i++) s->weights[i] = 0.25f * (float) (i + 1);
    for (int t = 0; t < 2; t++) {
        s->phases[t] = t ? MOE_EDGE_PREFILL : MOE_EDGE_DECODE;
        s->sequences[t] = layer + 3*t;
    }
    s->event.layer = layer;
    s->event.n_tokens = 2;
    s->event.n_ahead = layer + 1 < N_LAYERS;
    memset(s->tier, 0, sizeof(s->tier));
    s->decision.n_prefetch = -7;
    const int rc = s->cb ? s->cb(s->user) : 0;
    if (rc != 0) s->error = "the route callback failed";
    s->seen_prefetch = s->decision.n_prefetch;
    s->seen_renormalize = s->decision.renormalize;
    s->stats.callbacks[s->event.phase]++;
    return rc;
}
// The end of a step, with a start of the sequences 3 and 5, and the end of 2.
int stub_end_step(struct moe_edge_store * s) {
    static const int32_t starts[] = { 3, 5 }, ends[] = { 2 };
    const struct moe_edge_step step = {
        .step = s->event.step, .us = 1500, .phase = s->event.phase, .n_tokens = 7,
        .n_starts = 2, .starts = starts, .n_ends = 1, .ends = ends,
    };
    return s->step_cb ? s->step_cb(&step, NULL) : 0;
}
int stub_seen(struct moe_edge_store * s, int what) {
    const int seen[] = { s->seen_prefetch, s->seen_renormalize, s->cancelled, s->said_phase, s->ended, (int) s->callback_phases };
    return seen[what];
}
