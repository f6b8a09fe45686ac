// Memory that becomes resident when it is used: the KV cache of a context, its scratch buffers, and the work buffer of
// ggml's CPU backend. Each has its own mappings, whose pages are allocated by the first write and can be released.

#pragma once

#include "ggml-backend.h"

#include <cstddef>
#include <cstdint>
#include <memory>

struct moe_edge_touched;

// Returns the buffer type to use for a KV cache instead of `type`: ours if `type` is the CPU's, otherwise `type`.
// Clearing such a buffer with zeros releases its pages.
ggml_backend_buffer_type_t moe_edge_cache_type(ggml_backend_buffer_type_t type);

// Releases the whole pages within a part of a tensor, given in bytes; they then read as zeros. Does nothing for a
// tensor that is not in one of our caches.
void moe_edge_drop(const ggml_tensor * tensor, size_t offset, size_t size);

// Returns whether a tensor is in one of our caches.
bool moe_edge_in_cache(const ggml_tensor * tensor);

// Sets the used cells of the cache that contains this tensor, as in moe_edge_touched.
void moe_edge_count_cells(const ggml_tensor * tensor, uint64_t used, uint64_t cells_end);

// Sets a part of a tensor to zero without making pages resident. Returns false and changes nothing if the tensor is not
// in one of our caches.
bool moe_edge_zero(const ggml_tensor * tensor, size_t offset, size_t size);

// The scratch memory of one context. A long prompt uses a lot of it; the next step with few tokens releases it,
// including the work buffer.
class moe_edge_scratch {
  public:
    moe_edge_scratch();
    moe_edge_scratch(const moe_edge_scratch &) = delete;
    ~moe_edge_scratch();

    // Returns the buffer type to use for the context's compute buffers instead of `type`, like moe_edge_cache_type. The
    // buffers must not outlive the context.
    ggml_backend_buffer_type_t type(ggml_backend_buffer_type_t type) const;

    // Begins a step of n_tokens, when no earlier result is needed any longer. cpu: the backend whose work buffer the
    // step uses.
    void step(int32_t n_tokens, ggml_backend_t cpu);

    // Whether a step of n_tokens releases memory.
    bool gives_back(int32_t n_tokens) const;

    // Releases all of it.
    void drop(ggml_backend_t cpu);

    // Returns the memory of this context's scratch and work buffers, and of all caches.
    moe_edge_touched touched(ggml_backend_t cpu) const;

  private:
    const std::unique_ptr<ggml_backend_buffer_type> own;
    int32_t most_tokens = 0;  // largest step since the last release
};

// Enlarges the work buffer of a backend to `needed` bytes if it is smaller. Its contents are lost then.
void moe_edge_fit_work(ggml_backend_t cpu, uint8_t *& data, size_t & size, size_t needed);
void moe_edge_free_work(uint8_t * data);
