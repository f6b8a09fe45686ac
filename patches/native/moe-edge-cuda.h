// The CUDA executor: GGML_OP_MUL_MAT_ID over experts that differ in address and type. What
// ggml-cuda's own files call is declared here; managed tensors are those of our buffer type.

#pragma once

#include "ggml.h"

#include <cstdint>

struct ggml_backend_cuda_context;

// What the `extra` of the ids in one of our own launches points to: upstream's kernels then take
// the rows of id -1 for those of other launches, and find experts where they lie.
struct moe_edge_cuda_ids {
    const void *    y       = nullptr;  // MMVQ: src1 as q8_1, for all launches of an op
    const int32_t * gate    = nullptr;  // MMVQ with gate fused in: the ids that gate goes by
    const int32_t * offsets = nullptr;  // MMQ: first block of each expert
};

// A placeholder, attached to a store or not. Null tensors and such without a buffer are not.
bool moe_edge_cuda_is_managed(const ggml_tensor * weights);

// False while the op reads tables that stay on the device: a CUDA graph may hold it.
bool moe_edge_cuda_needs_sync(const ggml_tensor * dst);

void moe_edge_cuda_mul_mat_id(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// Two products and their GLU. Returns how many of the three nodes it computed: 3, 2 without the
// GLU, or 0 where neither product is managed or the batch is too large.
int moe_edge_cuda_gate_up(ggml_backend_cuda_context & ctx, ggml_tensor * gate, ggml_tensor * up, ggml_tensor * glu);

// A pool gave memory of this device back, which captured graphs may hold.
void moe_edge_cuda_pool_freed(int device);

// Whether what this backend captured has to go for that reason. Asked before each graph.
bool moe_edge_cuda_pool_shrank(const ggml_backend_cuda_context & ctx);

// The backend is about to be destroyed: its streams and its pool come to an end.
void moe_edge_cuda_forget(const ggml_backend_cuda_context & ctx);

// "moe_edge_device": moe_edge_device * (*)(int index), null where there is no such device;
// "moe_edge_buffer_type": ggml_backend_buffer_type_t (*)(int index). Null for other names.
void * moe_edge_cuda_proc_address(const char * name);
