// Images in requests. In upstream's lists of tokens, each token of an image is LLAMA_TOKEN_NULL, and the image's data is
// stored elsewhere.

#pragma once

#include "server-common.h"

#include <vector>

// Returns a copy of `tokens` in which each token of an image is replaced by a key, a number below -1. A key depends
// only on the contents of the image's file and on the token's index in the image. Lists with keys can therefore be
// compared.
llama_tokens moe_edge_keys(const server_tokens & tokens);

// Converts a list that moe_edge_keys has made back to upstream's form. images: a list with the same images in the same
// order. The result receives its images from this list.
server_tokens moe_edge_with_images(const llama_tokens & keys, const server_tokens & images);

// Returns the list of tokens that llama_state_seq_save_file stores for a sequence. Without images, this is the list of
// its tokens. With images, it is the output of server_tokens::serialize, in which keys (see moe_edge_keys) replace the
// tokens of images.
llama_tokens moe_edge_packed(const server_tokens & tokens);

// Returns the tokens from which moe_edge_packed has made `packed`. has_images: whether the server has an image encoder.
// Throws std::runtime_error if `packed` is damaged, or if it contains images and the server has no image encoder.
server_tokens moe_edge_unpacked(llama_tokens packed, bool has_images);

// Returns the micro-batch size, in tokens, of the server to which this thread is submitting a request. Returns SIZE_MAX
// if this thread is not submitting a request.
size_t moe_edge_largest_step();
