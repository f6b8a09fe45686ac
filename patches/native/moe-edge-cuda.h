// Declares the functions of the CUDA executor that ggml-cuda's own files call. The executor computes GGML_OP_MUL_MAT_ID
// for experts that each have their own address and ggml type.

#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#include <cstdint>

struct ggml_backend_cuda_context;

// The id of a row whose expert is skipped. A row is one selected expert of one token. Upstream's vector kernel (MMVQ)
// fills the result of this row with zeros. It does not write rows with id -1, because another kernel launch computes
// them.
constexpr int32_t MOE_EDGE_CUDA_SKIPPED = -2;

// Arguments for our launches of upstream's matrix kernels, through which the kernels find the experts. The field
// `extra` of the ids tensor points to this struct. With these arguments, the kernels skip rows with id -1.
struct moe_edge_cuda_ids {
    const void *    y       = nullptr;  // MMVQ: src1 as q8_1, for all launches of an op
    const int32_t * gate    = nullptr;  // MMVQ with a fused gate: the ids for the gate
    const int32_t * offsets = nullptr;  // MMQ: first block of each expert
};

// Returns whether a tensor is a placeholder for experts, with or without an attached store. Returns false for null and
// for tensors without a buffer.
bool moe_edge_cuda_is_managed(const ggml_tensor * weights);

// Returns whether the expert product `dst` must synchronize with the host. Otherwise, the product reads expert tables
// that stay on the device, and a CUDA graph may contain it.
bool moe_edge_cuda_needs_sync(const ggml_tensor * dst);

void moe_edge_cuda_mul_mat_id(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// Returns whether `node` is a route node, and this device holds the experts of its layer. A route node reports the
// experts that a layer's router has selected to the store. The store then chooses the precision of each expert, or
// skips it.
bool moe_edge_cuda_routes(int device, const ggml_tensor * node);

// Runs a route node. Waits for the router, reports the selected experts to the store, and writes the routing weights (0
// for skipped experts). Returns false for other nodes.
bool moe_edge_cuda_route(ggml_backend_cuda_context & ctx, ggml_tensor * node);

// Computes the gate and up products of experts, and their activation (GLU) if it can be fused with them. Returns how
// many of these three nodes were computed: 3, 2 without the activation, or 0 if nothing was computed.
int moe_edge_cuda_gate_up(ggml_backend_cuda_context & ctx, ggml_tensor * gate, ggml_tensor * up, ggml_tensor * glu);

// Computes a graph in parts, so that a CUDA graph can contain some of them. In one kind of part, the host must wait for
// the device: from a layer's route node to its last expert product. The nodes between these parts need no wait. Returns
// false, and does nothing, for graphs without route nodes, for many tokens, and for graphs with only one part.
bool moe_edge_cuda_run_parts(ggml_backend_t backend, ggml_cgraph * graph, ggml_status (*compute)(ggml_backend_t, ggml_cgraph *));

// Records that a memory pool of this device has freed memory. CUDA graphs that were captured before may still use that
// memory.
void moe_edge_cuda_pool_freed(int device);

// Called before each graph. Returns whether a memory pool has freed memory since the last call for this backend. The
// backend's captured CUDA graphs must then be discarded.
bool moe_edge_cuda_begin_graph(const ggml_backend_cuda_context & ctx);

// Frees everything that is stored for a backend. Must be called before the backend is destroyed, while its streams and
// its pool still exist.
void moe_edge_cuda_forget(const ggml_backend_cuda_context & ctx);

// Returns the address of one of our functions, or null for any other name. "moe_edge_device" is a function
// `moe_edge_device * (int device)`. "moe_edge_buffer_type" is a function `ggml_backend_buffer_type_t (int device)`.
void * moe_edge_cuda_proc_address(const char * name);
