// Tool calls with every chat template.

#pragma once

#include <string>

struct llama_model;

// The chat template to serve a model with: `given`, or the model's own where that is empty. Where tool
// calls have no form in it, it comes with one around it, which leaves conversations without tools as
// they are.
std::string moe_edge_template_with_tools(const llama_model * model, const std::string & given);
