// Where a forward's time goes: seconds on the calling thread by part, which waits for every part's threads.
#pragma once

#include <chrono>

namespace pt {

enum Part { MHC, INPUTS, QUERIES, ENTRIES, ATTENTION, OUTPUT, ROUTER, EXPERTS, HEAD, LINEAR, COMBINE, NUM_PARTS };

inline const char* const PART_NAMES[NUM_PARTS] = {"mhc",     "inputs", "queries", "entries", "attention", "output",
                                                  "router", "experts", "head",    "linear",  "combine"};

struct Profile {
    bool is_on = false;
    double seconds[NUM_PARTS] = {};
};

inline Profile profile;  // of one thread's forwards: timers of several would be added up without order

// Adds its lifetime to a part.
class Timed {
public:
    explicit Timed(Part part) : part(part) {
        if (profile.is_on) started = Clock::now();
    }
    ~Timed() {
        if (profile.is_on) profile.seconds[part] += std::chrono::duration<double>(Clock::now() - started).count();
    }

private:
    typedef std::chrono::steady_clock Clock;
    Part part;
    Clock::time_point started;
};

}  // namespace pt
