// The devices of this process, and the buffer types of their placeholders.

#pragma once

#include "moe-edge-device.h"

#include "ggml-backend.h"

// Returns whether tensors of this buffer type are placeholders for experts.
bool moe_edge_is_placeholder_type(ggml_backend_buffer_type_t type);
// Returns the placeholder type of a store on this device; null stands for main memory.
ggml_backend_buffer_type_t moe_edge_placeholder_type(const moe_edge_device * device);
