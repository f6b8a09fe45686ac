// Manages memory that becomes resident only when it is used: the KV cache of a context, its scratch buffers, and the
// work buffer of ggml's CPU backend. Writing to a page allocates it, and pages can be released again.

#pragma once

#include "ggml-backend.h"

#include <cstddef>
#include <cstdint>
#include <memory>

struct moe_edge_touched;

// Returns the buffer type to use for a KV cache instead of `type`: ours if `type` is the CPU's, otherwise `type`
// itself. Clearing a buffer of our type with zeros releases its pages.
ggml_backend_buffer_type_t moe_edge_cache_type(ggml_backend_buffer_type_t type);

// Releases the whole pages within `size` bytes of a tensor, starting at `offset`. They read as zeros afterwards. Does
// nothing if moe_edge_in_cache(tensor) is false.
void moe_edge_drop(const ggml_tensor * tensor, size_t offset, size_t size);

// Returns whether a tensor is part of a KV cache whose buffer has our type (see moe_edge_cache_type).
bool moe_edge_in_cache(const ggml_tensor * tensor);

// Records the used KV cells of the cache that contains this tensor, for moe_edge_get_touched. used: their bytes.
// cells_end: the index after the last used cell.
void moe_edge_count_cells(const ggml_tensor * tensor, uint64_t used, uint64_t cells_end);

// Sets a part of a tensor to zero without making pages resident. Returns false, and changes nothing, if
// moe_edge_in_cache(tensor) is false.
bool moe_edge_zero(const ggml_tensor * tensor, size_t offset, size_t size);

// Manages the scratch memory of one context. A long prompt makes a lot of it resident. The next step with few tokens
// releases this memory and the work buffer.
class moe_edge_scratch {
  public:
    moe_edge_scratch();
    moe_edge_scratch(const moe_edge_scratch &) = delete;
    ~moe_edge_scratch();

    // Returns the buffer type to use for the context's compute buffers instead of `type`: ours if `type` is the CPU's,
    // otherwise `type` itself. The buffers must not outlive the context.
    ggml_backend_buffer_type_t type(ggml_backend_buffer_type_t type) const;

    // Must be called before each step, when the results of earlier steps are no longer needed. Releases the scratch
    // memory of a long prompt if this step has far fewer tokens. cpu: the backend whose work buffer is also released.
    void step(int32_t n_tokens, ggml_backend_t cpu);

    // Whether a step of n_tokens releases memory.
    bool gives_back(int32_t n_tokens) const;

    // Releases the pages of the context's scratch buffers and of the work buffer of `cpu`.
    void drop(ggml_backend_t cpu);

    // Returns the memory of this context's scratch buffers and work buffer, and of all KV caches of this process.
    moe_edge_touched touched(ggml_backend_t cpu) const;

  private:
    const std::unique_ptr<ggml_backend_buffer_type> own;
    int32_t most_tokens = 0;  // largest step since the last release
};

// Makes the work buffer of a backend at least `needed` bytes large. If the buffer is enlarged, its contents are lost.
void moe_edge_fit_work(ggml_backend_t cpu, uint8_t *& data, size_t & size, size_t needed);
void moe_edge_free_work(uint8_t * data);
