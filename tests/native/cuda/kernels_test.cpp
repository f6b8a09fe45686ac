// MUL_MAT_ID of upstream's CUDA backend on plain tensors, against a dot product in double
// precision: on a GPU a check of the build, in emulation a check of the emulation.
//
//   kernels_test LIBRARY TYPE... [-- TOKENS...]

#include "experts.h"

#include <cstring>

namespace {

double plain(ggml_backend_t backend, const shape & s, ggml_type type, int64_t tokens, int64_t x_slots, std::mt19937 & random) {
    const expert_weights w(s, { type }, random);
    const batch b(s, tokens, x_slots, random);
    ggml_init_params params = { ggml_tensor_overhead(), nullptr, true };
    ggml_context * ctx = ggml_init(params);
    ggml_tensor * weights = ggml_new_tensor_3d(ctx, type, s.n_in, s.n_out, s.experts);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
    ggml_backend_tensor_set(weights, w.bytes[0].data(), 0, w.bytes[0].size());
    double worst;
    {
        op o(backend, weights, s.used, x_slots, tokens);
        const std::string where = std::string(ggml_type_name(type)) + ", " + std::to_string(tokens) + " tokens";
        worst = compare(w, b, std::vector<int32_t>(s.experts, 0), o.run(b), where);
    }
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    return worst;
}

ggml_type type_of(const char * name) {
    for (int t = 0; t < GGML_TYPE_COUNT; t++) {
        const char * known = ggml_type_name(static_cast<ggml_type>(t));
        if (known && strcmp(known, name) == 0) {
            return static_cast<ggml_type>(t);
        }
    }
    die(std::string("no such type: ") + name);
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc < 3) {
        die("usage: kernels_test LIBRARY TYPE... [-- TOKENS...]");
    }
    ggml_backend_reg_t reg = ggml_backend_load(argv[1]);
    if (!reg || ggml_backend_reg_dev_count(reg) == 0) {
        die(std::string("no CUDA device with ") + argv[1]);
    }
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
        double worst = 0;
        for (const int64_t t : tokens) {
            for (const shape & s : { shape{ 512, 128, 8, 2 }, shape{ 768, 96, 6, 3 } }) {
                for (const int64_t x_slots : { int64_t(1), s.used }) {
                    worst = std::max(worst, plain(backend, s, type, t, x_slots, random));
                }
            }
        }
        printf("%s: worst NMSE %.2e\n", ggml_type_name(type), worst);
    }
    ggml_backend_free(backend);
    return 0;
}
