// Work sharing and scratch memory. Neither changes a result: every output element is computed by one thread, in an
// order of its own.
#pragma once

#include <cstdlib>
#include <new>

namespace pt {

// Run body(task) for every task on up to `threads` threads of the process's OpenMP pool.
template <class Body>
inline void share(long tasks, int64_t threads, Body body) {
    if (threads <= 1 || tasks <= 1) {
        for (long task = 0; task < tasks; task++) body(task);
        return;
    }
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (long task = 0; task < tasks; task++) body(task);
}

// Grow-only memory of one thread and purpose, so that a step allocates nothing.
struct Buffer {
    void* memory = nullptr;
    size_t size = 0;
    ~Buffer() { free(memory); }
    template <class T>
    T* of(long count) {
        size_t needed = (count * sizeof(T) + 127) / 64 * 64;
        if (needed > size) {
            free(memory);
            memory = aligned_alloc(64, needed);
            if (!memory) throw std::bad_alloc();
            size = needed;
        }
        return static_cast<T*>(memory);
    }
};

template <class Tag, class T>
inline T* scratch(long count) {
    static thread_local Buffer own;
    return own.of<T>(count);
}

}  // namespace pt

// A buffer of its own for each place in the source that asks, and for each thread.
#define PT_SCRATCH(type, count)                   \
    ([&]() -> type* {                             \
        struct Tag {};                            \
        return pt::scratch<Tag, type>((count));   \
    }())
