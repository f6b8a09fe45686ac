// Connects our code to upstream's image encoder (tools/mtmd).

#pragma once

#include "moe-edge-server.h"

#include <cstddef>
#include <string>

struct clip_ctx;

// Reserves the encoder's temporary buffers, and returns their size in bytes. width, height: size in pixels of one input
// of the encoder. An input is a scaled image, or one tile of an image that upstream has cut into tiles.
size_t moe_edge_encoder_scratch(clip_ctx * encoder, int width, int height);

// Returns whether the image that is being encoded on this thread is no longer needed. The argument is not used.
bool moe_edge_encoding_ends(void *);

// Returns the memory and the tokens that images of up to most_pixels pixels need. The parameters are those of
// moe_edge_measure_images. Throws std::runtime_error if the file cannot be used.
moe_edge_images moe_edge_images_of(const std::string & path, int max_tokens, int64_t most_pixels);
