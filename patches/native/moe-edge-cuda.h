// The CUDA executor: GGML_OP_MUL_MAT_ID for experts that have individual addresses and types. This header declares the
// functions that ggml-cuda's own files call. Managed tensors are those with our buffer type.

#pragma once

#include "ggml.h"

#include <cstdint>

struct ggml_backend_cuda_context;

// `extra` of the ids tensor in our own launches points to this struct. Upstream's kernels then skip rows with id -1,
// which belong to other launches, and find experts by the addresses given here.
struct moe_edge_cuda_ids {
    const void *    y       = nullptr;  // MMVQ: src1 as q8_1, for all launches of an op
    const int32_t * gate    = nullptr;  // MMVQ with a fused gate: the ids for the gate
    const int32_t * offsets = nullptr;  // MMQ: first block of each expert
};

// Returns whether a tensor is a placeholder, attached to a store or not. False for null and for tensors without a
// buffer.
bool moe_edge_cuda_is_managed(const ggml_tensor * weights);

// Returns whether the op must synchronize with the host. False while the op reads tables that stay on the device; a
// CUDA graph may then contain the op.
bool moe_edge_cuda_needs_sync(const ggml_tensor * dst);

void moe_edge_cuda_mul_mat_id(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// Computes two products and their GLU. Returns how many of the three nodes were computed: 3; 2 without the GLU; or 0 if
// the products are not managed, or the batch is too large.
int moe_edge_cuda_gate_up(ggml_backend_cuda_context & ctx, ggml_tensor * gate, ggml_tensor * up, ggml_tensor * glu);

// Records that a pool freed memory of this device, which captured graphs may still use.
void moe_edge_cuda_pool_freed(int device);

// Returns whether the graphs captured by this backend must be discarded for that reason. Called before each graph.
bool moe_edge_cuda_pool_shrank(const ggml_backend_cuda_context & ctx);

// Must be called before the backend is destroyed, while its streams and its pool still exist.
void moe_edge_cuda_forget(const ggml_backend_cuda_context & ctx);

// Returns a function by name, or null for other names:
//   "moe_edge_device": moe_edge_device * (*)(int index), which returns null if there is no such device
//   "moe_edge_buffer_type": ggml_backend_buffer_type_t (*)(int index)
void * moe_edge_cuda_proc_address(const char * name);
