// Matrix products over rows and columns of any number: which tile a thread takes never changes an element's sum.
#pragma once

#include <algorithm>

#include "packed.h"
#include "parallel.h"
#include "profile.h"

namespace pt {

constexpr long ROWS_PER_TASK = 64;
constexpr long AHEAD_BYTES = 6144;  // of weights to ask memory for before they are needed, if rows pass by once
constexpr long BURST_BYTES = 2048;  // that a single pass may ask for at once
constexpr long TASKS_PER_THREAD = 4;  // of one product: more share the work more evenly, fewer cost less
constexpr long PANEL_BYTES = 8192;  // of weights that stay in the first-level cache while rows pass by

// Asks memory for what comes next, evenly while other things are done: asked for at once, it would stall them.
struct Ahead {
    const char* next;
    long stride;     // from one step to the next
    bool by_chunks;  // a step is long: it asks for its part evenly too
    const char* step() {
        if (!by_chunks) prefetch(next, stride);
        const char* now = next;
        next += stride;
        return now;
    }
};

// y[r][0..N) = x[r][0..K) . w[0..N)[0..K); rows are given by pointer, so that they may lie in a ring or a gather.
template <class T, class O = T>
struct Product {
    const T* const* x;
    O* const* y;
    Weights<T> w;
    long rows, K, N;

    long panel() const { return std::max(8L, PANEL_BYTES / long(K * sizeof(T)) / 4 * 4); }
    long row_tasks() const { return (rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK; }
    // Columns of a task: neighbouring panels, so that what a thread asks memory for is what it needs next.
    long stretch(int64_t threads) const { return (N / (threads * TASKS_PER_THREAD) / panel() + 1) * panel(); }
    long tasks(int64_t threads) const { return row_tasks() * ((N + stretch(threads) - 1) / stretch(threads)); }

    // Rows [column, last) of w, side by side.
    const T* panel_weights(long column, long last) const {
        return w.rows(column, last, K, w.is_plain() ? nullptr : PT_SCRATCH(T, panel() * K));
    }

    // R rows over columns; `ahead` walks through those behind them as they do. `columns(c)` reads from c on.
    template <int R, class Columns>
    void some_rows(long row, long column, long last, Ahead& ahead, const Columns& columns) const {
        for (; column + 4 <= last; column += 4) {
            const char* next = ahead.step();
            const v16 out = ahead.by_chunks ? dot_columns<T, R, 4, true>(x + row, columns(column), K, next)
                                            : dot_columns<T, R, 4>(x + row, columns(column), K);
            store_rows<R, 4>(y + row, column, out);
        }
        for (; column < last; column++)
            store_rows<R, 1>(y + row, column, dot_columns<T, R, 1>(x + row, columns(column), K));
    }

    // The same of all rows.
    template <class Columns>
    void all_rows(long row, long last_row, long column, long last_column, Ahead& ahead, const Columns& columns) const {
        for (; row + 4 <= last_row; row += 4) some_rows<4>(row, column, last_column, ahead, columns);
        if (last_row - row == 3) some_rows<3>(row, column, last_column, ahead, columns);
        if (last_row - row == 2) some_rows<2>(row, column, last_column, ahead, columns);
        if (last_row - row == 1) some_rows<1>(row, column, last_column, ahead, columns);
    }

    void tile(long row, long last_row, long column, long last_column) const {
        const long passes = (last_row - row + 3) / 4, quads = (last_column - column + 3) / 4;
        const bool in_place = w.in_place(passes);
        // One pass uses weights as fast as they come; of several the first needs its whole panel, as expanding does.
        const bool is_steady = passes == 1 && in_place;
        const long distance = is_steady ? ((AHEAD_BYTES - 1) / (4 * w.row_bytes(K)) + 1) * 4 : last_column - column;
        const long row_bytes = w.row_bytes(K), bytes = (last_column - column) * row_bytes;
        Ahead ahead{(const char*)w.stored(column + distance, K),
                    is_steady ? 4 * row_bytes : bytes / (passes * quads) + 63 & ~63L,
                    is_steady && 4 * row_bytes > BURST_BYTES};
        if (!w.is_plain() && in_place) {
            w.read_stored(K, [&](const auto& from) { all_rows(row, last_row, column, last_column, ahead, from); });
            return;
        }
#if defined(PT_WIDENED_PANELS)
        if constexpr (std::is_same_v<T, bf16>) {
            if (!in_place) {
                float* memory = PT_SCRATCH(float, panel() * widened_width(K));
                const WidenedColumns all = w.widened_rows(column, last_column, K, memory);
                all_rows(row, last_row, column, last_column, ahead, [&](long c) { return all.from(c - column); });
                return;
            }
        }
#endif
        const T* weights = panel_weights(column, last_column);
        all_rows(row, last_row, column, last_column, ahead, [&](long c) {
            return PanelColumns<T>{{}, weights + (c - column) * K, K};
        });
    }

    void columns(long row, long last_row, long column, long last_column) const {
        for (; column < last_column; column += panel())
            tile(row, last_row, column, std::min(last_column, column + panel()));
    }

    void task(long index, int64_t threads) const {
        const long row = index % row_tasks() * ROWS_PER_TASK, column = index / row_tasks() * stretch(threads);
        columns(row, std::min(rows, row + ROWS_PER_TASK), column, std::min(N, column + stretch(threads)));
    }

    void run_serial() const { columns(0, rows, 0, N); }
};

// Several products that do not depend on each other, in one parallel region.
template <class T>
inline void run(const Product<T>* products, long count, int64_t threads) {
    long total = 0;
    for (long i = 0; i < count; i++) total += products[i].tasks(threads);
    share(total, threads, [=](long task) {
        const Product<T>* product = products;
        while (task >= product->tasks(threads)) task -= (product++)->tasks(threads);
        product->task(task, threads);
    });
}

// Pointers to the rows of a matrix.
template <class T>
inline T** row_pointers(T** pointers, T* base, long rows, long stride) {
    for (long row = 0; row < rows; row++) pointers[row] = base + row * stride;
    return pointers;
}

}  // namespace pt
