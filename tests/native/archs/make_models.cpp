// Writes tiny models with random weights of each Mixture-of-Experts architecture, like upstream's
// own test.
//
//   make_models
// lists the architectures.
//
//   make_models NAME FOLDER N_EXPERT N_USED N_LAYER WIDTH N_BY_TOKEN
// writes FOLDER/NAME.gguf. Upstream's layers are repeated until there are at least N_LAYER. With a
// WIDTH, every row of an expert has that many weights. In the first N_BY_TOKEN layers the token id
// chooses the experts, if the architecture has such layers.

#define main upstream_main
#include "test-llama-archs.cpp"
#undef main

#include "llama-model.h"

#include <set>

#include <sys/wait.h>
#include <unistd.h>

struct sizes {
    uint32_t n_expert, n_used, n_layer, width, n_by_token;
};

// Adds tables by which the token id chooses the experts of a layer, in the format of upstream's
// converter. Upstream's test makes no such layers.
static void choose_by_token(gguf_context * file, ggml_context * ctx, const sizes & sizes) {
    const int64_t n_vocab = 128;  // as in get_gguf_ctx
    for (uint32_t il = 0; il < sizes.n_by_token; il++) {
        ggml_tensor * table = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, sizes.n_used, n_vocab);
        ggml_format_name(table, "blk.%u.ffn_gate_tid2eid.weight", il);
        for (int64_t i = 0; i < ggml_nelements(table); i++) {
            static_cast<int32_t *>(table->data)[i] = (i / sizes.n_used * (3 + 2 * il) + i % sizes.n_used) % sizes.n_expert;
        }
        gguf_add_tensor(file, table);
    }
    gguf_set_val_u32(file, "deepseek4.hash_layer_count", sizes.n_by_token);
}

// Repeats upstream's layers to at least n_layer. Values per layer in the header are repeated too.
static void set_layers(gguf_context * gguf, const std::string & arch, uint32_t n_layer) {
    const std::string count = arch + ".block_count";
    const uint32_t before = gguf_get_val_u32(gguf, gguf_find_key(gguf, count.c_str()));
    const uint32_t times = std::max(1u, (n_layer + before - 1) / before);
    gguf_set_val_u32(gguf, count.c_str(), times * before);
    for (int64_t at = 0; times > 1 && at < gguf_get_n_kv(gguf); at++) {
        const std::string key = gguf_get_key(gguf, at);
        if (gguf_get_kv_type(gguf, at) != GGUF_TYPE_ARRAY || gguf_get_arr_type(gguf, at) == GGUF_TYPE_STRING ||
                gguf_get_arr_n(gguf, at) != before) {
            continue;
        }
        const gguf_type type = gguf_get_arr_type(gguf, at);
        const size_t size = before * (type == GGUF_TYPE_BOOL ? 1 : type == GGUF_TYPE_UINT64 ? 8 : 4);
        const char * data = (const char *) gguf_get_arr_data(gguf, at);
        std::vector<char> repeated;
        for (uint32_t i = 0; i < times; i++) {
            repeated.insert(repeated.end(), data, data + size);
        }
        gguf_set_arr_data(gguf, key.c_str(), type, repeated.data(), before * times);
        at = -1;  // the changed key is the last one now, and its array is longer
    }
}

// Multiplies the scales of matrices by ten, because upstream's random scales are too small to have
// an effect. Returns whether the graph reads the scales of experts, which all models get here.
static bool scale_by_about_one(llama_model * model, llama_context * context) {
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    const auto logits = [&] {
        auto tokens = get_tokens(8, n_vocab, 1);
        llama_memory_clear(llama_get_memory(context), true);
        if (llama_decode(context, llama_batch_get_one(tokens.data(), tokens.size())) != 0) {
            throw std::runtime_error("cannot decode");
        }
        const float * row = llama_get_logits_ith(context, -1);
        return std::vector<float>(row, row + n_vocab);
    };
    const auto enlarge = [&](bool experts) {
        for (const auto & [name, tensor] : llama_internal_get_tensor_map(model)) {
            if (name.size() > 6 && name.compare(name.size() - 6, 6, ".scale") == 0 &&
                    (name.find("_exps.") != std::string::npos) == experts) {
                std::vector<float> values(ggml_nelements(tensor));
                ggml_backend_tensor_get(tensor, values.data(), 0, ggml_nbytes(tensor));
                for (float & each : values) {
                    each *= 10.0f;
                }
                ggml_backend_tensor_set(tensor, values.data(), 0, ggml_nbytes(tensor));
            }
        }
    };
    enlarge(false);
    const auto before = logits();
    enlarge(true);
    return logits() != before;
}

