// Tool calls with every chat template.

#pragma once

#include <string>

struct common_chat_templates;
struct llama_model;

// Return the chat template to serve a model with: `given`, or the model's own if that is empty. If the template does not
// show tools or earlier calls to the model, it comes with a prefix that does. Conversations without tools render as before.
std::string moe_edge_template_with_tools(const llama_model * model, const std::string & given);

// Return whether a template's source is one that calls tools in a form of ours.
bool moe_edge_is_own_form(const std::string & source);

// Return whether a template drops the text or the call of a message with both, or renders them in another order, and
// renders them well as two messages.
bool moe_edge_wants_text_apart(const common_chat_templates * templates);
// Renders a short conversation, to say why a server does not start with a template. Throws moe_edge_refused with what
// the template raised; returns where it raised nothing.
void moe_edge_try_template(const llama_model * model, const std::string & given);
