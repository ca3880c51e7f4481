// Work sharing and scratch memory. Neither changes a result: every output element is computed by one thread, in an
// order of its own.
//
// A pool of our own instead of OpenMP: a region of OpenMP ends when every thread has passed its barrier, so where
// another program has the second core, each of a step's many short regions waits for a time slice. Here the caller
// takes every task that no worker has taken, and waits only for tasks that are under way.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace pt {

inline void pause() {
#if defined(__SSE2__)
    _mm_pause();
#endif
}

class Pool {
public:
    typedef void (*Call)(const void* body, long task);

    // Never destroyed: its threads sleep until the process ends.
    static Pool& instance() {
        static Pool* pool = new Pool;
        return *pool;
    }

    void run(long tasks, int64_t threads, Call call, const void* body) {
        std::unique_lock<std::mutex> own(in_use, std::try_to_lock);
        if (!own.owns_lock()) {  // another thread of the process is in a forward of its own
            for (long task = 0; task < tasks; task++) call(body, task);
            return;
        }
        for (; num_workers < threads - 1; num_workers++) std::thread(&Pool::work, this, num_workers).detach();
        // Closed while the job is written, so that no worker can take a task of a job that is half another's.
        const uint64_t number = (ticket.load() >> 32) + 1;
        ticket = number << 32 | CLOSED;
        job_call = call, job_body = body, job_tasks = tasks, job_workers = threads - 1, finished = 0;
        ticket = number << 32;
        if (sleeping.load()) {
            { std::lock_guard<std::mutex> lock(mutex); }
            wake.notify_all();
        }
        take_tasks(0);
        for (long turn = 0; finished.load() != tasks; turn++) {
            pause();
            // The worker may need this very core to go on.
            if (turn > 2000) std::this_thread::yield();
        }
    }

private:
    static constexpr uint64_t CLOSED = 0xffffffff;
    // Longer than the host's work between two forwards of few rows: waking a sleeper costs more than it saves.
    static constexpr auto SPIN = std::chrono::microseconds(250);

    std::mutex in_use, mutex;
    std::condition_variable wake;
    int64_t num_workers = 0;
    std::atomic<int> sleeping{0};
    std::atomic<uint64_t> ticket{CLOSED};  // number of the job, and its next task
    std::atomic<Call> job_call{nullptr};
    std::atomic<const void*> job_body{nullptr};
    std::atomic<long> job_tasks{0}, job_workers{0}, finished{0};

    // Take tasks of the current job until there are none; the caller is worker 0.
    void take_tasks(int64_t worker) {
        for (;;) {
            uint64_t seen = ticket.load();
            const uint64_t task = seen & CLOSED;
            const Call call = job_call;
            const void* body = job_body;
            if (task == CLOSED || long(task) >= job_tasks || worker > job_workers) return;
            // Still the same job and task: what was read above belongs to it.
            if (!ticket.compare_exchange_weak(seen, seen + 1)) continue;
            call(body, long(task));
            finished.fetch_add(1);
        }
    }

    void work(int64_t index) {
        uint64_t done = 0, seen = 0;
        // A job that is still being written is not there yet: a worker that took it for seen would miss it.
        auto is_open = [&] {
            seen = ticket.load();
            return seen >> 32 != done && (seen & CLOSED) != CLOSED;
        };
        for (;;) {
            auto until = std::chrono::steady_clock::now() + SPIN;
            for (int turn = 1; !is_open(); turn++) {
                pause();
                if (turn % 64 || std::chrono::steady_clock::now() < until) continue;
                std::unique_lock<std::mutex> lock(mutex);
                sleeping++;
                wake.wait(lock, is_open);
                sleeping--;
                break;
            }
            done = seen >> 32;
            take_tasks(index + 1);
        }
    }
};

// Run body(task) for every task, on up to `threads` threads.
template <class Body>
inline void share(long tasks, int64_t threads, const Body& body) {
    if (threads <= 1 || tasks <= 1) {
        for (long task = 0; task < tasks; task++) body(task);
        return;
    }
    Pool::instance().run(tasks, threads, [](const void* b, long task) { (*static_cast<const Body*>(b))(task); }, &body);
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
