// Declares the functions of the CUDA executor that ggml-cuda's own files call. The executor computes GGML_OP_MUL_MAT_ID
// for experts of which each has its own address and ggml type. Managed tensors are those with our buffer type.

#pragma once

#include "ggml.h"

#include <cstdint>

struct ggml_backend_cuda_context;

// Arguments for upstream's matrix kernels in our own launches; `extra` of the ids tensor points to them. The kernels
// then skip rows with id -1, which belong to other launches, and find the experts through these pointers.
struct moe_edge_cuda_ids {
    const void *    y       = nullptr;  // MMVQ: src1 as q8_1, for all launches of an op
    const int32_t * gate    = nullptr;  // MMVQ with a fused gate: the ids for the gate
    const int32_t * offsets = nullptr;  // MMQ: first block of each expert
};

// Returns whether a tensor is a placeholder for experts, with or without an attached store. Returns false for null and
// for tensors without a buffer.
bool moe_edge_cuda_is_managed(const ggml_tensor * weights);

// Returns whether an expert product must synchronize with the host. If not, it reads expert tables that stay on the
// device, and a CUDA graph may contain it.
bool moe_edge_cuda_needs_sync(const ggml_tensor * dst);

void moe_edge_cuda_mul_mat_id(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// Computes the gate and up products of experts and their activation (GLU). Returns how many of these three nodes it has
// computed. It is 3, or 2 if the GLU could not be fused. It is 0 if the tensors are not managed, or if the products
// cannot be fused at all.
int moe_edge_cuda_gate_up(ggml_backend_cuda_context & ctx, ggml_tensor * gate, ggml_tensor * up, ggml_tensor * glu);

// Records that a memory pool of this device has freed memory. Graphs that were captured before may still use that
// memory.
void moe_edge_cuda_pool_freed(int device);

// Returns whether a memory pool has freed memory since the last call for this backend, so that its captured graphs must
// be discarded. Called before each graph.
bool moe_edge_cuda_pool_shrank(const ggml_backend_cuda_context & ctx);

// Forgets everything about a backend. Must be called before the backend is destroyed, while its streams and its pool
// still exist.
void moe_edge_cuda_forget(const ggml_backend_cuda_context & ctx);

// Returns one of our functions by name, or null for other names. The names are:
//
//   "moe_edge_device": moe_edge_device * (*)(int index), which returns null if there is no such device
//   "moe_edge_buffer_type": ggml_backend_buffer_type_t (*)(int index)
void * moe_edge_cuda_proc_address(const char * name);
