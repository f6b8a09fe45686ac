// Tool calls with every chat template.

#pragma once

#include <string>

struct common_chat_templates;
struct llama_model;

// Returns the chat template for a model: `given`, or the model's own template if that is empty. If the template does
// not show tools or earlier calls to the model, a prefix that does is added. Conversations without tools are rendered
// as before.
std::string moe_edge_template_with_tools(const llama_model * model, const std::string & given);

// Returns whether the source of a template uses our own form of tool calls.
bool moe_edge_is_own_form(const std::string & source);

// Returns whether a template must receive text and call as two messages: it drops the text or the call of a message
// that has both, or renders them in another order, and renders two separate messages correctly.
bool moe_edge_wants_text_apart(const common_chat_templates * templates);
// Renders a short conversation to find out why a server does not start with a template. Throws moe_edge_refused with
// the template's error, or returns if there is none.
void moe_edge_try_template(const llama_model * model, const std::string & given);
