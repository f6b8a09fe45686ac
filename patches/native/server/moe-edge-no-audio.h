// Takes the place of the audio decoder that upstream's mtmd-helper.cpp includes. It decodes nothing, so audio files are
// refused.

#pragma once

#define miniaudio_h
#define miniaudio_c

#include <cstddef>

enum ma_result { MA_SUCCESS, MA_ERROR };
enum ma_format { ma_format_f32 };
using ma_uint64 = unsigned long long;
struct ma_decoder {};
struct ma_decoder_config {};

inline ma_decoder_config ma_decoder_config_init(ma_format, int, int) { return {}; }
inline ma_result ma_decoder_init_memory(const void *, size_t, const ma_decoder_config *, ma_decoder *) { return MA_ERROR; }
inline ma_result ma_decoder_get_length_in_pcm_frames(ma_decoder *, ma_uint64 *) { return MA_ERROR; }
inline ma_result ma_decoder_read_pcm_frames(ma_decoder *, float *, ma_uint64, ma_uint64 *) { return MA_ERROR; }
inline void ma_decoder_uninit(ma_decoder *) {}
