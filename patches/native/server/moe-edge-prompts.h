// Manages the prompts of a server: those in its slots, and copies of the prompts of earlier conversations. All
// functions must be called on the decode thread, or after it has returned.

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

// Makes a prompt share more tokens with `held`, the tokens of a slot. A model often generates other tokens than its
// tokenizer makes from the same text. If a text between control tokens is the same in both lists, its tokens in the
// prompt are replaced by those of `held`. Returns the new prompt.
llama_tokens moe_edge_as_held(const llama_vocab * vocab, const llama_tokens & prompt, const llama_tokens & held);

// The expected result of computing a request's prompt on a slot.
struct moe_edge_match {
    size_t spared;     // tokens of its prompt that are reused
    bool   is_another; // the slot would lose tokens of another conversation
};

class moe_edge_prompts {
public:
    // Creates the records of a server's prompts, for a context with n_slots slots. most_checkpoints: the number of
    // checkpoints that upstream keeps for each slot.
    moe_edge_prompts(llama_context * context, int32_t n_slots, int32_t most_checkpoints);

    const bool has_part;  // a sequence can return only to checkpoints

    // Sets upstream's cache of copies of earlier prompts, or nullptr if no copies are kept.
    void set_copies(server_prompt_cache * copies) { this->copies = copies; }

    void set_notes(const moe_edge_server_notes & notes) { this->notes = notes; }

    // Saves the caller's state of the slot's sequence (such as a policy's state) as a note, and records that the note
    // belongs to the slot's first n_tokens tokens.
    void note(int32_t slot, size_t n_tokens);

    // Limits the copies of earlier prompts to n_bytes. Returns their size in bytes.
    uint64_t keep(uint64_t n_bytes);

    // See moe_edge_server_place.
    void place(const moe_edge_slot & slot, server_task & task);

    moe_edge_match match(const moe_edge_slot & slot, const llama_tokens & prompt) const;

    // Returns whether the slot's new prompt only appends tokens to those in the slot. Returns true at most once for
    // each prompt.
    bool take_continues(int32_t slot);

    void forget(const moe_edge_slot & slot);

    // Writes the tokens and the state of a slot to a file, followed by the data of its checkpoints, which are appended
    // to `marks`. Returns the size of the part before the checkpoints in bytes, or 0 on failure.
    size_t save(const moe_edge_slot & slot, const char * path, std::vector<moe_edge_server_mark> & marks) const;

    // Replaces the contents of a slot with the contents of a file. marks: the checkpoints in the file. If the slot may
    // keep fewer checkpoints, only the latest are restored. Returns false on failure, and the slot is then empty.
    bool restore(const moe_edge_slot & slot, const char * path, const std::vector<moe_edge_server_mark> & marks);

private:
    using copy_iterator = std::list<server_prompt_cache_state>::iterator;

    // A note (the saved caller's state of a sequence), made when the sequence consisted of the first n_tokens tokens of
    // a prompt.
    struct noted {
        size_t                         n_tokens;
        std::shared_ptr<const int64_t> number;
    };

    struct slot_state {
        size_t prompt_end = 0;         // number of tokens of the last prompt
        size_t turn       = 0;         // number of tokens before the last turn; 0 in the first turn
        bool   is_filed   = false;     // its contents came from a file
        bool   continues  = false;
        std::vector<noted> notes = {};  // ascending by length
    };

    // The result of comparing a prompt with the tokens of a slot, or of a copy of an earlier prompt.
    struct comparison {
        llama_tokens prompt;  // the result of moe_edge_as_held
        size_t       common;  // length of the common prefix
        size_t       spared;
    };

    struct choice {
        comparison    live, best;
        copy_iterator copy;  // the copy that has `best`; the end iterator if it is the slot itself
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
