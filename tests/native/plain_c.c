/* The library without Python: greedy tokens of a one-tier GGUF whose experts stay on disk.
 *
 *   plain_c MODEL SLOTS_PER_LAYER N_TOKENS TOKEN...
 *
 * Prints N_TOKENS token ids, then the peak of the slot bytes and the budget.
 */

#include "moe-edge.h"

#include "gguf.h"
#include "llama.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_LAYERS 64
#define MAX_TOKENS 512

static const char * const KIND_NAMES[MOE_EDGE_N_KINDS] = { "up", "gate", "gate_up", "down" };

static void die(const char * what, const char * why) {
    fprintf(stderr, "plain_c: %s: %s\n", what, why);
    exit(1);
}

static int32_t metadata_u32(const struct gguf_context * gguf, const char * arch, const char * key) {
    char name[128];
    snprintf(name, sizeof(name), "%s.%s", arch, key);
    const int64_t id = gguf_find_key(gguf, name);
    if (id < 0) {
        die(name, "not in the file");
    }
    return (int32_t) gguf_get_val_u32(gguf, id);
}

static void silent(enum ggml_log_level level, const char * text, void * user) {
    (void) level;
    (void) text;
    (void) user;
}

int main(int argc, char ** argv) {
    static struct moe_edge_layer layers[MAX_LAYERS];
    static struct moe_edge_group groups[MAX_LAYERS * MOE_EDGE_N_KINDS];
    static llama_token tokens[MAX_TOKENS];
    if (argc < 5 || argc - 4 > MAX_TOKENS) {
        die("usage", "plain_c MODEL SLOTS_PER_LAYER N_TOKENS TOKEN...");
    }
    if (moe_edge_abi_version() != MOE_EDGE_ABI_VERSION) {
        die("library", "another ABI version");
    }
    const char * path = argv[1];
    const int32_t n_predict = atoi(argv[3]);

    struct gguf_init_params no_alloc = { true, NULL };
    struct gguf_context * gguf = gguf_init_from_file(path, no_alloc);
    if (!gguf) {
        die(path, "not a GGUF file");
    }
    const char * arch = gguf_get_val_str(gguf, gguf_find_key(gguf, "general.architecture"));
    struct moe_edge_config config;
    memset(&config, 0, sizeof(config));
    config.n_expert      = metadata_u32(gguf, arch, "expert_count");
    config.n_expert_used = metadata_u32(gguf, arch, "expert_used_count");
    for (int il = 0; il < MAX_LAYERS; il++) {
        struct moe_edge_layer layer;
        int found = 0;
        memset(&layer, 0, sizeof(layer));
        layer.il = il;
        for (int k = 0; k < MOE_EDGE_N_KINDS; k++) {
            char name[64];
            snprintf(name, sizeof(name), "blk.%d.ffn_%s_exps.weight", il, KIND_NAMES[k]);
            const int64_t id = gguf_find_tensor(gguf, name);
            if (id < 0) {
                continue;
            }
            struct moe_edge_slices * s = &layer.slices[k][0];
            s->offset       = gguf_get_data_offset(gguf) + gguf_get_tensor_offset(gguf, id);
            s->expert_bytes = gguf_get_tensor_size(gguf, id) / config.n_expert;
            s->type         = gguf_get_tensor_type(gguf, id);
            s->group        = config.n_groups;
            groups[config.n_groups].slot_bytes = moe_edge_slot_bytes(4095, s->expert_bytes);
            groups[config.n_groups].n_slots    = atoi(argv[2]);
            config.budget_bytes += groups[config.n_groups].slot_bytes * groups[config.n_groups].n_slots;
            config.n_groups++;
            found = 1;
        }
        if (found) {
            layers[config.n_layers++] = layer;
        }
    }
    gguf_free(gguf);
    config.files        = &path;
    config.n_files      = 1;
    config.layers       = layers;
    config.groups       = groups;
    config.n_tiers      = 1;
    config.max_tokens   = 512;
    config.n_io_threads = 2;
    config.flags        = MOE_EDGE_DIRECT_IO;

    char err[512];
    struct moe_edge_store * store = moe_edge_store_create(&config, err, sizeof(err));
    if (!store) {
        die("store", err);
    }
    llama_log_set(silent, NULL);
    llama_backend_init();
    struct llama_model_tensor_buft_override overrides[] = {
        { "ffn_(up|gate|gate_up|down)_exps\\.weight", (ggml_backend_buffer_type_t) moe_edge_buffer_type() },
        { NULL, NULL },
    };
    struct llama_model_params mparams = llama_model_default_params();
    mparams.tensor_buft_overrides = overrides;
    mparams.load_mode             = LLAMA_LOAD_MODE_NONE;
    mparams.use_extra_bufts       = false;
    struct llama_model * model = llama_model_load_from_file(path, mparams);
    if (!model) {
        die(path, "cannot be loaded");
    }
    struct llama_context_params cparams = llama_context_default_params();
    cparams.n_ctx     = 512;
    cparams.n_ubatch  = 512;
    cparams.n_threads = cparams.n_threads_batch = 2;
    struct llama_context * ctx = llama_init_from_model(model, cparams);
    if (!ctx) {
        die("context", "cannot be made");
    }

    int32_t n = argc - 4;
    for (int i = 0; i < n; i++) {
        tokens[i] = atoi(argv[4 + i]);
    }
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (int i = 0; i < n_predict; i++) {
        if (llama_decode(ctx, llama_batch_get_one(tokens, n)) != 0) {
            die("decode", "failed");
        }
        const float * logits = llama_get_logits_ith(ctx, -1);
        tokens[0] = 0;
        for (int32_t t = 1; t < n_vocab; t++) {
            if (logits[t] > logits[tokens[0]]) {
                tokens[0] = t;
            }
        }
        n = 1;
        printf("%d ", tokens[0]);
    }
    struct moe_edge_stats stats;
    moe_edge_get_stats(store, &stats);
    printf("\n%llu %llu\n", (unsigned long long) stats.slot_bytes_peak, (unsigned long long) stats.budget_bytes);

    llama_free(ctx);
    moe_edge_store_free(store);
    llama_model_free(model);
    return 0;
}
