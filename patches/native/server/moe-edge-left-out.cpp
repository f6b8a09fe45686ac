// Defines functions that llama.cpp's server calls and that this build does not compile: downloads and build
// information. Images are not downloaded: a request with an image's URL fails.

#include "build-info.h"
#include "download.h"

#include <stdexcept>

std::pair<long, std::vector<char>> common_remote_get_content(const std::string &, const common_remote_params &) {
    throw std::runtime_error("nothing is downloaded for a request: send the image itself as a data: URL");
}

int          llama_build_number() { return 0; }
const char * llama_build_info() { return "b0-moe-edge"; }  // clients expect this form
const char * llama_build_target() { return ""; }
const char * llama_commit() { return ""; }
const char * llama_compiler() { return ""; }
void         llama_print_build_info(const char *, FILE *) {}
