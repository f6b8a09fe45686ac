// The CPU executor: GGML_OP_MUL_MAT_ID for experts that have individual addresses and types.

#pragma once

#include "ggml-backend.h"

#include <cstdint>

// Returns the total time in microseconds for which all compute threads have been runnable without a core, or -1 if the
// kernel does not report it. May be called from any thread.
int64_t moe_edge_compute_delay_us();

// Returns the weight buffer type of managed expert tensors, never null. Its tensors are placeholders: they keep their
// logical shape but take no memory.
ggml_backend_buffer_type_t moe_edge_cpu_buffer_type();

// If upstream stores this dense tensor in the CPU's own layout, makes prompts multiply with it by tiles whenever that
// is faster. Otherwise does nothing.
void moe_edge_tiles_for_prompts(ggml_tensor * tensor);
