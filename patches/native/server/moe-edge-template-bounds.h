// Limits for chat templates, and checks before upstream reads them.

#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <string>

#include "moe-edge-bounds.h"

struct llama_model;

// Returns the limits on the templates that a thread renders, for one request or for the start of a server.
moe_edge_bounded moe_edge_template_bounds(std::function<bool()> is_given_up, size_t input_bytes);

// Checks the size and the syntax of a template, or of the model's own templates if `given` is empty. Throws
// moe_edge_refused with one sentence.
void moe_edge_check_template(const llama_model * model, const std::string & given);

// Throws moe_edge_refused with one line about a template's error.
[[noreturn]] void moe_edge_template_failed(const std::exception & failure);
