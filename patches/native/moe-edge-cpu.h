// Declares the CPU executor. It computes GGML_OP_MUL_MAT_ID for experts of which each has its own address and ggml
// type.

#pragma once

#include "ggml-backend.h"

#include <cstdint>

// Returns the total time in microseconds for which all compute threads have been runnable without a core, because other
// threads used the cores. Returns -1 if the kernel does not report it. May be called from any thread.
int64_t moe_edge_compute_delay_us();

// Returns the buffer type of expert tensors whose weights are in a store; never null. Its tensors are placeholders:
// they have their logical shape but take no memory.
ggml_backend_buffer_type_t moe_edge_cpu_buffer_type();

// Makes prompts multiply with this dense tensor by upstream's tiled kernel whenever that is faster. Does nothing unless
// upstream stores the tensor in the CPU's own layout (interleaved rows).
void moe_edge_tiles_for_prompts(ggml_tensor * tensor);
