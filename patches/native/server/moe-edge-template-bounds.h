// Declares limits for chat templates, and checks of a template before upstream reads it.

#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <string>

#include "moe-edge-bounds.h"

struct llama_model;

// Returns an object that limits the work of the chat templates that this thread renders while the object exists.
// is_given_up: called from time to time; when it returns true, rendering fails. input_bytes: size of the conversation
// that a template renders; the limits grow with it.
moe_edge_bounded moe_edge_template_bounds(std::function<bool()> is_given_up, size_t input_bytes);

// Checks the size and the syntax of a chat template. If `given` is empty, checks the templates in the model's file.
// Throws moe_edge_refused with one sentence if a template is not valid.
void moe_edge_check_template(const llama_model * model, const std::string & given);

// Throws moe_edge_refused with one line that says why a chat template failed. failure: the exception of the template
// engine.
[[noreturn]] void moe_edge_template_failed(const std::exception & failure);
