// The memory that stb_image allocates is zero at first. stb_image returns some damaged JPEG files as images before all
// pixels are written, and the others would show what was in the memory before, such as another client's request.

#pragma once

#include <cstdlib>

#define STBI_MALLOC(size)       calloc(1, size)
#define STBI_REALLOC(old, size) realloc(old, size)
#define STBI_FREE(old)          free(old)
