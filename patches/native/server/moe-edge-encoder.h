// Connects our code to upstream's image encoder (tools/mtmd).

#pragma once

#include "moe-edge-server.h"

#include <cstddef>
#include <string>

struct clip_ctx;

// Reserves the encoder's temporary buffers for an image of this size in pixels, and returns their size in bytes. The
// image is one that upstream has prepared: scaled, or cut into tiles, of which this is one.
size_t moe_edge_encoder_scratch(clip_ctx * encoder, int width, int height);

// Returns whether the image that is being encoded on this thread is no longer needed. The argument is not used.
bool moe_edge_encoding_ends(void *);

// See moe_edge_measure_images. Throws std::runtime_error if the file cannot be used.
moe_edge_images moe_edge_images_of(const std::string & path, int max_tokens, int64_t most_pixels);
