// Grammars of a client, bounded.

#pragma once

#include "llama.h"

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

struct common_params_sampling;

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

// A turn at reading a schema or a grammar, which takes a core for up to half a second. One thread has it at a time, so that
// requests whose schemas are refused leave the other cores to the answers. Throws std::invalid_argument if the request of
// this thread is given up while it waits.
class moe_edge_grammar_turn {
  public:
    moe_edge_grammar_turn();

  private:
    static std::recursive_timed_mutex & turn();
    std::unique_lock<std::recursive_timed_mutex> lock;
};

// Holds a grammar that was read before its request was queued.
using moe_edge_prepared_grammar = std::shared_ptr<const void>;

// Read the grammar of a task on the thread of its request, so that the thread which decodes only copies it, as long as
// `made` lives. The work of a first token is tried, too. Throws std::invalid_argument for a grammar that cannot be read, takes too much work, or is given up.
void moe_edge_prepare_grammar(
    const llama_model * model, common_params_sampling sampling, const std::function<bool()> & is_given_up,
    std::vector<moe_edge_prepared_grammar> & made);
