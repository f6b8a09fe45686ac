// Declares functions that make tool calls work with every chat template.

#pragma once

#include <string>

struct common_chat_templates;
struct llama_model;

// Returns the chat template for a model: `given`, or the model's own template if `given` is empty. If the template does
// not show tools or earlier calls to the model, a prefix is added that makes it show them. Conversations without tools
// are rendered as before.
std::string moe_edge_template_with_tools(const llama_model * model, const std::string & given);

// Returns whether a template's source begins with our prefix, which describes tools to the model in our own form.
bool moe_edge_is_own_form(const std::string & source);

// Returns whether a template must receive an assistant's text and tool call as two messages. It must if it drops or
// reorders them when both are in one message, but renders two messages correctly.
bool moe_edge_wants_text_apart(const common_chat_templates * templates);
// Renders a short conversation with a chat template. Throws moe_edge_refused with the template's error if that fails.
void moe_edge_try_template(const llama_model * model, const std::string & given);
