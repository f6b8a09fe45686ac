#include "moe-edge-images.h"
#include "moe-edge-encoder.h"
#include "moe-edge-server.h"

#include "mtmd.h"
#include "mtmd-helper.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>

namespace {

// The index of the number of tokens in the result of server_tokens::serialize. The tokens follow this number.
const size_t COUNT_AT = 2;

// Returns the key of a token of an image (see moe_edge_keys). hash: hash of the image's id. place: index of the token
// in the image.
llama_token key_of(uint64_t hash, uint64_t place) {
    const uint64_t mixed = (hash + place) * 0x9e3779b97f4a7c15u;  // spreads consecutive places
    const llama_token key = llama_token(uint32_t(mixed >> 32) | 0x80000000u);
    return key == LLAMA_TOKEN_NULL ? std::numeric_limits<llama_token>::min() : key;
}

}  // namespace

llama_tokens moe_edge_keys(const server_tokens & tokens) {
    llama_tokens out(tokens.size());
    for (size_t i = 0; i < tokens.size();) {
        if (tokens[i] != LLAMA_TOKEN_NULL) {
            out[i] = tokens[i];
            i++;
            continue;
        }
        const mtmd_input_chunk * image = tokens.find_chunk(i).get();
        const char * id = mtmd_input_chunk_get_id(image);
        const uint64_t hash = std::hash<std::string>()(id ? id : "");
        const size_t n = mtmd_input_chunk_get_n_tokens(image);
        for (size_t place = 0; place < n; place++) {
            out[i + place] = key_of(hash, place);
        }
        i += n;
    }
    return out;
}

server_tokens moe_edge_with_images(const llama_tokens & keys, const server_tokens & images) {
    server_tokens out(llama_tokens(), images.has_mtmd);
    const auto start = [&images](size_t i) {
        while (images[i] != LLAMA_TOKEN_NULL) {
            i++;
        }
        return i;
    };
    size_t next = 0;
    for (size_t i = 0; i < keys.size();) {
        if (keys[i] >= 0) {
            out.push_back(keys[i]);
            i++;
            continue;
        }
        next = start(next);
        const mtmd_input_chunk * image = images.find_chunk(next).get();
        const size_t n = mtmd_input_chunk_get_n_tokens(image);
        out.push_back(image);
        next += n;
        i += n;
    }
    return out;
}

llama_tokens moe_edge_packed(const server_tokens & tokens) {
    const llama_tokens keys = moe_edge_keys(tokens);
    if (std::all_of(keys.begin(), keys.end(), [](llama_token key) { return key >= 0; })) {
        return keys;
    }
    const std::vector<char> bytes = tokens.serialize();
    llama_tokens out(bytes.size() / sizeof(llama_token));
    memcpy(out.data(), bytes.data(), bytes.size());
    std::copy(keys.begin(), keys.end(), out.begin() + COUNT_AT + 1);
    return out;
}

server_tokens moe_edge_unpacked(llama_tokens packed, bool has_images) {
    if (packed.size() > COUNT_AT && packed[0] == LLAMA_TOKEN_NULL) {
        const size_t n = std::min(size_t(uint32_t(packed[COUNT_AT])), packed.size() - COUNT_AT - 1);
        std::replace_if(packed.begin() + COUNT_AT + 1, packed.begin() + COUNT_AT + 1 + n,
                        [](llama_token key) { return key < 0; }, LLAMA_TOKEN_NULL);
    }
    return server_tokens::deserialize(packed, has_images);
}

// Upstream's conversion of a prompt with images, which moe_edge_process_images calls.
server_tokens process_mtmd_prompt(
    mtmd_context * encoder, const std::string & prompt, const std::vector<raw_buffer> & files,
    const mtmd_helper_init_opt & options, bool is_placeholder);

// Upstream calls this function instead of process_mtmd_prompt. Refuses prompts that upstream would compute wrongly.
server_tokens moe_edge_process_images(
        mtmd_context * encoder, const std::string & prompt, const std::vector<raw_buffer> & files,
        const mtmd_helper_init_opt & options, bool is_placeholder) {
    server_tokens tokens = process_mtmd_prompt(encoder, prompt, files, options, is_placeholder);
    if (!tokens.empty() && tokens[tokens.size() - 1] == LLAMA_TOKEN_NULL) {
        throw std::invalid_argument("the prompt ends with an image, but a model can only continue text: add text after it");
    }
    const size_t most = moe_edge_largest_step();
    for (size_t i = 0; mtmd_decode_use_non_causal(encoder, nullptr) && i < tokens.size();) {
        const size_t n = tokens[i] == LLAMA_TOKEN_NULL ? mtmd_input_chunk_get_n_tokens(tokens.find_chunk(i).get()) : 1;
        if (n > most) {
            throw std::invalid_argument(
                "an image has " + std::to_string(n) + " tokens, but this model computes an image at once, and --ubatch "
                "permits " + std::to_string(most) + " tokens at once: send a smaller image, or increase --ubatch");
        }
        i += n;
    }
    return tokens;
}

extern "C" {

int moe_edge_measure_images(
        const char * path, int32_t max_tokens, int64_t most_pixels, moe_edge_images * out, char * error, size_t error_size) {
    try {
        *out = moe_edge_images_of(path, max_tokens, most_pixels);
        return 0;
    } catch (const std::exception & failure) {
        snprintf(error, error_size, "%s", failure.what());
        return -1;
    }
}

}  // extern "C"
