// Grammars of a client, bounded.

#pragma once

#include "llama.h"

#include <string>

extern "C" {

// Upstream's sampling calls these in the place of llama.h's own. They throw std::invalid_argument for a grammar that is
// none or takes too much, and so does what they make, for the one request whose it is.
llama_sampler * moe_edge_sampler_init_grammar(const llama_vocab * vocab, const char * text, const char * root);
llama_sampler * moe_edge_sampler_init_grammar_lazy_patterns(
    const llama_vocab * vocab, const char * text, const char * root, const char ** patterns, size_t n_patterns,
    const llama_token * tokens, size_t n_tokens);

}

// Whether the server ends whose thread this is.
bool moe_edge_server_ends();

// Return whether a grammar accepts a whole text. Throws std::invalid_argument for a grammar that cannot be read.
bool moe_edge_grammar_matches(const std::string & grammar, const std::string & text);