static void make(llm_arch arch, const std::string & folder, const sizes & sizes) {
    gguf_context_ptr gguf = get_gguf_ctx(arch, true);
    const auto set = [&](const char * key, uint32_t value) {
        gguf_set_val_u32(gguf.get(), (std::string(llm_arch_name(arch)) + "." + key).c_str(), value);
    };
    set("expert_count", sizes.n_expert);
    set("expert_used_count", sizes.n_used);
    if (sizes.n_layer > 0) {
        set_layers(gguf.get(), llm_arch_name(arch), sizes.n_layer);
    }
    if (sizes.width > 0) {
        for (const char * key : { "embedding_length", "feed_forward_length", "expert_feed_forward_length", "expert_latent_length" }) {
            set(key, sizes.width);
        }
    }
    if (arch == LLM_ARCH_GEMMA4) {  // upstream's test sets this for some other architectures only
        const bool windowed[] = { true, true, true, true, false };
        gguf_set_arr_data(gguf.get(), "gemma4.attention.sliding_window_pattern", GGUF_TYPE_BOOL, windowed, 5);
        if (sizes.width > 0) {
            set("attention.key_length_swa", sizes.width / 2);
            set("attention.value_length_swa", sizes.width / 2);
        }
    }
    auto model = get_model_and_ctx(gguf.get(), nullptr, /* seed */ 1, /* stdev */ 0.1f, {});
    const bool scaled = scale_by_about_one(model.first.get(), model.second.get());

    // Upstream's saver does not support every architecture. The keys that its test adds to the
    // header for some tensors are not tensors of the model.
    gguf_context_ptr file(gguf_init_empty());
    gguf_set_kv(file.get(), gguf.get());
    ggml_context_ptr tables(ggml_init({ 1 << 20, nullptr, /* no_alloc */ false }));
    std::set<std::string> left_out;
    if (arch == LLM_ARCH_DEEPSEEK4) {
        choose_by_token(file.get(), tables.get(), sizes);
        for (uint32_t il = 0; il < sizes.n_by_token; il++) {
            left_out.insert("blk." + std::to_string(il) + ".exp_probs_b.bias");
        }
    }
    for (const auto & [name, tensor] : llama_internal_get_tensor_map(model.first.get())) {
        const bool ignored = !scaled && name.find("_exps.scale") != std::string::npos;
        if (!ignored && gguf_find_tensor(file.get(), name.c_str()) < 0 && !left_out.count(name)) {
            gguf_add_tensor(file.get(), tensor);
        }
    }
    gguf_write_to_file(file.get(), (folder + "/" + llm_arch_name(arch) + ".gguf").c_str(), /* only_meta */ false);
}

// Runs in a child process, because upstream's code may abort.
static bool made(llm_arch arch, const std::string & folder, const sizes & sizes) {
    const pid_t child = fork();
    if (child == 0) {
        try {
            make(arch, folder, sizes);
            _exit(0);
        } catch (const std::exception &) {
            _exit(1);
        }
    }
    int status = 0;
    return waitpid(child, &status, 0) == child && status == 0;
}

int main(int argc, char ** argv) {
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    for (const llm_arch & arch : llm_arch_all()) {
        const std::string name = llm_arch_name(arch);
        const bool more = arch == LLM_ARCH_GEMMA4 || arch == LLM_ARCH_GRANITE_HYBRID || arch == LLM_ARCH_NEMOTRON_H_MOE;
        if (!more && (!moe_implemented(arch) || !arch_supported(arch))) {
            continue;
        }
        if (argc == 1) {
            printf("%s\n", name.c_str());
        } else if (name == argv[1]) {
            const auto number = [&](int at) { return (uint32_t) atoi(argv[at]); };
            const sizes asked = { number(3), number(4), number(5), number(6), number(7) };
            const sizes fewer = { asked.n_expert, asked.n_used, 0, asked.width, asked.n_by_token };
            return made(arch, argv[2], asked) || made(arch, argv[2], fewer) ? 0 : 1;
        }
    }
    return argc != 1;
}
