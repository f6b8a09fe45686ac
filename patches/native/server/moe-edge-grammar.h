// Grammars that clients send, with limits.

#pragma once

#include "llama.h"

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

struct common_params_sampling;

extern "C" {

// Upstream's sampling calls these functions instead of those of llama.h. They, and the samplers that they create, throw
// std::invalid_argument if the grammar is invalid or takes too much work. Only the request with this grammar fails.
llama_sampler * moe_edge_sampler_init_grammar(const llama_vocab * vocab, const char * text, const char * root);
llama_sampler * moe_edge_sampler_init_grammar_lazy_patterns(
    const llama_vocab * vocab, const char * text, const char * root, const char ** patterns, size_t n_patterns,
    const llama_token * tokens, size_t n_tokens);

}

// Returns whether the server whose decode thread this is, is stopping.
bool moe_edge_server_ends();

// Returns whether a grammar accepts a whole text. Throws std::invalid_argument if the grammar is invalid.
bool moe_edge_grammar_matches(const std::string & grammar, const std::string & text);

// A lock for reading a schema or a grammar, which occupies a core for up to half a second. Only one thread may do this
// at a time, so that requests with expensive schemas leave the other cores to the answers. Throws std::invalid_argument
// if the request of this thread is given up while it waits.
class moe_edge_grammar_turn {
  public:
    moe_edge_grammar_turn();

  private:
    static std::recursive_timed_mutex & turn();
    std::unique_lock<std::recursive_timed_mutex> lock;
};

// Keeps a grammar that was read before its request was queued.
using moe_edge_prepared_grammar = std::shared_ptr<const void>;

// Reads the grammar of a task on the thread of its request. While `made` exists, the decode thread only copies the
// grammar. Also tries the work for a first token. Throws std::invalid_argument if the grammar is invalid, takes too
// much work, or the request is given up.
void moe_edge_prepare_grammar(
    const llama_model * model, common_params_sampling sampling, const std::function<bool()> & is_given_up,
    std::vector<moe_edge_prepared_grammar> & made);
