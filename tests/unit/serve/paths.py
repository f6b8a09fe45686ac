"""Paths of the server that several tests use."""

CHAT, COMPLETIONS, NATIVE = "/v1/chat/completions", "/v1/completions", "/completion"
RESPONSES, MESSAGES, INFILL = "/v1/responses", "/v1/messages", "/infill"
COUNT = "/v1/messages/count_tokens"
