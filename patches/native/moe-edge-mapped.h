// Memory that is there once it is used: a context's cache, its scratch, and the work buffer of ggml's CPU backend. Each
// lies in mappings of its own, whose pages come with the first write to them and can be given back.

#pragma once

#include "ggml-backend.h"

#include <cstddef>
#include <cstdint>
#include <memory>

struct moe_edge_touched;

// For the buffers of a cache, in the place of this type: ours where it is the CPU's, else the same.
// Cleared with zeros, such a buffer gives its pages back.
ggml_backend_buffer_type_t moe_edge_cache_type(ggml_backend_buffer_type_t type);

// Gives back the whole pages of a part of a tensor, in bytes, which then reads as zeros. Nothing
// happens to a tensor that is not in a cache of ours.
void moe_edge_drop(const ggml_tensor * tensor, size_t offset, size_t size);

// Whether a tensor is in such a buffer.
bool moe_edge_in_cache(const ggml_tensor * tensor);

// What is in use of the cache that this tensor is a part of, as in moe_edge_touched.
void moe_edge_count_cells(const ggml_tensor * tensor, uint64_t used, uint64_t cells_end);

// Makes a part of a tensor zeros, and touches no page for it that was not there. False for a tensor
// that is not in a cache of ours, which is left as it is.
bool moe_edge_zero(const ggml_tensor * tensor, size_t offset, size_t size);

// What one context computes in. A long prompt takes a lot of it, and the first step of few tokens behind it gives that
// back, the work buffer included.
class moe_edge_scratch {
  public:
    moe_edge_scratch();
    moe_edge_scratch(const moe_edge_scratch &) = delete;
    ~moe_edge_scratch();

    // For the context's compute buffers, in the place of this type: as moe_edge_cache_type. They
    // must not outlive the context.
    ggml_backend_buffer_type_t type(ggml_backend_buffer_type_t type) const;

    // A step of so many tokens begins, and nothing that was computed is needed any more. cpu: the
    // backend whose work buffer it uses.
    void step(int32_t n_tokens, ggml_backend_t cpu);

    // Whether a step of so many tokens gives memory back.
    bool gives_back(int32_t n_tokens) const;

    // Gives all of it back.
    void drop(ggml_backend_t cpu);

    // Of this context's scratch and work buffer, and of all caches.
    moe_edge_touched touched(ggml_backend_t cpu) const;

  private:
    const std::unique_ptr<ggml_backend_buffer_type> own;
    int32_t most_tokens = 0;  // of a step since the last time
};

// Makes the work buffer of a backend as large as a graph needs it; what was in it is lost then.
void moe_edge_fit_work(ggml_backend_t cpu, uint8_t *& data, size_t & size, size_t needed);
void moe_edge_free_work(uint8_t * data);
