// Images in requests. In upstream's lists of tokens, each token of an image is LLAMA_TOKEN_NULL, and the image's data is
// stored elsewhere.

#pragma once

#include "server-common.h"

#include <vector>

// Returns a list of tokens in which each token of an image is a number below -1. The numbers depend only on the contents
// of the image's file and on the place in the image, so that lists of tokens can be compared.
llama_tokens moe_edge_keys(const server_tokens & tokens);

// Returns upstream's list of tokens for the numbers of moe_edge_keys. images: a list that contains the same images in
// the same order.
server_tokens moe_edge_with_images(const llama_tokens & keys, const server_tokens & images);

// Returns the numbers that a sequence's file stores: the tokens alone, or, if they contain images, upstream's
// serialized form with the numbers of moe_edge_keys as tokens.
llama_tokens moe_edge_packed(const server_tokens & tokens);

// Reverses moe_edge_packed. has_images: whether the server has an image encoder. Throws std::runtime_error if the
// numbers are damaged, or if they contain images and the server has no image encoder.
server_tokens moe_edge_unpacked(llama_tokens packed, bool has_images);

// Returns the most tokens that the server of the request on this thread computes at once.
size_t moe_edge_largest_step();
