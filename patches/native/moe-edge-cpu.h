// The CPU executor: GGML_OP_MUL_MAT_ID over experts that differ in address and type.

#pragma once

#include "ggml-backend.h"

#include <cstdint>

// How long the threads that compute have been ready without a core, all together and in all, in microseconds; -1 where
// the kernel does not say.
int64_t moe_edge_compute_delay_us();

// Weight buffer type of managed expert tensors. Its tensors are placeholders: they keep
// their logical shape and take no memory. Never null.
ggml_backend_buffer_type_t moe_edge_cpu_buffer_type();

// Prompts multiply with this tensor by tiles, where that is faster, if upstream has it in the CPU's own layout; else this
// does nothing.
void moe_edge_tiles_for_prompts(ggml_tensor * tensor);
