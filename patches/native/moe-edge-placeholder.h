// Allocates buffers for placeholders: expert tensors whose data is in a store. Such a buffer has almost no memory, and
// reading or writing a tensor in it aborts the process.

#pragma once

#include "ggml-backend-impl.h"

inline void moe_edge_refuse_data(ggml_backend_buffer_t, ggml_tensor * tensor, const void *, size_t, size_t) {
    GGML_ABORT("moe-edge: %s is a placeholder and takes no data", tensor->name);
}

inline void moe_edge_refuse_read(ggml_backend_buffer_t, const ggml_tensor * tensor, void *, size_t, size_t) {
    GGML_ABORT("moe-edge: %s is a placeholder and holds no data", tensor->name);
}

// Allocates a buffer for placeholders from the buffer type `plain`, and gives it the buffer type `buft`. Returns null
// if the allocation fails.
inline ggml_backend_buffer_t moe_edge_alloc_placeholders(ggml_backend_buffer_type_t plain, ggml_backend_buffer_type_t buft, size_t size) {
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(plain, size);
    if (buffer) {
        buffer->buft             = buft;
        buffer->iface.set_tensor = moe_edge_refuse_data;
        buffer->iface.get_tensor = moe_edge_refuse_read;
        buffer->iface.cpy_tensor = nullptr;
    }
    return buffer;
}
