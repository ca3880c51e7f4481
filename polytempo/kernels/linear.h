// Matrix products over rows and columns of any number: which tile a thread takes never changes an element's sum.
#pragma once

#include <algorithm>

#include "packed.h"
#include "parallel.h"

namespace pt {

constexpr long ROWS_PER_TASK = 64;
constexpr long AHEAD_BYTES = 4096;  // of weights to ask memory for before they are needed
constexpr long PANEL_BYTES = 16384;  // of weights that stay in the first-level cache while rows pass by

// y[r][0..N) = x[r][0..K) . w[0..N)[0..K); rows are given by pointer, so that they may lie in a ring or a gather.
template <class T, class O = T>
struct Product {
    const T* const* x;
    O* const* y;
    Weights<T> w;
    long rows, K, N;

    long panel() const { return std::max(8L, PANEL_BYTES / long(K * sizeof(T)) / 4 * 4); }
    long row_tasks() const { return (rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK; }
    long tasks() const { return row_tasks() * ((N + panel() - 1) / panel()); }

    // Rows [column, last) of w, side by side.
    const T* panel_weights(long column, long last) const {
        return w.rows(column, last, K, w.is_plain() ? nullptr : PT_SCRATCH(T, panel() * K));
    }

    // `weights` are those of `column`.
    template <int R>
    void some_rows(long row, long column, long last, const T* weights, bool is_first) const {
        const long quad = 4 * K, ahead = quad * ((AHEAD_BYTES - 1) / long(quad * sizeof(T)) + 1);
        for (; column + 4 <= last; column += 4, weights += quad) {
            if (is_first) prefetch(weights + ahead, quad * sizeof(T));
            const T* columns[4] = {weights, weights + K, weights + 2 * K, weights + 3 * K};
            store_rows<R, 4>(y + row, column, dots<T, R, 4>(x + row, columns, K));
        }
        for (; column < last; column++, weights += K)
            store_rows<R, 1>(y + row, column, dots<T, R, 1>(x + row, &weights, K));
    }

    void tile(long row, long last_row, long column, long last_column) const {
        const T* weights = panel_weights(column, last_column);
        const long first = w.is_plain() ? row : -1;  // of a panel that was just expanded all rows are in the cache
        for (; row + 4 <= last_row; row += 4) some_rows<4>(row, column, last_column, weights, row == first);
        if (last_row - row == 3) some_rows<3>(row, column, last_column, weights, row == first);
        if (last_row - row == 2) some_rows<2>(row, column, last_column, weights, row == first);
        if (last_row - row == 1) some_rows<1>(row, column, last_column, weights, row == first);
    }

    void task(long index) const {
        long row = index % row_tasks() * ROWS_PER_TASK, column = index / row_tasks() * panel();
        tile(row, std::min(rows, row + ROWS_PER_TASK), column, std::min(N, column + panel()));
    }

    void run_serial() const {
        for (long column = 0; column < N; column += panel()) tile(0, rows, column, std::min(N, column + panel()));
    }
};

// Several products that do not depend on each other, in one parallel region.
template <class T>
inline void run(const Product<T>* products, long count, int64_t threads) {
    long total = 0;
    for (long i = 0; i < count; i++) total += products[i].tasks();
    share(total, threads, [=](long task) {
        const Product<T>* product = products;
        while (task >= product->tasks()) task -= (product++)->tasks();
        product->task(task);
    });
}

// Pointers to the rows of a matrix.
template <class T>
inline T** row_pointers(T** pointers, T* base, long rows, long stride) {
    for (long row = 0; row < rows; row++) pointers[row] = base + row * stride;
    return pointers;
}

}  // namespace pt
