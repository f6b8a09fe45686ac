// MUL_MAT_ID of upstream's CUDA backend on plain tensors, compared with dot products in double
// precision. On a GPU this checks the build, in emulation the emulation.
//
//   kernels_test LIBRARY TYPE... [-- TOKENS...]

#include "gpu.h"

#include <cstring>

namespace {

void plain(ggml_backend_t backend, const expert_weights & w, const std::vector<int64_t> & tokens, std::mt19937 & random, std::vector<comparison> & all) {
    const shape & s = w.s;
    ggml_init_params params = { ggml_tensor_overhead(), nullptr, true };
    ggml_context * ctx = ggml_init(params);
    ggml_tensor * weights = ggml_new_tensor_3d(ctx, w.types[0], s.n_in, s.n_out, s.experts);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
    ggml_backend_tensor_set(weights, w.bytes[0].data(), 0, w.bytes[0].size());
    for (size_t i = 0; i < tokens.size(); i++) {
        for (const int64_t x_slots : { int64_t(1), s.used }) {
            const batch b(s, tokens[i], x_slots, random);
            op o(backend, weights, s.used, x_slots, tokens[i]);
            const std::string where = std::string(ggml_type_name(w.types[0])) + ", " + std::to_string(tokens[i]) + " tokens";
            all[i].add(w, b, std::vector<int32_t>(s.experts, 0), o.run(b), where);
        }
    }
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc < 3) {
        die("usage: kernels_test LIBRARY TYPE... [-- TOKENS...]");
    }
    ggml_backend_reg_t reg = cuda_backend(argv[1]);
    ggml_backend_t backend = ggml_backend_dev_init(ggml_backend_reg_dev_get(reg, 0), nullptr);
    std::vector<ggml_type> types;
    std::vector<int64_t> tokens;
    int i = 2;
    for (; i < argc && strcmp(argv[i], "--") != 0; i++) {
        types.push_back(type_of(argv[i]));
    }
    for (i++; i < argc; i++) {
        tokens.push_back(atoi(argv[i]));
    }
    if (tokens.empty()) {
        tokens = { 1, 2, 3, 4, 5, 6, 7, 8, 9, 64 };
    }
    std::mt19937 random(1);
    for (const ggml_type type : types) {
        std::vector<comparison> all(tokens.size());
        for (const shape & s : { shape{ 512, 128, 8, 2 }, shape{ 768, 72, 6, 3 } }) {
            const expert_weights w(s, { type }, random);
            plain(backend, w, tokens, random, all);
        }
        for (size_t t = 0; t < tokens.size(); t++) {
            const std::string what = std::string(ggml_type_name(type)) + ", " + std::to_string(tokens[t]) + " tokens";
            printf("%s: NMSE %.2e\n", what.c_str(), all[t].nmse(what));
        }
    }
    ggml_backend_free(backend);
    return 0;
}
