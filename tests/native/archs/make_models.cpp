// Tiny models of random weights of each Mixture-of-Experts architecture, as upstream's own test makes them:
//   make_models
// names the architectures, and
//   make_models NAME FOLDER N_EXPERT N_USED N_LAYER N_BY_TOKEN
// writes FOLDER/NAME.gguf. In the first N_BY_TOKEN layers a token's id chooses its experts, where the architecture has
// such layers. With N_LAYER 0, or where the architecture has other numbers for each layer, there are
// as many layers as upstream's test has.

#define main upstream_main
#include "test-llama-archs.cpp"
#undef main

#include "llama-model.h"

#include <set>

#include <sys/wait.h>
#include <unistd.h>

struct sizes {
    uint32_t n_expert, n_used, n_layer, n_by_token;
};

// Upstream's test makes no layer in which a token's id chooses its experts. These tables are as its converter writes them.
static void choose_by_token(gguf_context * file, ggml_context * ctx, const sizes & sizes) {
    const int64_t n_vocab = 128;  // as get_gguf_ctx has it
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

static void make(llm_arch arch, const std::string & folder, const sizes & sizes) {
    gguf_context_ptr gguf = get_gguf_ctx(arch, true);
    const auto set = [&](const char * key, uint32_t value) {
        gguf_set_val_u32(gguf.get(), (std::string(llm_arch_name(arch)) + "." + key).c_str(), value);
    };
    set("expert_count", sizes.n_expert);
    set("expert_used_count", sizes.n_used);
    if (sizes.n_layer > 0) {
        set("block_count", sizes.n_layer);
    }
    if (arch == LLM_ARCH_GEMMA4) {  // which upstream's test has for some others, but not for this one
        const bool windowed[] = { true, true, true, true, false };
        gguf_set_arr_data(gguf.get(), "gemma4.attention.sliding_window_pattern", GGUF_TYPE_BOOL, windowed, 5);
    }
    auto model = get_model_and_ctx(gguf.get(), nullptr, /* seed */ 1, /* stdev */ 0.1f, {});

    // Upstream's saver knows not every architecture; and what its test adds to the header beside keys are
    // no tensors of the model.
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
        if (gguf_find_tensor(file.get(), name.c_str()) < 0 && !left_out.count(name)) {
            gguf_add_tensor(file.get(), tensor);
        }
    }
    gguf_write_to_file(file.get(), (folder + "/" + llm_arch_name(arch) + ".gguf").c_str(), /* only_meta */ false);
}

// In a process of its own, which alone ends where upstream's code ends one.
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
            const sizes asked = { (uint32_t) atoi(argv[3]), (uint32_t) atoi(argv[4]), (uint32_t) atoi(argv[5]),
                (uint32_t) atoi(argv[6]) };
            const sizes fewer = { asked.n_expert, asked.n_used, 0, asked.n_by_token };
            return made(arch, argv[2], asked) || made(arch, argv[2], fewer) ? 0 : 1;
        }
    }
    return argc != 1;
}
