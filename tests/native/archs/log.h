// The log macros that upstream's test-llama-archs.cpp uses. They print nothing.

#pragma once

enum { LOG_LEVEL_DEBUG, LOG_LEVEL_ERROR };

#define LOG(...)     ((void) 0)
#define LOG_INF(...) ((void) 0)
#define LOG_ERR(...) ((void) 0)
