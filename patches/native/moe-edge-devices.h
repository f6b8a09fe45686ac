// Declares functions for placeholders: expert tensors without data, whose data is in a store.

#pragma once

#include "moe-edge-device.h"

#include "ggml-backend.h"

// Returns whether tensors of this buffer type are placeholders for experts, whose data is in a store.
bool moe_edge_is_placeholder_type(ggml_backend_buffer_type_t type);
// Returns the buffer type of the placeholders (expert tensors without data) of a store on this device. device: null for
// a store in main memory.
ggml_backend_buffer_type_t moe_edge_placeholder_type(const moe_edge_device * device);
