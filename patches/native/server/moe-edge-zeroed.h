// Makes stb_image allocate zeroed memory. stb_image accepts some damaged JPEG files although it has not written all
// pixels. Without zeroing, the other pixels would show earlier contents of the memory, such as another client's
// request.

#pragma once

#include <cstdlib>

#define STBI_MALLOC(size)       calloc(1, size)
#define STBI_REALLOC(old, size) realloc(old, size)
#define STBI_FREE(old)          free(old)
