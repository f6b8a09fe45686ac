// The device of a test program: a GPU or an emulated one.

#pragma once

#include "experts.h"

#include "moe-edge-device.h"

#include <dlfcn.h>

#include <string>
#include <vector>

// Loads the CUDA backend from a library. "-": the backend in libggml.
inline ggml_backend_reg_t cuda_backend(const std::string & library) {
    ggml_backend_reg_t reg = library == "-" ? ggml_backend_reg_by_name("CUDA") : ggml_backend_load(library.c_str());
    if (!reg || ggml_backend_reg_dev_count(reg) == 0) {
        die("no CUDA device with " + library);
    }
    return reg;
}

struct gpu {
    ggml_backend_t backend;
    moe_edge_device * device;
    ggml_backend_buffer_type_t placeholders;

    explicit gpu(const std::string & library) {
        ggml_backend_reg_t reg = cuda_backend(library);
        backend = new_backend(reg);
        using device_of = moe_edge_device * (*) (int);
        using type_of   = ggml_backend_buffer_type_t (*)(int);
        device       = reinterpret_cast<device_of>(ggml_backend_reg_get_proc_address(reg, "moe_edge_device"))(0);
        placeholders = reinterpret_cast<type_of>(ggml_backend_reg_get_proc_address(reg, "moe_edge_buffer_type"))(0);
        void * handle = dlopen(library == "-" ? nullptr : library.c_str(), RTLD_NOW | RTLD_NOLOAD);
        count        = reinterpret_cast<uint64_t (*)(const char *)>(dlsym(handle, "moe_emu_launches"));
        limit_pinned = reinterpret_cast<void (*)(uint64_t)>(dlsym(handle, "moe_emu_limit_pinned"));
        refuse_pin   = reinterpret_cast<void (*)(int64_t)>(dlsym(handle, "moe_emu_refuse_pin"));
        counts_of    = reinterpret_cast<void (*)(uint64_t *)>(dlsym(handle, "moe_emu_counts"));
    }

    static ggml_backend_t new_backend(ggml_backend_reg_t reg) { return ggml_backend_dev_init(ggml_backend_reg_dev_get(reg, 0), nullptr); }

    // Replaces the backend by a new one, with new streams and a new pool.
    void renew() {
        ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
        ggml_backend_free(backend);
        backend = new_backend(reg);
    }

    // Only an emulated GPU counts launches.
    bool counts() const { return count != nullptr; }

    uint64_t launches(const char * kernel) const { return count ? count(kernel) : 0; }

    // Returns how many bytes were copied to the emulated GPU so far; 0 on a real one.
    uint64_t bytes_in() const {
        uint64_t found[7] = {};
        if (counts_of) {
            counts_of(found);
        }
        return found[4];
    }

    // From now on, larger pieces of host memory cannot be pinned. Null on a real GPU.
    void (*limit_pinned)(uint64_t bytes);

    // The nth piece of host memory from now on cannot be pinned. Null on a real GPU.
    void (*refuse_pin)(int64_t nth);

  private:
    uint64_t (*count)(const char *);
    void (*counts_of)(uint64_t * out);
};

// Parses "q4_K+q2_K".
inline std::vector<ggml_type> parse_tiers(const std::string & tiers) {
    std::vector<ggml_type> types;
    for (size_t at = 0; at <= tiers.size();) {
        const size_t end = std::min(tiers.find('+', at), tiers.size());
        types.push_back(type_of(tiers.substr(at, end - at)));
        at = end + 1;
    }
    return types;
}
