// Jobs of two tasks that wait for each other: ends with 1 if a worker misses one, and the caller waits alone.
#include <cstdio>

#include "parallel.h"

typedef std::chrono::steady_clock Clock;
constexpr int JOBS = 3000;
constexpr auto PATIENCE = std::chrono::seconds(20);

int main() {
    for (int job = 0; job < JOBS; job++) {
        std::atomic<int> arrived{0};
        std::atomic<bool> missed{false};
        const auto until = Clock::now() + PATIENCE;
        pt::share(2, 2, [&](long) {
            arrived++;
            while (arrived.load() < 2 && !missed) {
                std::this_thread::yield();
                if (Clock::now() > until) missed = true;
            }
        });
        if (missed) {
            printf("the worker missed job %d\n", job);
            return 1;
        }
        // Workers sleep after 0.1 ms: some jobs must wake them, others find them awake.
        if (job % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return 0;
}
