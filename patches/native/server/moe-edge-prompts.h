// The prompts that a server holds: those of its slots, and copies of earlier ones. All functions are called on the thread
// that computes the server's steps, or after it has returned.

#pragma once

#include "moe-edge-server-context.h"
#include "moe-edge-server.h"

#undef llama_process
#undef llama_state_seq_save_file
#undef server_prompt_cache
#undef update_gen_last
#undef validate

#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

// Returns `prompt` with the tokens of `held` wherever both stand for the same text. A model often answers in other tokens
// than its tokenizer makes of the answer's text. Texts are compared between control tokens, which no token crosses. Returns
// `prompt` as it is if one of the lists has a token that the vocabulary lacks.
llama_tokens moe_edge_as_held(const llama_vocab * vocab, const llama_tokens & prompt, const llama_tokens & held);

// What a request would make of a slot.
struct moe_edge_match {
    size_t spared;     // tokens of its prompt that are not read again
    bool   is_another; // the slot would lose tokens that belong to another conversation
};

class moe_edge_prompts {
public:
    // most_checkpoints: that upstream keeps of a slot.
    moe_edge_prompts(llama_context * context, int32_t n_slots, int32_t most_checkpoints);

    const bool has_part;  // the memory cannot be cut anywhere

    // copies: upstream's cache, nullptr if no copies are kept.
    void set_copies(server_prompt_cache * copies) { this->copies = copies; }

    void set_notes(const moe_edge_server_notes & notes) { this->notes = notes; }

    // Notes what somebody else knows of a slot that holds so many tokens.
    void note(int32_t slot, size_t n_tokens);

    // Limits the copies to so many bytes and returns how many they take.
    uint64_t keep(uint64_t n_bytes);

    // As moe_edge_server_place.
    void place(const moe_edge_slot & slot, server_task & task);

    moe_edge_match match(const moe_edge_slot & slot, const llama_tokens & prompt) const;

    // Returns whether the prompt that was placed last begins with everything that the slot held; true once.
    bool take_continues(int32_t slot);

    void forget(const moe_edge_slot & slot);

    // Writes a slot's tokens and state to a file, and the data of its checkpoints after that. Returns the bytes of the
    // first part, 0 if that fails.
    size_t save(const moe_edge_slot & slot, const char * path, std::vector<moe_edge_server_mark> & marks) const;

    // Replaces what a slot holds by the content of a file. marks: the places of checkpoints in the file, the latest of which
    // are read. Returns false if that fails; the slot is then empty.
    bool restore(const moe_edge_slot & slot, const char * path, const std::vector<moe_edge_server_mark> & marks);

private:
    using copy_iterator = std::list<server_prompt_cache_state>::iterator;

    // A note about the first n_tokens tokens of a prompt.
    struct noted {
        size_t                         n_tokens;
        std::shared_ptr<const int64_t> number;
    };

    struct slot_state {
        size_t prompt_end = 0;         // tokens of the last prompt
        size_t turn       = 0;         // tokens before the last turn, 0 in the first one
        bool   is_filed   = false;     // what it holds came from a file
        bool   continues  = false;
        std::vector<noted> notes = {};  // the shortest first
    };

    // A prompt compared with one that is held.
    struct comparison {
        llama_tokens prompt;  // as it is held
        size_t       common;  // first tokens that are the same
        size_t       spared;
    };

    struct choice {
        comparison    live, best;
        copy_iterator copy;  // which has `best`; the end if that is the slot itself
    };

    comparison compare(const llama_tokens & prompt, const server_prompt & held, int32_t n_ctx, llama_pos pos_min) const;
    choice choose(const moe_edge_slot & slot, const llama_tokens & prompt) const;
    bool is_another(const moe_edge_slot & slot, size_t common) const;
    void put_away(const moe_edge_slot & slot, size_t taken_bytes);
    bool bring(const moe_edge_slot & slot, server_prompt_cache_state & copy, bool is_whole);
    void go_back(int32_t slot, size_t n_tokens);

    llama_context * const     context;
    const llama_vocab * const vocab;
    const int32_t             n_window;  // 0 if the memory keeps all keys and values
    const size_t              most_checkpoints;
    server_prompt_cache *     copies = nullptr;
    std::vector<slot_state>   states;
    moe_edge_server_notes     notes = {};
    std::map<const server_prompt_cache_state *, std::vector<noted>> copies_notes;
};
