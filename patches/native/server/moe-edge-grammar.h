// Declares functions for grammars that clients send, with limits on their work.

#pragma once

#include "llama.h"

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

struct common_params_sampling;

extern "C" {

// Create samplers for a grammar. Upstream's sampling calls these functions instead of those of llama.h. The functions
// and their samplers throw std::invalid_argument if the grammar is invalid or takes too much work. Then only the
// request with this grammar fails.
llama_sampler * moe_edge_sampler_init_grammar(const llama_vocab * vocab, const char * text, const char * root);
llama_sampler * moe_edge_sampler_init_grammar_lazy_patterns(
    const llama_vocab * vocab, const char * text, const char * root, const char ** patterns, size_t n_patterns,
    const llama_token * tokens, size_t n_tokens);

}

// Returns whether the calling thread is the decode thread of a server that is stopping.
bool moe_edge_server_ends();

// Returns whether a grammar accepts a text from its beginning to its end. Throws std::invalid_argument if the grammar
// is invalid.
bool moe_edge_grammar_matches(const std::string & grammar, const std::string & text);

// A lock that a thread must hold while it reads a schema or a grammar, which may occupy a core for half a second.
// Requests with expensive schemas therefore occupy only one core, and leave the others to the answers. Throws
// std::invalid_argument if the request of this thread is given up while the thread waits for the lock.
class moe_edge_grammar_turn {
  public:
    moe_edge_grammar_turn();

  private:
    static std::recursive_timed_mutex & turn();
    std::unique_lock<std::recursive_timed_mutex> lock;
};

// Keeps a grammar in memory that was read before its request was queued.
using moe_edge_prepared_grammar = std::shared_ptr<const void>;

// Reads the grammar of a task on the thread of its request, and appends it to `made`. While `made` exists, the decode
// thread only copies the grammar. Also tries the work for the first token of an answer. Throws std::invalid_argument if
// the grammar is invalid, if it takes too much work, or if the request is given up.
void moe_edge_prepare_grammar(
    const llama_model * model, common_params_sampling sampling, const std::function<bool()> & is_given_up,
    std::vector<moe_edge_prepared_grammar> & made);
