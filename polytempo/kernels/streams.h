// Streams of a forward's tokens, kept for the MTP block's later keys. Twin: cache/streams.py.
#pragma once

#include <algorithm>
#include <cstring>

#include "args.h"
#include "parallel.h"

namespace pt {

// Copies streams [T, size] to the tokens' cells of kept [slots, window, size], by position modulo the window.
template <class T>
void keep_streams(const PtTokens& tokens, const T* streams, T* kept, long window, long size) {
    const long group = 16;
    share((tokens.count + group - 1) / group, tokens.threads, [=](long task) {
        for (long token = task * group; token < std::min(tokens.count, task * group + group); token++) {
            const int64_t slot = tokens.slots[token], later = token + window;
            // A later token of the same row takes the cell of one that is a window before it.
            if (later < tokens.count && tokens.slots[later] == slot) continue;
            memcpy(kept + (slot * window + tokens.positions[token] % window) * size, streams + token * size,
                   size * sizeof(T));
        }
    });
}

}  // namespace pt
