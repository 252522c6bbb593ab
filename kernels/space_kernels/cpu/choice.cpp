#include "choice.h"
#include "export.h"
#include "team.h"

#include <algorithm>
#include <limits>
#include <vector>

namespace KIND {

namespace {

constexpr int64_t BLOCK = 512;  // logits per cell; only a cell's greatest is kept
constexpr int64_t CELL = 16;

// Integers in the order of the floats: NaN lies beyond both infinities, and -0 equals 0. Compilers vectorise reductions
// over integers, which they may not for floats.
inline int32_t rank_of(float x) {
    x += 0.0f;
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits ^ ((bits >> 31) & 0x7fffffff);
}

const int32_t LEAST = rank_of(-INFINITY), MOST = rank_of(INFINITY);

inline int32_t greatest(const float* x, int64_t count) {
    int32_t found = std::numeric_limits<int32_t>::min();
    for (int64_t i = 0; i < count; ++i) found = std::max(found, rank_of(x[i]));
    return found;
}

inline int32_t smallest(const float* x, int64_t count) {
    int32_t found = std::numeric_limits<int32_t>::max();
    for (int64_t i = 0; i < count; ++i) found = std::min(found, rank_of(x[i]));
    return found;
}

float* ban(const Logits& logits, int64_t row) {
    float* x = logits.values + row * logits.stride;
    for (int64_t i = 0; i < logits.num_banned; ++i) x[logits.banned[i]] = -INFINITY;
    return x;
}

void greatest_of_row(const float* x, int64_t vocabulary, int64_t* id, bool* valid) {
    int32_t high = std::numeric_limits<int32_t>::min(), low = std::numeric_limits<int32_t>::max();
    int64_t where = 0;
    for (int64_t first = 0; first < vocabulary; first += BLOCK) {
        const int64_t count = std::min(BLOCK, vocabulary - first);
        const int32_t most = greatest(x + first, count);
        low = std::min(low, smallest(x + first, count));
        if (most > high) high = most, where = first;
    }
    while (rank_of(x[where]) != high) ++where;
    *id = where;
    *valid = high > LEAST && high < MOST && low >= LEAST;
}

struct Best {
    std::vector<int32_t> cells;  // the greatest of each cell
    std::vector<std::pair<int32_t, int32_t>> found;  // rank and id; smaller is better

    void of_row(const float* x, int64_t vocabulary, int64_t count, int64_t* ids, float* offsets) {
        int64_t cell = CELL;
        while (vocabulary / (2 * cell) >= 2 * count) cell *= 2;
        cells.clear();
        for (int64_t first = 0; first < vocabulary; first += cell)
            cells.push_back(greatest(x + first, std::min(cell, vocabulary - first)));
        // At least `count` logits are no smaller than the greatest logit of the count-th best cell.
        int32_t bound = std::numeric_limits<int32_t>::min();
        if (int64_t(cells.size()) > count) {
            order = cells;
            std::nth_element(order.begin(), order.begin() + count - 1, order.end(), std::greater<int32_t>());
            bound = order[count - 1];
        }
        found.clear();
        for (int64_t number = 0; number < int64_t(cells.size()); ++number) {
            if (cells[number] < bound) continue;
            const int64_t behind = std::min((number + 1) * cell, vocabulary);
            for (int64_t i = number * cell; i < behind; ++i)
                if (const int32_t rank = rank_of(x[i]); rank >= bound) found.push_back({~rank, int32_t(i)});
        }
        if (int64_t(found.size()) > count) {
            std::nth_element(found.begin(), found.begin() + count, found.end());
            found.resize(count);
        }
        std::sort(found.begin(), found.end(), [](auto a, auto b) { return a.second < b.second; });
        for (int64_t i = 0; i < count; ++i) {
            ids[i] = found[i].second;
            offsets[i] = x[ids[i]] > -INFINITY ? 0.0f : -INFINITY;
        }
    }

   private:
    std::vector<int32_t> order;
};

}  // namespace

void argmax(const Logits& logits, int64_t* ids, bool* valid, int num_threads) {
    share_out(num_threads, logits.rows, [&](int64_t first, int64_t last, bool) {
        for (int64_t row = first; row < last; ++row)
            greatest_of_row(ban(logits, row), logits.vocabulary, ids + row, valid + row);
    });
}

void best_of(const Logits& logits, int64_t count, int64_t* ids, float* offsets, int num_threads) {
    share_out(num_threads, logits.rows, [&](int64_t first, int64_t last, bool) {
        Best best;
        for (int64_t row = first; row < last; ++row)
            best.of_row(ban(logits, row), logits.vocabulary, count, ids + row * count, offsets + row * count);
    });
}

}  // namespace KIND

using namespace KIND;

extern "C" {

void EXPORT(argmax)(const Logits* logits, int64_t* ids, bool* valid, int num_threads) {
    argmax(*logits, ids, valid, num_threads);
}

void EXPORT(best_of)(const Logits* logits, int64_t count, int64_t* ids, float* offsets, int num_threads) {
    best_of(*logits, count, ids, offsets, num_threads);
}
}
