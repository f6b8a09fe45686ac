// Tool calls with every chat template.

#pragma once

#include <string>

struct llama_model;

// The chat template to serve a model with: `given`, or the model's own where that is empty. Where tool
// calls have no form in it, it comes with one around it, which leaves conversations without tools as
// they are.
std::string moe_edge_template_with_tools(const llama_model * model, const std::string & given);

// Renders a short conversation, to say why a server does not start with a template. Throws moe_edge_refused with what
// the template raised; returns where it raised nothing.
void moe_edge_try_template(const llama_model * model, const std::string & given);
